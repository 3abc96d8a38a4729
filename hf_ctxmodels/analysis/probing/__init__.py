"""Probes of representations by layer, with controls."""
