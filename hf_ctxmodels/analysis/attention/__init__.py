"""What attention heads attend to, and which of them a model needs."""
