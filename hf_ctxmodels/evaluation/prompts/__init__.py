"""Evaluation by prompts: tasks as text, with examples in the context (Radford et al. 2019; Brown et al. 2020)."""
