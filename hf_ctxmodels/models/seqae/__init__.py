"""Sequence auto-encoder and language model (Dai & Le 2015): one LSTM that reads a text and writes it again."""
