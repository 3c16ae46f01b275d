"""The training run: data, steps, checkpoints, the run folder and the command."""
