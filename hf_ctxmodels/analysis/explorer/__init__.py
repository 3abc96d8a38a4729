"""A local page to explore one or two models with one's own sentences."""
