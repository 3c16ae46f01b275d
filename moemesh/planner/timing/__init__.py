"""Seconds of one step: blocks, collectives, stages, in numbers or numpy columns."""
