"""Data parallelism: sums of gradients, and which rank keeps which states (``plan.data``)."""
