"""Objectives that predict tokens one after another: causal, bidirectional, permuted and auto-encoding."""
