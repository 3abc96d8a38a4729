"""Building blocks: plain modules with explicit arguments; they know no family."""
