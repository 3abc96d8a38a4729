"""Fast paths on CPUs: linear layers by oneDNN, and dropout kernels."""
