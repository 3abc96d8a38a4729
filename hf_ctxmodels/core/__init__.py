"""The base of every family: configuration, model, weights, errors."""
