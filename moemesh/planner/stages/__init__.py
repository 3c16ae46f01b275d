"""Inter-operator parallelism: where a model is cut into stages, exactly and by baselines."""
