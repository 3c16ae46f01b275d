"""Checkpoints: sharded, hashed, committed by one rename, readable in any layout."""
