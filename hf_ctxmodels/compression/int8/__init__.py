"""8-bit quantization for inference on a CPU: linear layers, embeddings and their replacement in a model."""
