"""Measuring a machine: its links and devices for a cluster file, and the checks of `doctor`."""
