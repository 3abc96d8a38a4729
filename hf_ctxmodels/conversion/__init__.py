"""Foreign file formats of word vectors and encoders."""
