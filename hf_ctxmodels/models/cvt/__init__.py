"""Cross-view training."""
