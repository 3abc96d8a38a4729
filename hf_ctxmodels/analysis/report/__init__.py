"""Reports of analyses as one HTML file, which works offline."""
