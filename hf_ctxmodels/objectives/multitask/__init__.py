"""Objectives that train several tasks in turn."""
