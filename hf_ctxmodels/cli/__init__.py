"""The `hf-ctxmodels` command line."""
