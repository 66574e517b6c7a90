"""GLM-4: half of each head is rotated, in neighbouring pairs; GLM-4-0414 norms outputs as well.

What both have in common is in the configuration (`rotary_share`, `rotates_neighbours`, `merged`).
"""

from __future__ import annotations

from torch import Tensor

from lightserve.models.context import ModelContext
from lightserve.models.decoder import DecoderLayer, DecoderModel


class GlmForCausalLM(DecoderModel):
    """glm-4-9b: the decoder as it is."""


class Glm4Layer(DecoderLayer):
    """A decoder layer with a norm before and one behind each of its two parts."""

    def __init__(self, context: ModelContext, layer: int) -> None:
        super().__init__(context, layer)
        prefix, size = f"model.layers.{layer}", context.config.hidden_size
        self._attention_output_norm = context.rms_norm(
            f"{prefix}.post_self_attn_layernorm", size=size
        )
        self._mlp_output_norm = context.rms_norm(f"{prefix}.post_mlp_layernorm", size=size)

    def finish(self, heads: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """See `DecoderLayer.finish`."""
        added = self._attention_output_norm(self._attention.project(heads))
        x, residual = self._mlp_norm.add(added, residual)
        return self._mlp_output_norm(self._mlp(x)), residual


class Glm4ForCausalLM(DecoderModel):
    """GLM-4-0414."""

    layer_type = Glm4Layer
