"""Tensor and sequence parallelism: sharded weights inside blocks, sharded tokens between them."""
