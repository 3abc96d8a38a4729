"""Sections of `hf-ctxmodels demo`, each with a result and its baselines."""
