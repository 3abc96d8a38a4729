"""Controlled comparison of families: equal text, equal budget, equal measures (`hf-ctxmodels compare`)."""
