"""Who is alive, and what went wrong: progress words of ranks, their watcher, and its verdicts."""
