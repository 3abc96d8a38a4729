"""InferSent (Conneau et al. 2017): sentence vectors learned by natural language inference."""
