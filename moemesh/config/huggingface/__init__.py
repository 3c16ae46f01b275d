"""Models of transformers: their ``config.json`` as a configuration, without torch."""
