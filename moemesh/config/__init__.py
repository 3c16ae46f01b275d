"""What a run is told: model, cluster, plan, data and training, checked before anything starts."""
