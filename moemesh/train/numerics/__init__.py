"""Numerical faults of a run: policy, tracing, replica checksums, replay bundles, layout proof."""
