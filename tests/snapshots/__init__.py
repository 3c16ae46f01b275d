"""Answers of the verbs that need no run, and every help text, as they were read by a person."""
