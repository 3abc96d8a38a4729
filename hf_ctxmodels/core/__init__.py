"""What every family stands on: configuration, model base, weights, errors."""
