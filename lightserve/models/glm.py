"""GLM-4: half of each head is rotated, in neighbouring pairs; GLM-4-0414 norms outputs as well.

What both have in common is in the configuration (`rotary_share`, `rotates_neighbours`, `merged`).
"""

from __future__ import annotations

from lightserve.models.decoder import DecoderModel, OutputNormLayer


class GlmForCausalLM(DecoderModel):
    """glm-4-9b: the decoder as it is."""


class Glm4ForCausalLM(DecoderModel):
    """GLM-4-0414."""

    layer_type = OutputNormLayer
