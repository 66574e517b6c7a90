"""Qwen3: every query and key head is RMS-normalised before the rotary embedding."""

from __future__ import annotations

from lightserve.kernels.interface import QKNorm
from lightserve.models.context import ModelContext
from lightserve.models.decoder import DecoderLayer, DecoderModel
from lightserve.models.layers.attention import SelfAttention
from lightserve.models.layers.linear import read_vector


class Qwen3Attention(SelfAttention):
    """Self-attention with one norm for all query heads and one for all key heads."""

    def qk_norm(self, context: ModelContext, prefix: str) -> QKNorm | None:
        """See `SelfAttention.qk_norm`."""
        config, reader = context.config, context.reader
        if not config.qk_norm:
            return None
        q_weight, k_weight = (
            read_vector(
                reader, f"{prefix}.{name}_norm.weight", config.head_dim, offset=config.norm_offset
            )
            for name in "qk"
        )
        return QKNorm(q_weight, k_weight, config.rms_norm_eps)


class Qwen3Layer(DecoderLayer):
    """A decoder layer with QK-norm."""

    attention_type = Qwen3Attention


class Qwen3ForCausalLM(DecoderModel):
    """The decoder with QK-norm in every layer."""

    layer_type = Qwen3Layer
