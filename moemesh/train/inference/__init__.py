"""Use of trained models in any plan: evaluation, text generation, and scores of experts."""
