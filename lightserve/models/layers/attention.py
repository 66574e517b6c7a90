"""Self-attention over the slot-indexed KV pool."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from lightserve.kernels.interface import AttentionBatch, QKNorm
from lightserve.models.context import ModelContext
from lightserve.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightserve.models.parallel import Part, even_part, kv_head_part


class AttentionInputs(NamedTuple):
    """What every layer's attention of one pass shares."""

    batch: AttentionBatch
    cos: Tensor
    """float32 [T, head_dim / 2]."""
    sin: Tensor


class SelfAttention:
    """Grouped-query attention with rotary positions, and a window where the layer has one.

    `mix` gives each token's heads and `project` turns heads into hidden states, so that a
    caller may drop tokens between the two.
    """

    def __init__(self, context: ModelContext, prefix: str, *, layer: int) -> None:
        config, tp = context.config, context.tp
        head_dim = config.head_dim
        q_part = even_part(config.num_heads, tp)
        kv_part = kv_head_part(config.num_kv_heads, tp)
        self._kernels = context.kernels
        self._num_heads, self._num_kv_heads, self._head_dim = q_part.size, kv_part.size, head_dim
        self._scale = head_dim**-0.5
        self._sliding_window = config.sliding_windows[layer]
        q_rows, kv_rows = _features(q_part, head_dim), _features(kv_part, head_dim)
        self._qkv = ColumnParallelLinear(
            context.method,
            context.reader,
            [
                (f"{prefix}.q_proj", q_rows),
                (f"{prefix}.k_proj", kv_rows),
                (f"{prefix}.v_proj", kv_rows),
            ],
            in_size=config.hidden_size,
            has_bias=config.qkv_bias,
        )
        self._out = RowParallelLinear(
            context.method,
            context.reader,
            tp,
            f"{prefix}.o_proj",
            columns=q_rows,
            out_size=config.hidden_size,
            has_bias=config.attention_output_bias,
        )
        self._q_size, self._kv_size = q_rows.size, kv_rows.size
        self._qk_norm = self.qk_norm(context, prefix)

    def qk_norm(self, context: ModelContext, prefix: str) -> QKNorm | None:
        """Load what heads are normalised with before the rotary embedding; here they are not."""
        return None

    def mix(self, x: Tensor, inputs: AttentionInputs, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        """Write the new tokens' KV and attend.

        x [T, hidden], pools [S, Hkv, D] (written at the batch's slots) -> [T, Hq * D].
        """
        kernels, head_dim = self._kernels, self._head_dim
        q_size, kv_size = self._q_size, self._kv_size
        q, k, v = self._qkv(x).split_with_sizes((q_size, kv_size, kv_size), dim=-1)
        num_tokens = x.shape[0]
        q = q.view(num_tokens, self._num_heads, head_dim)
        k = k.view(num_tokens, self._num_kv_heads, head_dim)
        v = v.view(num_tokens, self._num_kv_heads, head_dim)
        q = kernels.rotate_and_write(
            q,
            k,
            v,
            cos=inputs.cos,
            sin=inputs.sin,
            k_pool=k_pool,
            v_pool=v_pool,
            slot_mapping=inputs.batch.slot_mapping,
            qk_norm=self._qk_norm,
        )
        heads = kernels.attention(
            q,
            k_pool,
            v_pool,
            inputs.batch,
            scale=self._scale,
            sliding_window=self._sliding_window,
        )
        return heads.reshape(num_tokens, q_size)

    def project(self, heads: Tensor) -> Tensor:
        """Return hidden states; heads [N, Hq * D] -> [N, hidden]."""
        return self._out(heads)


def _features(heads: Part, head_dim: int) -> Part:
    return Part(heads.start * head_dim, heads.size * head_dim)
