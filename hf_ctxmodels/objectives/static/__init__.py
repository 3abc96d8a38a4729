"""Objectives of static word vectors: windows and co-occurrences."""
