"""Configuration of a run: model, cluster, plan, data and training, checked before a start."""
