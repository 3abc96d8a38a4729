"""What models know: probes, attention, geometry, similarity, loss landscapes, robustness, and reports of them."""
