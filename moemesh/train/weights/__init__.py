"""Weights of a run: where they come from, saved with its state, and converted."""
