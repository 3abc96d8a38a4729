"""CoVe (McCann et al. 2017): the encoder of a translation model on fixed word vectors."""
