"""The families of architectures: which layers a model is built from, beside its configuration.

Most architectures are the decoder as it is: their biases, windows, rotary embeddings, experts and
names of tensors are in their configuration.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightserve.kernels.interface import QKNorm
from lightserve.models.architectures import Architecture
from lightserve.models.base import KeepsStates, KVTensors, Model, Part, even_part
from lightserve.models.decoder import PLAIN, DecoderLayer, DecoderModel, Family, OutputNormLayer
from lightserve.models.deepseek import LatentAttention
from lightserve.models.encoder import EncoderModel
from lightserve.models.layers.attention import (
    Attention,
    AttentionInputs,
    SelfAttention,
    growth_of_queries,
)
from lightserve.models.layers.feed_forward import ExpertsBeside, feed_forward, gated_mlp
from lightserve.models.layers.linear import ModelContext
from lightserve.models.layers.recurrent import RecurrentLayer


class HeadNormAttention(SelfAttention):
    """Self-attention with one norm for all query heads and one for all key heads."""

    def qk_norm(self, context: ModelContext, prefix: str) -> QKNorm | None:
        """See `SelfAttention.qk_norm`."""
        if not context.config.qk_norm:
            return None
        whole = Part(0, self._head_dim)
        weights = [context.norm_weight(f"{prefix}.{name}_norm", whole) for name in "qk"]
        return QKNorm(weights[0], weights[1], context.config.rms_norm_eps)


class Gemma4Attention(HeadNormAttention):
    """A norm without weights for values as well; or queries alone, where a layer reads the keys and
    values of another.
    """

    def __init__(self, context: ModelContext, prefix: str, *, layer: int) -> None:
        self._is_sharing = context.config.shape_of(layer).kv_source != layer
        super().__init__(context, prefix, layer=layer)
        self._ones = torch.ones(self._head_dim, device=context.reader.device)

    def qk_norm(self, context: ModelContext, prefix: str) -> QKNorm | None:
        """See `SelfAttention.qk_norm`."""
        if not self._is_sharing:
            return super().qk_norm(context, prefix)
        weight = context.norm_weight(f"{prefix}.q_norm", Part(0, self._head_dim))
        return QKNorm(weight, weight, context.config.rms_norm_eps)

    def rotate_and_write(
        self, parts: Sequence[Tensor], inputs: AttentionInputs, pools: tuple[Tensor, Tensor]
    ) -> Tensor:
        """See `SelfAttention.rotate_and_write`."""
        kernels, norm = self._kernels, self._qk_norm
        assert norm is not None
        num_heads = parts[-1].shape[1] // self._head_dim
        heads = parts[-1].reshape(len(parts[-1]), num_heads, self._head_dim)
        if self._is_sharing:
            q = kernels.rms_norm(heads, norm.q_weight, norm.eps)
            return kernels.rotary(q, q[:, :1].clone(), inputs.cos, inputs.sin)[0]
        q, k, v = parts
        values = kernels.rms_norm(heads, self._ones, norm.eps)
        return super().rotate_and_write((q, k, v.copy_(values.flatten(1))), inputs, pools)


class GrowingQueries(SelfAttention):
    """Attention whose scores get sharper with the query's position."""

    def __init__(self, context: ModelContext, prefix: str, *, layer: int) -> None:
        super().__init__(context, prefix, layer=layer)
        self._growth = growth_of_queries(context)

    def grown(self, q: Tensor, positions: Tensor) -> Tensor:
        """See `SelfAttention.grown`."""
        if self._growth is None:
            return q
        return (q * self._growth.index_select(0, positions)).to(q.dtype)


class ChunkedAttention(GrowingQueries):
    """Llama 4's: rotated heads have a norm without weights, which turning them does not change, and
    the queries of the other layers grow.
    """

    def __init__(self, context: ModelContext, prefix: str, *, layer: int) -> None:
        super().__init__(context, prefix, layer=layer)
        config, reader = context.config, context.reader
        self._growth = None
        if layer in config.unrotated_layers:
            self._growth = growth_of_queries(context, torch.float32)
            return
        if config.qk_norm:
            ones = torch.ones(config.head_dim, dtype=reader.dtype, device=reader.device)
            self._qk_norm = QKNorm(ones, ones, config.rms_norm_eps)


class GraniteLayer(DecoderLayer):
    """Granite: a layer that adds its outputs times a factor."""

    def __init__(self, context: ModelContext, layer: int, attention: type[Attention]) -> None:
        super().__init__(context, layer, attention)
        self._multiplier = context.config.residual_multiplier

    def finish(self, heads: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """See `DecoderLayer.finish`."""
        added = self._attention.project(heads) * self._multiplier
        x, residual = self._mlp.behind(self._mlp_norm, added, residual)
        return x * self._multiplier, residual


class SideBySideLayer(DecoderLayer):
    """Falcon-H1: x = x + attention(norm(x)) + states(norm(x)); x = x + mlp(norm(x)), each part with
    a factor before and behind.
    """

    def __init__(self, context: ModelContext, layer: int, attention: type[Attention]) -> None:
        """`attention`: the class of states."""
        prefix, config = f"model.layers.{layer}", context.config
        assert config.recurrent is not None and config.recurrent.beside is not None
        self._factors = own = config.recurrent.beside
        self._attention_norm, self._mlp_norm = (
            context.norm(f"{prefix}.{name}", size=config.hidden_size) for name in config.layer_norms
        )
        self._attention = SelfAttention(context, f"{prefix}.self_attn", layer=layer)
        self._beside = attention(context, f"{prefix}.self_attn", layer=layer)
        self._mlp = gated_mlp(context, f"{prefix}.mlp", config.intermediate_size, factor=own.gate)
        self._num_features = even_part(config.num_heads, context.tp).size * config.head_dim

    @property
    def states(self) -> KeepsStates:
        """See `DecoderLayer.states`."""
        assert isinstance(self._beside, RecurrentLayer)
        return self._beside

    def attend(
        self, x: Tensor, residual: Tensor | None, inputs: AttentionInputs, kv: KVTensors
    ) -> tuple[Tensor, Tensor]:
        """See `DecoderLayer.attend`; heads of attention, then those of states."""
        if residual is None:
            own, residual = self._attention_norm(x), x
        else:
            own, residual = self._attention_norm.add(x, residual)
        parts = ((self._attention, self._factors.attention), (self._beside, self._factors.states))
        heads = [part.mix(own * factors[0], inputs, kv) for part, factors in parts]
        return torch.cat(heads, dim=-1), residual

    def finish(self, heads: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """See `DecoderLayer.finish`."""
        factors = self._factors
        own, states = heads.tensor_split([self._num_features], dim=-1)
        added = self._attention.project(own.contiguous()) * factors.attention[1]
        added = added + self._beside.project(states.contiguous()) * factors.states[1]
        x, residual = self._mlp.behind(self._mlp_norm, added, residual)
        return x * factors.block, residual


class SoloLayer(DecoderLayer):
    """Nemotron-H: x = x + block(norm(x)), of attention, of states, or a feed-forward."""

    def __init__(self, context: ModelContext, layer: int, attention: type[Attention]) -> None:
        prefix, config = f"model.layers.{layer}", context.config
        self._attention_norm = context.norm(f"{prefix}.input_layernorm", size=config.hidden_size)
        self._is_mixer = layer not in config.feed_forward_layers
        if self._is_mixer:
            self._attention = attention(context, f"{prefix}.self_attn", layer=layer)
        else:
            self._mlp = feed_forward(context, layer)

    def attend(
        self, x: Tensor, residual: Tensor | None, inputs: AttentionInputs, kv: KVTensors
    ) -> tuple[Tensor, Tensor]:
        """See `DecoderLayer.attend`."""
        if self._is_mixer:
            return super().attend(x, residual, inputs, kv)
        return x, torch.zeros_like(x) if residual is None else residual

    def finish(self, heads: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """See `DecoderLayer.finish`."""
        if self._is_mixer:
            return self._attention.project(heads), residual
        return self._mlp.behind(self._attention_norm, heads, residual)


class Olmo2Layer(DecoderLayer):
    """OLMo 2: x = x + norm(attention(x)); x = x + norm(mlp(x))."""

    def __init__(self, context: ModelContext, layer: int, attention: type[Attention]) -> None:
        prefix, size = f"model.layers.{layer}", context.config.hidden_size
        self._attention = attention(context, f"{prefix}.self_attn", layer=layer)
        self._attention_norm = context.norm(f"{prefix}.post_attention_layernorm", size=size)
        self._mlp_norm = context.norm(f"{prefix}.post_feedforward_layernorm", size=size)
        self._mlp = feed_forward(context, layer)

    def attend(
        self, x: Tensor, residual: Tensor | None, inputs: AttentionInputs, kv: KVTensors
    ) -> tuple[Tensor, Tensor]:
        """See `DecoderLayer.attend`."""
        x = x if residual is None else x + residual
        return self._attention.mix(x, inputs, kv), x

    def finish(self, heads: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """See `DecoderLayer.finish`."""
        residual = residual + self._attention_norm(self._attention.project(heads))
        return self._mlp_norm(self._mlp(residual)), residual


class Gemma4Layer(OutputNormLayer):
    """Gemma 4: experts beside the block, in models that have some."""

    def __init__(self, context: ModelContext, layer: int, attention: type[Attention]) -> None:
        super().__init__(context, layer, attention)
        if (moe := context.config.moe) is not None:
            self._beside = ExpertsBeside(context, f"model.layers.{layer}", moe)


FAMILIES: dict[Architecture, Family] = {
    Architecture.MINISTRAL3: Family(attention=GrowingQueries),
    Architecture.LLAMA4: Family(attention=ChunkedAttention),
    Architecture.QWEN3: Family(attention=HeadNormAttention),
    Architecture.QWEN3_MOE: Family(attention=HeadNormAttention),
    Architecture.GLM4_MOE: Family(attention=HeadNormAttention),
    Architecture.EXAONE4: Family(layer=Olmo2Layer, attention=HeadNormAttention),
    Architecture.QWEN3_NEXT: Family(attention=HeadNormAttention),
    Architecture.QWEN3_5: Family(attention=HeadNormAttention),
    Architecture.QWEN3_5_MOE: Family(attention=HeadNormAttention),
    Architecture.GRANITE: Family(layer=GraniteLayer),
    Architecture.GRANITE_HYBRID: Family(layer=GraniteLayer),
    Architecture.FALCON_H1: Family(layer=SideBySideLayer),
    Architecture.NEMOTRON_H: Family(layer=SoloLayer),
    Architecture.OLMO2: Family(layer=Olmo2Layer),
    Architecture.OLMO3: Family(layer=Olmo2Layer),
    Architecture.OLMO_HYBRID: Family(layer=Olmo2Layer, recurrent_layer=DecoderLayer),
    Architecture.LFM2: Family(attention=HeadNormAttention),
    Architecture.LFM2_MOE: Family(attention=HeadNormAttention),
    Architecture.GLM4: Family(layer=OutputNormLayer),
    Architecture.GEMMA2: Family(layer=OutputNormLayer),
    Architecture.GEMMA3: Family(layer=OutputNormLayer, attention=HeadNormAttention),
    Architecture.GEMMA4: Family(layer=Gemma4Layer, attention=Gemma4Attention),
    Architecture.DEEPSEEK_V2: Family(attention=LatentAttention),
    Architecture.DEEPSEEK_V3: Family(attention=LatentAttention),
    Architecture.GLM4_MOE_LITE: Family(attention=LatentAttention),
    Architecture.MISTRAL4: Family(attention=LatentAttention),
    Architecture.KIMI_LINEAR: Family(attention=LatentAttention),
}
"""The architectures with layers of their own; all others are `PLAIN`."""


def build_model(context: ModelContext) -> Model:
    """Build this rank's part of a model, and read its weights."""
    config = context.config
    if config.encoder is not None:
        return EncoderModel(context)
    return DecoderModel(context, FAMILIES.get(config.architecture, PLAIN))
