"""Weights of 8 bits for inference on a CPU: codes, maps, tables, and their places in a model."""
