"""Phi-3, 3.5 and 4: Llama whose file has QKV, and gate and up, as one tensor each; LongRoPE.

All differences are in the configuration (`ModelConfig.merged`, `rotary_share`, `rope`).
"""

from __future__ import annotations

from lightserve.models.decoder import DecoderModel


class Phi3ForCausalLM(DecoderModel):
    """The decoder as it is."""
