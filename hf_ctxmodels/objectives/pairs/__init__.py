"""Masked language modelling on pairs of segments, with a label for the pair."""
