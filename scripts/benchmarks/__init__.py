"""Speed and memory against the peer in transformers: same weights, same outputs, one process, interleaved."""
