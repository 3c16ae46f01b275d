"""Held against published runs: tables, calibrated constants, errors."""
