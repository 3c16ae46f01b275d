"""Intra-operator parallelism: operator graphs, their best strategies, and a check of both."""
