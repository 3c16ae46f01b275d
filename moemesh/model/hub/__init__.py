"""Models of transformers' own modelling code: built, read, and with our experts in place."""
