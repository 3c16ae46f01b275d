"""Watching of ranks."""
