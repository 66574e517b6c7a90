"""Qwen3: every query and key head is RMS-normalised before the rotary embedding."""

from __future__ import annotations

from torch import Tensor

from lightserve.models.context import ModelContext
from lightserve.models.decoder import DecoderLayer, DecoderModel
from lightserve.models.layers.attention import SelfAttention


class Qwen3Attention(SelfAttention):
    """Self-attention with one norm for all query heads and one for all key heads."""

    def __init__(self, context: ModelContext, prefix: str, *, layer: int) -> None:
        super().__init__(context, prefix, layer=layer)
        head_dim = context.config.head_dim
        self._q_norm = context.rms_norm(f"{prefix}.q_norm", size=head_dim)
        self._k_norm = context.rms_norm(f"{prefix}.k_norm", size=head_dim)

    def prepare(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise q [T, Hq, D] and k [T, Hkv, D] over D."""
        return self._q_norm(q), self._k_norm(k)


class Qwen3Layer(DecoderLayer):
    """A decoder layer with QK-norm."""

    attention_type = Qwen3Attention


class Qwen3ForCausalLM(DecoderModel):
    """The decoder with QK-norm in every layer."""

    layer_type = Qwen3Layer
