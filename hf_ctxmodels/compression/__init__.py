"""Smaller and faster models: distillation, quantization and low-rank factorization."""
