"""Faults in tiny runs, and what came of them: ``python -m tests.drill``."""
