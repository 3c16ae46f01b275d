"""Pipelines as data: schedules generated, proved, simulated and searched, without torch."""
