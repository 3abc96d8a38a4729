"""Low-rank factorization of linear layers and embeddings by truncated singular value decompositions."""
