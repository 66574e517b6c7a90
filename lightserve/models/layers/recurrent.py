"""Layers that keep a state in place of keys and values: the gated delta rule, Mamba-2, short
convolutions.

Sources: Yang et al. 2024, "Gated Delta Networks", section 3.4, as Qwen3-Next has it; Dao and Gu
2024, "Transformers are SSMs", section 7; LFM2.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightserve.kernels.interface import AttentionBatch, Kernels
from lightserve.kernels.weights import DeltaRule, KeptInputs, MambaRule, StateBank
from lightserve.models.base import KVTensors, Part, even_part, kv_head_part
from lightserve.models.layers.attention import AttentionInputs, UnfusedAttention
from lightserve.models.layers.linear import (
    ColumnParallelLinear,
    ModelContext,
    RowParallelLinear,
    read_tensor,
)
from lightserve.models.recurrent_config import (
    ConvolutionConfig,
    DeltaConfig,
    Joined,
    MambaConfig,
    RecurrentConfig,
)


class Inputs(NamedTuple):
    """A layer's inputs, of each token of a pass."""

    mixed: Tensor
    """[T, channels of the convolution]."""
    gates: Tensor
    """[T, outputs], factors of results before they are gated."""
    rates: Tensor | None = None
    """float32 [T, n], numbers that rates of decays, and betas, are made of."""


class RecurrentLayer(UnfusedAttention):
    """A layer that keeps states; it has the place of a layer's attention, and the same calls."""

    num_rates = 0
    """Rates of a token, on this rank."""
    _in: ColumnParallelLinear
    """Numbers of channels, and those that gate results behind them."""
    _rates: ColumnParallelLinear
    _factors: tuple[Tensor, float] | None = None
    """Factors of numbers of `_in`, [channels + outputs], and of rates; None: all are 1."""

    def __init__(
        self,
        context: ModelContext,
        config: RecurrentConfig,
        layer: int,
        *,
        channels: int,
        outputs: int,
    ) -> None:
        """`layer` is its number among all; it has so many channels and outputs on this rank."""
        self._kernels: Kernels = context.kernels
        self.dtype = context.reader.dtype
        self._number = sorted(config.layers).index(layer)
        self.num_channels, self._num_outputs = channels, outputs

    def _inputs(self, x: Tensor) -> Inputs:
        """Return the inputs of tokens; x [T, hidden]."""
        wide, rates = self._in(x), self._rates.wide(x)
        if self._factors is not None:
            wide, rates = wide * self._factors[0], rates * self._factors[1]
        return Inputs(wide[:, : self.num_channels], wide[:, self.num_channels :], rates)

    @abstractmethod
    def _update(self, own: Inputs, banks: Sequence[StateBank], batch: AttentionBatch) -> Tensor:
        """Update states; returns results [T, outputs]."""

    def mix(self, x: Tensor, inputs: AttentionInputs, kv: KVTensors) -> Tensor:
        """Update states; x [T, hidden] -> [T, outputs]."""
        own, batch = self._inputs(x), inputs.batch
        if (kept := batch.kept) is not None:
            for part, room in zip((own.mixed, own.rates), self._room(kept), strict=True):
                if part is not None:
                    room.copy_(part.index_select(0, kept.tokens))
        return self._update(own, kv.states[self._number], batch)

    def replay(
        self, kept: KeptInputs, places: Tensor, batch: AttentionBatch, kv: KVTensors
    ) -> None:
        """See `KeepsStates.replay`."""
        mixed, rates = (part.index_select(0, places) for part in self._room(kept))
        gates = mixed[:, : self._num_outputs]  # what results are is of no interest
        self._update(Inputs(mixed, gates, rates), kv.states[self._number], batch)

    def _room(self, kept: KeptInputs) -> tuple[Tensor, Tensor]:
        """Return the layer's part of what is kept."""
        channel, rate = self._number * self.num_channels, self._number * self.num_rates
        return (
            kept.inputs[:, channel : channel + self.num_channels],
            kept.rates[:, rate : rate + self.num_rates],
        )


def recurrent_layer(config: RecurrentConfig) -> type[RecurrentLayer]:
    """Return the class of layers that keep states."""
    if isinstance(config, ConvolutionConfig):
        return ConvolutionLayer
    if isinstance(config, MambaConfig):
        return MambaLayer
    is_kimi = isinstance(config, DeltaConfig) and config.rank > 0
    return KimiDeltaLayer if is_kimi else DeltaLayer


class ConvolutionLayer(RecurrentLayer):
    """LFM2's: a short convolution of each channel of b * x, times c; b, c and x are products."""

    def __init__(self, context: ModelContext, prefix: str, *, layer: int) -> None:
        """Load its weights; `prefix` is that of the attention which others have here."""
        reader, own = context.reader, context.config.recurrent
        assert isinstance(own, ConvolutionConfig)
        prefix = f"{prefix.rpartition('.')[0]}.conv"
        part = even_part(own.channels, context.tp)
        super().__init__(context, own, layer, channels=part.size, outputs=part.size)
        starts = range(part.start, 3 * own.channels, own.channels)
        parts = [(f"{prefix}.in_proj", Part(start, part.size)) for start in starts]
        self._in = ColumnParallelLinear(context.exact, parts, has_bias=own.has_bias)
        self._out = RowParallelLinear(context, f"{prefix}.out_proj", part, has_bias=own.has_bias)
        self._weight = _convolution(context, [(f"{prefix}.conv.weight", part)], own.width)
        self._bias: Tensor | None = None
        if own.has_bias:
            self._bias = read_tensor(reader, f"{prefix}.conv.bias", part.size, rows=part)

    def _inputs(self, x: Tensor) -> Inputs:
        b, c, own = self._in(x).split_with_sizes((self.num_channels,) * 3, dim=-1)
        return Inputs(b * own, c)

    def _update(self, own: Inputs, banks: Sequence[StateBank], batch: AttentionBatch) -> Tensor:
        found = self._kernels.convolve(
            own.mixed, self._weight, self._bias, banks[0], batch, is_plain=True
        )
        return found.mul_(own.gates)


class DeltaLayer(RecurrentLayer):
    """A layer of the gated delta rule.

    hidden ─► q k v ─► convolution ─► delta rule ─► norm, times SiLU of z ─► hidden
           └► z, b, a
    """

    def __init__(self, context: ModelContext, prefix: str, *, layer: int) -> None:
        """Load its weights; `prefix` is that of the attention which others have here."""
        config, reader, delta = context.config, context.reader, context.config.recurrent
        assert isinstance(delta, DeltaConfig)
        prefix = f"{prefix.rpartition('.')[0]}.linear_attn"
        keys, values = (
            even_part(heads, context.tp) for heads in (delta.num_key_heads, delta.num_value_heads)
        )
        sections = _Sections(delta, keys, values)
        outputs = values.size * delta.value_dim
        super().__init__(context, delta, layer, channels=sections.num_channels, outputs=outputs)
        self.num_rates = values.size + sections.rates.size
        self._in = ColumnParallelLinear(context.exact, sections.wide(f"{prefix}.in_proj_"))
        self._rates = self.gates(context, sections, prefix)
        rows = _features(values, delta.value_dim)
        self._out = RowParallelLinear(context, f"{prefix}.out_proj", rows)
        self._convolution = _convolution(context, sections.convolution(prefix), delta.width)
        self._rule = DeltaRule(
            keys.size,
            delta.key_dim,
            delta.value_dim,
            decay=-self.decays(context, f"{prefix}.A_log", values).exp(),
            rate_bias=_floats(context, f"{prefix}.dt_bias", sections.rates),
            norm=read_tensor(reader, f"{prefix}.norm.weight", delta.value_dim),
            eps=delta.norm_eps or config.rms_norm_eps,
            beta_scale=delta.beta_scale,
            gates_by_sigmoid=delta.rank > 0,
        )

    def gates(
        self, context: ModelContext, sections: _Sections, prefix: str
    ) -> ColumnParallelLinear:
        """Load b and a."""
        # So small, and so much depends on them, that they are not rounded.
        return ColumnParallelLinear(context.plain, sections.narrow(f"{prefix}.in_proj_"))

    def decays(self, context: ModelContext, name: str, heads: Part) -> Tensor:
        """Load the logarithms of this rank's decays, float32 [Hv]."""
        return _floats(context, name, heads)

    def _update(self, own: Inputs, banks: Sequence[StateBank], batch: AttentionBatch) -> Tensor:
        (mixed, z, rates), (convolution, matrices) = own, banks
        assert rates is not None
        mixed = self._kernels.convolve(mixed, self._convolution, None, convolution, batch)
        return self._kernels.delta_rule(
            mixed, z, rates, rule=self._rule, bank=matrices, batch=batch
        )


class MambaLayer(RecurrentLayer):
    """A Mamba-2 layer.

    hidden ─► x b c ─► convolution ─► states, times SiLU of z ─► norm of each group ─► hidden
           └► z, rates
    """

    def __init__(self, context: ModelContext, prefix: str, *, layer: int) -> None:
        """Load its weights; `prefix` is that of the attention which others have here."""
        config, reader, mamba = context.config, context.reader, context.config.recurrent
        assert isinstance(mamba, MambaConfig)
        prefix = f"{prefix.rpartition('.')[0]}.mamba"
        heads = even_part(mamba.num_heads, context.tp)
        groups = kv_head_part(mamba.num_groups, context.tp)
        rows, own = _features(heads, mamba.head_dim), _features(groups, mamba.state_size)
        starts = (0, mamba.inner, mamba.inner + mamba.group_inner)
        channels = [
            Part(start + part.start, part.size)
            for start, part in zip(starts, (rows, own, own), strict=True)
        ]
        first_rate = mamba.inner + mamba.channels
        parts = [Part(mamba.inner + part.start, part.size) for part in channels]
        num_channels = sum(part.size for part in channels)
        super().__init__(context, mamba, layer, channels=num_channels, outputs=rows.size)
        self.num_rates = heads.size
        self._tp, self._eps = context.tp, config.rms_norm_eps
        self._in, self._rates = (
            ColumnParallelLinear(
                own_context,
                [(f"{prefix}.in_proj", part) for part in those],
                has_bias=mamba.has_bias,
            )
            for own_context, those in (
                (context.exact, [*parts, rows]),
                (context.plain, [Part(first_rate + heads.start, heads.size)]),
            )
        )
        self._out = RowParallelLinear(context, f"{prefix}.out_proj", rows, has_bias=mamba.has_bias)
        name = f"{prefix}.conv1d"
        self._convolution = _convolution(
            context, [(f"{name}.weight", part) for part in channels], mamba.width
        )
        self._bias = _joined(context, f"{name}.bias", channels) if mamba.has_conv_bias else None
        self._norm = _joined(context, f"{prefix}.norm.weight", [rows]) if mamba.has_norm else None
        self._sizes = (max(1, mamba.num_groups // context.tp.size), mamba.inner // mamba.num_groups)
        if (beside := mamba.beside) is not None:
            z, *others, rate = torch.tensor(beside.parts, dtype=reader.dtype)
            sizes = torch.tensor([part.size for part in (*channels, rows)])
            factors = torch.stack([*others, z]).repeat_interleave(sizes).to(reader.device)
            self._factors = factors, float(rate)
        self._rule = MambaRule(
            groups.size,
            mamba.state_size,
            mamba.head_dim,
            decay=-_floats(context, f"{prefix}.A_log", heads).exp(),
            rate_bias=_floats(context, f"{prefix}.dt_bias", heads),
            skip=_floats(context, f"{prefix}.D", heads),
        )

    def mix(self, x: Tensor, inputs: AttentionInputs, kv: KVTensors) -> Tensor:
        """See `RecurrentLayer.mix`."""
        heads = super().mix(x, inputs, kv)
        if self._norm is None:
            return heads
        num_groups, size = self._sizes
        if heads.shape[1] == size:
            return self._kernels.rms_norm(heads, self._norm, self._eps)
        wide = heads.float().view(len(x), num_groups, -1)
        squares = wide.square().sum(-1, keepdim=True)
        if wide.shape[2] < size:  # of a group that the ranks share
            squares = self._tp.all_reduce(squares)
        wide = (wide * torch.rsqrt(squares / size + self._eps)).flatten(1)
        return wide.to(x.dtype) * self._norm

    def _update(self, own: Inputs, banks: Sequence[StateBank], batch: AttentionBatch) -> Tensor:
        (mixed, z, rates), (convolution, matrices) = own, banks
        assert rates is not None
        mixed = self._kernels.convolve(mixed, self._convolution, self._bias, convolution, batch)
        return self._kernels.mamba(mixed, z, rates, rule=self._rule, bank=matrices, batch=batch)


class KimiDeltaLayer(DeltaLayer):
    """Kimi Delta Attention: z, and the rates of each channel's decay, are products of low rank.

    Source: Kimi Team 2025, "Kimi Linear", section 4.
    """

    def gates(
        self, context: ModelContext, sections: _Sections, prefix: str
    ) -> ColumnParallelLinear:
        """Load b, and what z and rates are made of."""
        exact, plain = context.exact, context.plain
        rank, (rates, values) = sections.rank, (sections.rates, sections.value_rows)
        whole = Part(0, rank)
        low = [(f"{prefix}.{name}_a_proj", whole) for name in "fg"]
        self._low = ColumnParallelLinear(exact, low)
        self._decays = ColumnParallelLinear(plain, [(f"{prefix}.f_b_proj", rates)], in_size=rank)
        self._z = ColumnParallelLinear(exact, [(f"{prefix}.g_b_proj", values)], in_size=rank)
        return ColumnParallelLinear(plain, sections.narrow(f"{prefix}.in_proj_"))

    def decays(self, context: ModelContext, name: str, heads: Part) -> Tensor:
        """See `DeltaLayer.decays`; the file has [1, 1, heads of all ranks, 1]."""
        assert isinstance(context.config.recurrent, DeltaConfig)
        shape = 1, 1, context.config.recurrent.num_value_heads, 1
        found = read_tensor(context.reader, name, *shape, dtype=torch.float32)
        return found.flatten()[heads.start : heads.start + heads.size].clone()

    def _inputs(self, x: Tensor) -> Inputs:
        decays, z = (part.contiguous() for part in self._low(x).chunk(2, dim=-1))
        rates = torch.cat([self._rates.wide(x), self._decays(decays).float()], dim=-1)
        return Inputs(self._in(x), self._z(z), rates)


class _Sections:
    """Where a rank's heads are in the files' tensors."""

    def __init__(self, delta: DeltaConfig, keys: Part, values: Part) -> None:
        self._delta = delta
        key_rows, value_rows = _features(keys, delta.key_dim), _features(values, delta.value_dim)
        self._keys, self._values, self.value_rows = keys, values, value_rows
        self.rank, self.rates = delta.rank, key_rows if delta.rank else values
        """Rank of products for z and rates; this rank's rates, one for each head or channel."""
        starts = (0, delta.key_size, 2 * delta.key_size)
        self._rows = (key_rows, key_rows, value_rows)
        """Queries, keys and values, each in a tensor of its own, …"""
        self._channels = [
            Part(start + rows.start, rows.size)
            for start, rows in zip(starts, self._rows, strict=True)
        ]
        """… and among the channels."""

    @property
    def num_channels(self) -> int:
        """Return the number of this rank's channels."""
        return sum(part.size for part in self._channels)

    def wide(self, prefix: str) -> list[tuple[str, Part]]:
        """Return where queries, keys, values and z are made."""
        delta = self._delta
        if delta.joined is not Joined.GROUPS:
            names, rows = ["qkv"] * 3, self._channels
            if delta.joined is Joined.NONE:
                names, rows = [*"qkv"], [*self._rows]
            channels = [(f"{prefix}{name}", part) for name, part in zip(names, rows, strict=True)]
            return channels if self.rank else [*channels, (f"{prefix}z", self.value_rows)]
        values = delta.value_size // delta.num_key_heads
        return self._grouped(f"{prefix}qkvz", (delta.key_dim, delta.key_dim, values, values))

    def narrow(self, prefix: str) -> list[tuple[str, Part]]:
        """Return where b and a are made."""
        delta = self._delta
        if delta.joined not in (Joined.GROUPS, Joined.GATES):
            names = "b" if self.rank else "ba"
            return [(f"{prefix}{name}", self._values) for name in names]
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

    def convolution(self, prefix: str) -> list[tuple[str, Part]]:
        """Return where the convolution's weights are."""
        found = []
        for part in self._channels:
            start = 0
            for name, size in self._delta.conv_sizes.items():
                first = max(part.start, start)
                count = min(part.start + part.size, start + size) - first
                if count > 0:
                    found.append((f"{prefix}.{name}.weight", Part(first - start, count)))
                start += size
        return found


def _convolution(context: ModelContext, parts: Sequence[tuple[str, Part]], width: int) -> Tensor:
    """Load the weights of this rank's channels, [width, channels]."""
    own = [read_tensor(context.reader, name, n.size, 1, width, rows=n) for name, n in parts]
    return torch.cat(own)[:, 0].T.contiguous()


def _joined(context: ModelContext, name: str, parts: Sequence[Part]) -> Tensor:
    """Load parts of a vector, one behind the other."""
    return torch.cat([read_tensor(context.reader, name, part.size, rows=part) for part in parts])


def _floats(context: ModelContext, name: str, heads: Part) -> Tensor:
    """Load a number of each of this rank's value heads, in float32."""
    return read_tensor(context.reader, name, heads.size, rows=heads, dtype=torch.float32)


def _features(heads: Part, size: int) -> Part:
    return Part(heads.start * size, heads.size * size)
