"""Shared constants."""

IGNORED = -100  # target without a loss, as in torch's cross-entropy
