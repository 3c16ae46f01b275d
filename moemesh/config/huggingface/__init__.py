"""Models of transformers: what their ``config.json`` says, without torch."""
