"""Building blocks: modules with explicit arguments, independent of model families."""
