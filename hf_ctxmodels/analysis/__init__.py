"""Analysis of models: probes, attention, geometry, similarity, loss landscapes, robustness, and reports."""
