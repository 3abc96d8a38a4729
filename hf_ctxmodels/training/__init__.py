"""Training: an Accelerate loop, its optimizers, checkpoints and metrics."""
