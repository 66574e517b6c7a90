"""The bundled model: where it lies.

Imported by light processes (command line, front end), so it imports nothing heavy.
It was made by `tools/tiny_model`.
"""

from pathlib import Path

BUNDLED_MODEL_DIR: Path = Path(__file__).resolve().parent / "model"
"""Hugging Face directory: config, tokenizer, bfloat16 weights, model card."""

__all__ = ["BUNDLED_MODEL_DIR"]

BUNDLED_MODEL_NAME = "lightserve-tiny"
"""Name under which the bundled model is served."""
