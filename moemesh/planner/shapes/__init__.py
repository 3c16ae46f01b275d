"""Descriptions of models by their sizes, from wherever they come."""
