"""Attention: layouts of packed sequences, masks, backends, and multi-head attention modules."""
