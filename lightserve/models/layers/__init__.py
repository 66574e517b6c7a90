"""Layers: plain objects that hold this rank's part of their weights and call the kernels."""
