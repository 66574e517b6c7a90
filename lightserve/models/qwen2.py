"""Qwen2 and Qwen2.5: Llama with biases on q, k and v alone, and windows in the upper layers.

Both differences are in the configuration (`qkv_bias`, `sliding_windows`).
"""

from __future__ import annotations

from lightserve.models.decoder import DecoderModel


class Qwen2ForCausalLM(DecoderModel):
    """The decoder as it is."""
