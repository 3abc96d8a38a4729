"""Attention: modules, layouts, masks and backends."""
