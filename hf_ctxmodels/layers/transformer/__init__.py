"""The Transformer block, the stack of blocks, and poolers."""
