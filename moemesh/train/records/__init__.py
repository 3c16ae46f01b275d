"""Records of a run: its folder, and the files that it writes and compares there."""
