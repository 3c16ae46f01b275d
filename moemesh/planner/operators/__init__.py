"""Intra-operator parallelism: graphs of operators and the best strategies for them."""
