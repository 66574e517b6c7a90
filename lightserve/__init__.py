"""lightserve: one LLM deployment for real-time and best-effort traffic."""

__version__ = "0.1.0"
