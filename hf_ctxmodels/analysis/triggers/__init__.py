"""Universal adversarial triggers (Wallace et al. 2019, arXiv 1908.07125): words that change the output of a model when
they are put before any input."""
