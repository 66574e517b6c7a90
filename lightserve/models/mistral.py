"""Mistral 7B and its kin: Llama with a sliding window in every layer (or none) and no biases.

Both differences are in the configuration (`ModelConfig.sliding_windows`).
"""

from __future__ import annotations

from lightserve.models.decoder import DecoderModel


class MistralForCausalLM(DecoderModel):
    """The decoder as it is."""
