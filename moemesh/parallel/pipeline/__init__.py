"""Pipeline parallelism: the executor of schedules, its stages, messages and weight versions."""
