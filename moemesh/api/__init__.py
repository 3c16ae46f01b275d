"""Functions behind `import moemesh as mm`: configuration, training, planning, checkpoints."""
