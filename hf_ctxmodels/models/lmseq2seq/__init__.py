"""Sequence-to-sequence from two language models (Ramachandran et al. 2016): one reads, the other writes."""
