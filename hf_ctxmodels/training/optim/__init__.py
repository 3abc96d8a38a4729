"""Optimizers, schedules, averaged weights, discriminative learning rates."""
