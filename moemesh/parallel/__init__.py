"""Carrying a plan out: what turns the plain model into what each rank runs."""
