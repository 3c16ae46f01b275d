"""Choosing a plan: parameters, arithmetic, memory, traffic and time of any layout; no torch."""
