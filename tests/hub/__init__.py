"""Models whose modelling code is that of transformers."""
