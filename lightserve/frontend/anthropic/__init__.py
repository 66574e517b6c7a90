"""Anthropic's routes, over the same request as chat completions."""
