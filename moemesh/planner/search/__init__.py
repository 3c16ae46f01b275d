"""The best layout of a model on a cluster, with a certificate and reasons."""
