"""A local page to explore one or two models with custom sentences."""
