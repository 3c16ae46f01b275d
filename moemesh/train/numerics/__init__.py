"""Numbers of a run that are not as they should be: judged, traced, compared, kept, replayed."""
