"""Monitoring of a run: progress records, failure detection, verdicts, lease of the folder."""
