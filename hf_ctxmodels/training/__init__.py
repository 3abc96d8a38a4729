"""Training: an Accelerate loop for pretraining and fine-tuning."""
