"""Building blocks that several objectives share: tokenized documents, masking, spans, noising, packing."""
