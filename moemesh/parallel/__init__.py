"""Parallelism: from the plain model and a plan to the part that each rank runs."""
