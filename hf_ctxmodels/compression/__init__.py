"""Smaller and faster models: distillation and quantization."""
