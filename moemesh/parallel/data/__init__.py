"""Data parallelism: sums of gradients, and sharding of states over ranks (``plan.data``)."""
