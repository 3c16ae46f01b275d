"""The plain model: one device, no ranks; parallelism enters by the seams."""
