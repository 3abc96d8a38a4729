"""Checkpoints: directories, and the state of a run."""
