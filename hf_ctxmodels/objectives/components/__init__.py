"""Parts of several objectives: spans, masking, packing, padding, rates."""
