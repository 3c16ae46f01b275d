"""Traces, predicted or measured: ledger, timeline, memory, loads, a whole run."""
