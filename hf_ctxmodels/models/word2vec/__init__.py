"""word2vec (Mikolov et al. 2013): words predicted from their neighbours."""
