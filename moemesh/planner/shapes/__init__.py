"""Descriptions of models by their sizes, from every source."""
