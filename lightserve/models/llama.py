"""Llama 1, 2, 3, 3.1, 3.2.

Full attention; optional biases on all attention or all MLP projections; RoPE plain or scaled.
"""

from __future__ import annotations

from lightserve.models.decoder import DecoderModel


class LlamaForCausalLM(DecoderModel):
    """The decoder as it is."""
