"""Weights in the layout of transformers: a folder of safetensors, read by slices and written."""
