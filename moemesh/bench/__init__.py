"""Measuring: links, layers and whole steps, against bounds measured in the same run."""
