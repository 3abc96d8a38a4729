"""Attention heads: attention maps, patterns, dependencies and importance."""
