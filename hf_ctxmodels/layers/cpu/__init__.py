"""Fast paths on CPUs: oneDNN products, prepacked weights, and the allocator."""
