"""Layers that keep a state in place of keys and values: the gated delta rule.

Source: Yang et al. 2024, "Gated Delta Networks", section 3.4, as Qwen3-Next has it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightserve.kernels.weights import DeltaRule
from lightserve.models.base import KVTensors, Part, even_part
from lightserve.models.layers.attention import AttentionInputs
from lightserve.models.layers.linear import (
    ColumnParallelLinear,
    ModelContext,
    Norm,
    RowParallelLinear,
    UnquantizedMethod,
    read_vector,
)
from lightserve.models.recurrent_config import DeltaConfig


class DeltaLayer:
    """In the place of a layer's attention; the same calls.

    hidden ─► q k v ─► convolution ─► delta rule ─► norm, times SiLU of z ─► hidden
           └► z, b, a
    """

    def __init__(self, context: ModelContext, prefix: str, *, layer: int) -> None:
        """Load its weights; `prefix` is that of the attention which others have here."""
        config, reader, delta = context.config, context.reader, context.config.recurrent
        assert delta is not None
        prefix = f"{prefix.rpartition('.')[0]}.linear_attn"
        keys, values = (
            even_part(heads, context.tp) for heads in (delta.num_key_heads, delta.num_value_heads)
        )
        sections = _Sections(delta, keys, values)
        hidden = config.hidden_size
        self._kernels = context.kernels
        self._number = sorted(delta.layers).index(layer)
        self._in = ColumnParallelLinear(
            context.method.exact_inputs,
            reader,
            sections.wide(f"{prefix}.in_proj_"),
            in_size=hidden,
            has_bias=False,
        )
        # So small, and so much depends on them, that they are not rounded.
        self._gates = ColumnParallelLinear(
            UnquantizedMethod(context.kernels),
            reader,
            sections.narrow(f"{prefix}.in_proj_"),
            in_size=hidden,
            has_bias=False,
        )
        self._out = RowParallelLinear(
            context.method,
            reader,
            context.tp,
            f"{prefix}.out_proj",
            columns=_features(values, delta.value_dim),
            out_size=hidden,
            has_bias=False,
        )
        self._channels = sections.num_channels
        self._convolution = sections.convolution(context, f"{prefix}.conv1d.weight")
        self._rule = DeltaRule(
            keys.size,
            delta.key_dim,
            delta.value_dim,
            decay=-_floats(context, f"{prefix}.A_log", values).exp(),
            rate_bias=_floats(context, f"{prefix}.dt_bias", values),
            norm=read_vector(reader, f"{prefix}.norm.weight", delta.value_dim),
            eps=config.rms_norm_eps,
        )

    def mix(self, x: Tensor, inputs: AttentionInputs, kv: KVTensors) -> Tensor:
        """Update states; x [T, hidden] -> [T, Hv * Dv]."""
        convolution, matrices = kv.states[self._number]
        wide, gates, batch = self._in(x), self._gates.wide(x), inputs.batch
        mixed, z = wide[:, : self._channels], wide[:, self._channels :]
        mixed = self._kernels.convolve(mixed, self._convolution, None, convolution, batch)
        return self._kernels.delta_rule(
            mixed, z, gates, rule=self._rule, bank=matrices, batch=batch
        )

    def mix_behind(
        self, norm: Norm, x: Tensor, residual: Tensor, inputs: AttentionInputs, kv: KVTensors
    ) -> tuple[Tensor, Tensor]:
        """See `Attention.mix_behind`."""
        x, residual = norm.add(x, residual)
        return self.mix(x, inputs, kv), residual

    def project(self, heads: Tensor) -> Tensor:
        """Return hidden states; heads [N, Hv * Dv] -> [N, hidden]."""
        return self._out(heads)


class _Sections:
    """Where a rank's heads are in the files' tensors."""

    def __init__(self, delta: DeltaConfig, keys: Part, values: Part) -> None:
        self._delta = delta
        key_rows, value_rows = _features(keys, delta.key_dim), _features(values, delta.value_dim)
        self._keys, self._values, self._value_rows = keys, values, value_rows
        starts = (0, delta.key_size, 2 * delta.key_size)
        self._channels = [
            Part(start + rows.start, rows.size)
            for start, rows in zip(starts, (key_rows, key_rows, value_rows), strict=True)
        ]
        """Queries, keys and values among the channels."""

    @property
    def num_channels(self) -> int:
        """Return the number of this rank's channels."""
        return sum(part.size for part in self._channels)

    def wide(self, prefix: str) -> list[tuple[str, Part]]:
        """Return where queries, keys, values and z are made."""
        delta = self._delta
        if not delta.is_grouped:
            channels = [(f"{prefix}qkv", part) for part in self._channels]
            return [*channels, (f"{prefix}z", self._value_rows)]
        values = delta.value_size // delta.num_key_heads
        return self._grouped(f"{prefix}qkvz", (delta.key_dim, delta.key_dim, values, values))

    def narrow(self, prefix: str) -> list[tuple[str, Part]]:
        """Return where b and a are made."""
        delta = self._delta
        if not delta.is_grouped:
            return [(f"{prefix}b", self._values), (f"{prefix}a", self._values)]
        heads = delta.num_value_heads // delta.num_key_heads
        return self._grouped(f"{prefix}ba", (heads, heads))

    def _grouped(self, name: str, sizes: tuple[int, ...]) -> list[tuple[str, Part]]:
        """Return parts of a tensor that has parts of these sizes for one key head after another."""
        heads = range(self._keys.start, self._keys.start + self._keys.size)
        return [
            (name, Part(head * sum(sizes) + sum(sizes[:number]), size))
            for number, size in enumerate(sizes)
            for head in heads
        ]

    def convolution(self, context: ModelContext, name: str) -> Tensor:
        """Load the convolution's weights of this rank's channels, [width, channels]."""
        reader, parts = context.reader, []
        for part in self._channels:
            shape = part.size, 1, self._delta.width
            parts.append(torch.empty(shape, dtype=reader.dtype, device=reader.device))
            reader.read_into(parts[-1], name, rows=part)
        return torch.cat(parts)[:, 0].T.contiguous()


def _floats(context: ModelContext, name: str, heads: Part) -> Tensor:
    """Load a number of each of this rank's value heads, in float32."""
    numbers = torch.empty(heads.size, dtype=torch.float32, device=context.reader.device)
    context.reader.read_into(numbers, name, rows=heads)
    return numbers


def _features(heads: Part, size: int) -> Part:
    return Part(heads.start * size, heads.size * size)
