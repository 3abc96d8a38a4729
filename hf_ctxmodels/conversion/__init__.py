"""Conversion of other libraries' files: word vectors, encoders, adapters and TensorFlow checkpoints."""
