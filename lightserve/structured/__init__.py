"""Structured output: constraints to grammars, checked by frontends and enforced on rank 0."""
