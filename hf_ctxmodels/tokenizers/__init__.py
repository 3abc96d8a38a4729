"""Tokenizers that several families share."""
