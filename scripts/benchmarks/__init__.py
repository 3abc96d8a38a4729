"""Speed and memory compared with reference implementations: same weights, same outputs, interleaved in one process."""
