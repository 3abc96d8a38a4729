"""Weights of 2 to 8 bits, quantized in groups of rows (Q-BERT, Shen et al. 2019, arXiv 1909.05840)."""
