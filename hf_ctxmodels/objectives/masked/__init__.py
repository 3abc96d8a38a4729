"""Masked language modelling and its relatives on single segments."""
