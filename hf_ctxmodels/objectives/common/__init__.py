"""What several objectives share: spans, masking, packing, padding, seeding."""
