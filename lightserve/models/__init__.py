"""Model architectures, their configuration and weights."""
