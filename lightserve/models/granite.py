"""Granite: Llama with factors on embedding, residual sums, attention and logits."""

from __future__ import annotations

from torch import Tensor

from lightserve.models.context import ModelContext
from lightserve.models.decoder import DecoderLayer, DecoderModel


class GraniteLayer(DecoderLayer):
    """A decoder layer that adds its outputs times a factor."""

    def __init__(self, context: ModelContext, layer: int) -> None:
        super().__init__(context, layer)
        self._multiplier = context.config.residual_multiplier

    def finish(self, heads: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """See `DecoderLayer.finish`."""
        added = self._attention.project(heads) * self._multiplier
        x, residual = self._mlp.behind(self._mlp_norm, added, residual)
        return x * self._multiplier, residual


class GraniteForCausalLM(DecoderModel):
    """The decoder with such layers; the other factors are in the configuration."""

    layer_type = GraniteLayer
