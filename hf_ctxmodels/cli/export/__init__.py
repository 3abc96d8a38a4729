"""Subcommands of `hf-ctxmodels export`."""
