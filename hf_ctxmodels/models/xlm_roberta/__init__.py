"""XLM-R."""
