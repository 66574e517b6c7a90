"""OLMo 2: norms behind attention and feed-forward, none before; one norm over all heads."""

from __future__ import annotations

import torch
from torch import Tensor

from lightserve.models.base import KVTensors
from lightserve.models.context import ModelContext
from lightserve.models.decoder import DecoderLayer, DecoderModel
from lightserve.models.layers.attention import AttentionInputs, SelfAttention
from lightserve.models.layers.feed_forward import feed_forward
from lightserve.models.parallel import Part, even_part, kv_head_part


class _SplitNorm:
    """An RMS norm over features of which each rank has some."""

    def __init__(self, context: ModelContext, name: str, part: Part, num_features: int) -> None:
        """`part`: this rank's features; with fewer KV heads than ranks several have the same."""
        self._weight = torch.empty(
            part.size, dtype=context.reader.dtype, device=context.reader.device
        )
        context.reader.read_into(self._weight, f"{name}.weight", rows=part)
        self._tp, self._kernels = context.tp, context.kernels
        self._eps = context.config.rms_norm_eps
        self._num_counted = part.size * context.tp.size
        """As many as the ranks' sums have together, some of them several times."""
        assert self._num_counted % num_features == 0

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normalised x [T, this rank's features]."""
        if self._tp.size == 1:
            return self._kernels.rms_norm(x.contiguous(), self._weight, self._eps)
        wide = x.float()
        total = self._tp.all_reduce(wide.square().sum(dim=-1, keepdim=True))
        wide = wide * torch.rsqrt(total / self._num_counted + self._eps)
        return (wide * self._weight.float()).to(x.dtype)


class Olmo2Attention(SelfAttention):
    """Self-attention with a norm over all query heads and one over all key heads."""

    def __init__(self, context: ModelContext, prefix: str, *, layer: int) -> None:
        super().__init__(context, prefix, layer=layer)
        config, tp = context.config, context.tp
        heads = {
            "q": (even_part(config.num_heads, tp), config.num_heads),
            "k": (kv_head_part(config.num_kv_heads, tp), config.num_kv_heads),
        }
        self._q_norm, self._k_norm = (
            _SplitNorm(
                context,
                f"{prefix}.{name}_norm",
                Part(part.start * config.head_dim, part.size * config.head_dim),
                total * config.head_dim,
            )
            for name, (part, total) in heads.items()
        )

    def normalised(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """See `SelfAttention.normalised`."""
        # Written back, they lie beside the values as elsewhere: the native core asks for it.
        return q.copy_(self._q_norm(q)), k.copy_(self._k_norm(k))


class Olmo2Layer(DecoderLayer):
    """x = x + norm(attention(x)); x = x + norm(mlp(x))."""

    def __init__(self, context: ModelContext, layer: int) -> None:
        prefix, size = f"model.layers.{layer}", context.config.hidden_size
        self._layer = layer
        self._attention = Olmo2Attention(context, f"{prefix}.self_attn", layer=layer)
        self._attention_norm = context.norm(f"{prefix}.post_attention_layernorm", size=size)
        self._mlp_norm = context.norm(f"{prefix}.post_feedforward_layernorm", size=size)
        self._mlp = feed_forward(context, layer)

    def attend(
        self, x: Tensor, residual: Tensor | None, inputs: AttentionInputs, kv: KVTensors
    ) -> tuple[Tensor, Tensor]:
        """See `DecoderLayer.attend`."""
        x = x if residual is None else x + residual
        return self._attention.mix(x, inputs, kv.k[self._layer], kv.v[self._layer]), x

    def finish(self, heads: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """See `DecoderLayer.finish`."""
        residual = residual + self._attention_norm(self._attention.project(heads))
        return self._mlp_norm(self._mlp(residual)), residual


class Olmo2ForCausalLM(DecoderModel):
    """The decoder with such layers."""

    layer_type = Olmo2Layer
