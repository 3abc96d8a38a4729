"""Behavioral tests of text classifiers (CheckList; Ribeiro et al. 2020, arXiv 2005.04118)."""
