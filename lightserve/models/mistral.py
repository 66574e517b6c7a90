"""Mistral 7B and its kin: Llama with a sliding window in every layer (or none) and no biases.

Both differences are in the configuration (`ModelConfig.sliding_windows`). Ministral 3's queries
grow with their position, too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightserve.models.context import ModelContext
from lightserve.models.decoder import DecoderLayer, DecoderModel
from lightserve.models.layers.attention import SelfAttention


class MistralForCausalLM(DecoderModel):
    """The decoder as it is."""


class GrowingQueries(SelfAttention):
    """Attention whose scores get sharper with the query's position."""

    def __init__(self, context: ModelContext, prefix: str, *, layer: int) -> None:
        super().__init__(context, prefix, layer=layer)
        self._growth: Tensor | None = None
        """Of each position that is served, [positions, 1, 1]."""
        if (growth := context.config.query_growth) is not None:
            lengths = torch.arange(context.context_len).div(growth.length, rounding_mode="floor")
            factors = 1.0 + growth.beta * torch.log(1.0 + lengths)
            reader = context.reader
            self._growth = factors.to(reader.device, reader.dtype)[:, None, None]

    def grown(self, q: Tensor, positions: Tensor) -> Tensor:
        """See `SelfAttention.grown`."""
        return q if self._growth is None else q * self._growth.index_select(0, positions)


class Ministral3Layer(DecoderLayer):
    """A decoder layer with such attention."""

    attention_type = GrowingQueries


class Ministral3ForCausalLM(DecoderModel):
    """The decoder with such layers."""

    layer_type = Ministral3Layer
