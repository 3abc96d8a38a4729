"""Fast paths on CPUs: linear layers by oneDNN, dropout kernels, and relative attention."""
