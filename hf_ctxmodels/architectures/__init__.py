"""Model bases that several families share, with their configurations."""
