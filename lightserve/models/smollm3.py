"""SmolLM3: Llama of which some layers know no positions (`ModelConfig.unrotated_layers`)."""

from __future__ import annotations

from lightserve.models.decoder import DecoderModel


class SmolLM3ForCausalLM(DecoderModel):
    """The decoder as it is."""
