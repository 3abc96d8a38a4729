"""XLM's objectives on text of several languages."""
