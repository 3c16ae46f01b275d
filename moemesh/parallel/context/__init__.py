"""Context parallelism: the positions of a sequence are spread, attention reaches all keys."""
