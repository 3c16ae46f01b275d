"""Who holds what, without torch: parameters, buckets, stages, positions and rows of a plan."""
