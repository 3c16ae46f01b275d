"""Trained models in use: evaluated, asked for text, and scored expert by expert, in any plan."""
