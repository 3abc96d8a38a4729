"""Training: one Accelerate loop for pretraining and fine-tuning, and what goes with it."""
