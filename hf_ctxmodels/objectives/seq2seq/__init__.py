"""Objectives of encoder-decoders: denoising, masked segments, translation and generation."""
