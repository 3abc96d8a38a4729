"""Base classes of all families (configuration, model, weights), and what all rooms share: errors, command lines and
flags, files, locks, devices, and generation."""
