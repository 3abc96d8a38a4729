"""Subcommands of `hf-ctxmodels data`."""
