"""Functions of `import moemesh as mm`: configuration, training, planning, checkpoints."""
