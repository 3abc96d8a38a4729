"""Base classes of all families: configuration, model, weights and errors."""
