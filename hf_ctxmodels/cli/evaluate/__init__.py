"""Subcommands of `hf-ctxmodels evaluate`."""
