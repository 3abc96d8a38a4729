"""Losses of language models: chunked and sampled softmax; sampling of tokens."""
