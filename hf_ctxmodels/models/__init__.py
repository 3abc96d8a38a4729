"""The families, one folder each."""
