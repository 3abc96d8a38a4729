"""Losses of language models: chunked and sampled softmax, and sampling from it."""
