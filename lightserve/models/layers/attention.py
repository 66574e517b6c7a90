"""Self-attention over the slot-indexed KV pool."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from lightserve.kernels.interface import (
    MAX_FEW_TOKENS,
    AttentionBatch,
    MostTokens,
    QKNorm,
    ScoreMod,
    UnknownValues,
)
from lightserve.kernels.reference import numbers_of_8_bit_kv
from lightserve.models.base import KVTensors, Part, even_part, kv_head_part
from lightserve.models.layers.linear import (
    ColumnParallelLinear,
    ModelContext,
    Norm,
    RowParallelLinear,
    SplitNorm,
    WeightReader,
)
from lightserve.models.rope import (
    DefaultRope,
    DynamicRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    ProportionalRope,
    RopeConfig,
    YarnRope,
)
from lightserve.models.stored_weights import StoredWeight


class AttentionInputs(NamedTuple):
    """The inputs that every layer's attention of one pass shares."""

    batch: AttentionBatch
    cos: Tensor
    """float32 [T, rotary_dim / 2]."""
    sin: Tensor


def in_chunks(batch: AttentionBatch, size: int) -> AttentionBatch:
    """Return a batch that has a row for each chunk of positions in which a row has new tokens.

    A token sees the positions of its own chunk of `size` alone then.
    """
    is_unknown = isinstance(batch.host_context_lens, UnknownValues)
    if not is_unknown and max(batch.host_context_lens, default=0) <= size:
        return batch
    if is_unknown or batch.is_bounded:
        return _in_chunks_on_device(batch, size)
    rows, starts, q_lens, context_lens = [], [], [], []
    for row, q_len, context_len in zip(
        batch.host_rows, batch.host_q_lens, batch.host_context_lens, strict=True
    ):
        place = context_len - q_len
        for start in range(place // size * size, max(context_len, 1), size):
            end = min(context_len, start + size)
            rows.append(row)
            starts.append(start)
            q_lens.append(end - place)
            context_lens.append(end - start)
            place = end
    device, table = batch.rows.device, batch.req_to_slot
    places = torch.tensor(starts)[:, None] + torch.arange(max(context_lens))
    numbers = torch.tensor(rows)[:, None].to(device)
    return replace(
        batch,
        req_to_slot=table[numbers, places.clamp(max=table.shape[1] - 1).to(device)],
        rows=torch.arange(len(rows), device=device),
        cu_seqlens_q=torch.tensor([0, *q_lens]).cumsum(0).to(device, torch.int32),
        context_lens=torch.tensor(context_lens, dtype=torch.int32, device=device),
        host_rows=range(len(rows)),
        host_q_lens=q_lens,
        host_context_lens=context_lens,
        prepared={},
    )


def seeing_whole(
    heads: Tensor,
    q: Tensor,
    pools: tuple[Tensor, Tensor],
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None,
) -> Tensor:
    """Return heads [T, Hq, D] with those of tokens of images that see each other (`batch.seen`).

    As Gemma 3 has it, and Gemma 4 in layers with a window (Gemma Team, 2025; transformers' masks):
    such a token sees its image to the end, and from the front what its window has, `window`
    positions with its own. `q` [T, Hq, D].
    """
    for image in batch.seen:
        low = 0 if window is None else max(0, image.start - window + 1)
        slots = batch.req_to_slot[image.row, low : image.end].long()
        k, v = (pool[slots] for pool in pools)
        if k.dtype.itemsize == 1:
            k, v = (numbers_of_8_bit_kv(part, q.shape[2]).to(q.dtype) for part in (k, v))
        mask: Tensor | None = None
        if window is not None and image.end - low > window:
            places = torch.arange(low, image.end, device=q.device)
            mask = places > places[image.start - low :, None] - window
        own = slice(image.first, image.first + image.end - image.start)
        own_q, k, v = (part.transpose(0, 1)[None] for part in (q[own], k, v))
        mixed = functional.scaled_dot_product_attention(
            own_q, k, v, attn_mask=mask, scale=scale, enable_gqa=True
        )
        heads[own] = mixed[0].transpose(0, 1)
    return heads


def _in_chunks_on_device(batch: AttentionBatch, size: int) -> AttentionBatch:
    """Return the same where the device alone knows how long rows are: a row for each chunk in which
    a row may have new tokens.

    The table's lines begin wherever a chunk may: they overlap, and are more than its length says,
    which must not reach behind its memory.
    """
    table, num_rows = batch.req_to_slot, len(batch.rows)
    most = batch.most.num_tokens if batch.most is not None else max(batch.host_q_lens, default=1)
    num_parts = 1 + -(-(most - 1) // size)
    q_lens, ends = batch.cu_seqlens_q.diff()[:, None], batch.context_lens[:, None]
    places = ends - q_lens
    parts = torch.arange(num_parts, dtype=places.dtype, device=places.device)
    starts = (places // size + parts) * size
    ends = ends.minimum(starts + size)
    counts = (ends - places.maximum(starts)).clamp(min=0).flatten()
    unit = math.gcd(table.stride(0), size)
    lines = (batch.rows[:, None] * table.stride(0) + starts) // unit
    width = min(size, table.shape[1])
    bounds, host_q_lens = batch.most, batch.host_q_lens
    if num_parts > 1:
        total, few = bounds if bounds is not None else (sum(host_q_lens), MAX_FEW_TOKENS)
        bounds = MostTokens(total, min(total, max(few, num_parts * num_rows)))
        host_q_lens = UnknownValues("host_q_lens", num_parts * num_rows)
    return replace(
        batch,
        req_to_slot=table.as_strided((len(table), width), (unit, 1)),
        rows=lines.flatten(),
        cu_seqlens_q=functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32),
        context_lens=(ends - starts).flatten().clamp(min=0),
        host_rows=UnknownValues("host_rows", num_parts * num_rows),
        host_q_lens=host_q_lens,
        host_context_lens=UnknownValues("host_context_lens", num_parts * num_rows),
        most=bounds,
        prepared={},
    )


class Attention(Protocol):
    """The block in front of a layer's feed-forward block."""

    def __init__(self, context: ModelContext, prefix: str, *, layer: int) -> None:
        """Load its weights."""

    def mix(self, x: Tensor, inputs: AttentionInputs, kv: KVTensors) -> Tensor:
        """Write the new tokens' KV and attend; x [T, hidden] -> [T, features of all heads]."""

    def mix_behind(
        self, norm: Norm, x: Tensor, residual: Tensor, inputs: AttentionInputs, kv: KVTensors
    ) -> tuple[Tensor, Tensor]:
        """Return (`mix` of norm(x + residual), x + residual); may overwrite `residual`."""

    def project(self, heads: Tensor) -> Tensor:
        """Return hidden states of any N of the tokens, [N, hidden]."""


class UnfusedAttention(ABC):
    """Attention whose first products are not fused with the norm before them."""

    _out: RowParallelLinear

    @abstractmethod
    def mix(self, x: Tensor, inputs: AttentionInputs, kv: KVTensors) -> Tensor:
        """See `Attention.mix`."""

    def mix_behind(
        self, norm: Norm, x: Tensor, residual: Tensor, inputs: AttentionInputs, kv: KVTensors
    ) -> tuple[Tensor, Tensor]:
        """See `Attention.mix_behind`."""
        x, residual = norm.add(x, residual)
        return self.mix(x, inputs, kv), residual

    def project(self, heads: Tensor) -> Tensor:
        """Return hidden states; heads [N, features of all heads] -> [N, hidden]."""
        return self._out(heads)


class SelfAttention:
    """Grouped-query attention with rotary positions, and a window where the layer has one.

    `mix` gives each token's heads and `project` turns heads into hidden states, so that a
    caller may drop tokens between the two.
    """

    def __init__(self, context: ModelContext, prefix: str, *, layer: int) -> None:
        config, tp = context.config, context.tp
        shape = config.shape_of(layer)
        head_dim = shape.head_dim
        q_part = even_part(config.num_heads, tp)
        kv_part = kv_head_part(shape.num_kv_heads, tp)
        self._kernels = context.kernels
        self._place = config.kv_layers.index(shape.kv_source)
        self._num_heads, self._num_kv_heads, self._head_dim = q_part.size, kv_part.size, head_dim
        self._scale = config.attention_scale or head_dim**-0.5
        self._sliding_window = config.sliding_windows[layer]
        # In Gemma 4 an image's tokens see each other where there is a window, nowhere else.
        self._sees_images = config.gemma4 is None or self._sliding_window is not None
        self._score_mod = _score_mod(context, prefix, q_part)
        q_rows, kv_rows = _features(q_part, head_dim), _features(kv_part, head_dim)
        parts = [
            (f"{prefix}.{name}_proj", q_rows if name == "q" else kv_rows) for name in shape.products
        ]
        self._sizes = [rows.size for _, rows in parts]
        if "qkv" in config.merged:
            k_start = config.num_heads * head_dim
            v_start = k_start + config.num_kv_heads * head_dim
            starts = (0, k_start, v_start)
            parts = [
                (f"{prefix}.qkv_proj", Part(start + rows.start, rows.size))
                for start, (_, rows) in zip(starts, parts, strict=True)
            ]
        if "grouped_qkv" in config.merged:
            group = config.num_heads // config.num_kv_heads
            parts = _grouped_parts(f"{prefix}.qkv_proj", q_part, kv_part, group, head_dim)
        if has_gate := config.has_output_gate:
            queries, gates = (
                [
                    (f"{prefix}.q_proj", Part(2 * q_rows.start + place, head_dim))
                    for place in range(first, 2 * q_rows.size, 2 * head_dim)
                ]
                for first in (0, head_dim)
            )
            parts = [*queries, *parts[1:], *gates]
        own = context.exact
        if config.rotates_neighbours:
            rotated = frozenset((name, rows.start) for name, rows in parts[:2])
            reader = NeighboursApart(context.reader, rotated, head_dim, shape.rotary_dim)
            own = replace(own, reader=reader)
        self._qkv = ColumnParallelLinear(own, parts, has_bias=config.qkv_bias)
        self._out = RowParallelLinear(
            context, f"{prefix}.o_proj", q_rows, has_bias=config.attention_output_bias
        )
        self._sizes += [q_rows.size] * has_gate
        self._qk_norm = self.qk_norm(context, prefix)
        self._whole_norms: list[SplitNorm] = []
        if config.has_whole_qk_norm:
            sizes = config.num_heads * head_dim, config.num_kv_heads * head_dim
            self._whole_norms = [
                SplitNorm(context, f"{prefix}.{name}_norm", rows, size)
                for name, rows, size in zip("qk", (q_rows, kv_rows), sizes, strict=True)
            ]

    def qk_norm(self, context: ModelContext, prefix: str) -> QKNorm | None:
        """Load the norms of heads before the rotary embedding; here there are none."""
        return None

    def normalised(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise all heads together, where the model does. q [T, Hq * D], k [T, Hkv * D]."""
        if not self._whole_norms:
            return q, k
        of_queries, of_keys = self._whole_norms
        # Written back, they lie beside the values as elsewhere: the native core asks for it.
        return q.copy_(of_queries(q)), k.copy_(of_keys(k))

    def grown(self, q: Tensor, positions: Tensor) -> Tensor:
        """Return queries [T, Hq, D] as they are at their positions [T]; here they do not change."""
        return q

    def mix(self, x: Tensor, inputs: AttentionInputs, kv: KVTensors) -> Tensor:
        """Write the new tokens' KV and attend; x [T, hidden] -> [T, Hq * D]."""
        return self._mix(self._qkv(x), inputs, kv)

    def mix_behind(
        self, norm: Norm, x: Tensor, residual: Tensor, inputs: AttentionInputs, kv: KVTensors
    ) -> tuple[Tensor, Tensor]:
        """See `Attention.mix_behind`."""
        qkv, residual = self._qkv.behind(norm, x, residual)
        return self._mix(qkv, inputs, kv), residual

    def _mix(self, qkv: Tensor, inputs: AttentionInputs, kv: KVTensors) -> Tensor:
        kernels, num_tokens = self._kernels, qkv.shape[0]
        k_pool, v_pool = kv.k[self._place], kv.v[self._place]
        parts = qkv.split_with_sizes(self._sizes, dim=-1)
        q = self.rotate_and_write(parts, inputs, (k_pool, v_pool))
        q = self.grown(q, inputs.batch.positions)
        heads = kernels.attention(
            q,
            k_pool,
            v_pool,
            inputs.batch,
            scale=self._scale,
            sliding_window=self._sliding_window,
            score_mod=self._score_mod,
        )
        if inputs.batch.seen and self._sees_images:
            pools, window = (k_pool, v_pool), self._sliding_window
            heads = seeing_whole(heads, q, pools, inputs.batch, scale=self._scale, window=window)
        heads = heads.reshape(num_tokens, self._sizes[0])
        return kernels.gated(heads, parts[3]) if len(parts) > 3 else heads

    def rotate_and_write(
        self, parts: Sequence[Tensor], inputs: AttentionInputs, pools: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Store the keys and values of new tokens, and return their queries [T, Hq, D], rotated.

        `parts`: queries, keys, values and more [T, H * D]; `pools`: of keys and of values.
        """
        q, k, v = parts[:3]
        q, k = self.normalised(q, k)
        num_tokens, head_dim = len(q), self._head_dim
        return self._kernels.rotate_and_write(
            q.view(num_tokens, self._num_heads, head_dim),
            k.view(num_tokens, self._num_kv_heads, head_dim),
            v.view(num_tokens, self._num_kv_heads, head_dim),
            cos=inputs.cos,
            sin=inputs.sin,
            k_pool=pools[0],
            v_pool=pools[1],
            slot_mapping=inputs.batch.slot_mapping,
            qk_norm=self._qk_norm,
        )

    def project(self, heads: Tensor) -> Tensor:
        """Return hidden states; heads [N, Hq * D] -> [N, hidden]."""
        return self._out(heads)


def growth_of_queries(context: ModelContext, dtype: torch.dtype | None = None) -> Tensor | None:
    """Return factors of queries at each position that is served, [positions, 1, 1]; None: 1.

    `dtype`: theirs; None: the model's.
    """
    growth, reader = context.config.query_growth, context.reader
    if growth is None:
        return None
    places = torch.arange(growth.first, growth.first + context.context_len)
    lengths = places.div(growth.length, rounding_mode="floor")
    factors = 1.0 + growth.beta * torch.log(1.0 + lengths)
    return factors.to(reader.device, dtype or reader.dtype)[:, None, None]


def _score_mod(context: ModelContext, prefix: str, heads: Part) -> ScoreMod | None:
    """Return the changes of the scores of this rank's heads."""
    config, reader = context.config, context.reader
    slopes = sinks = None
    if config.alibi_slopes is not None:
        own = config.alibi_slopes[heads.start : heads.start + heads.size]
        slopes = torch.tensor(own, dtype=torch.float32, device=reader.device)
    if config.has_sinks:
        sinks = torch.empty(heads.size, dtype=torch.float32, device=reader.device)
        reader.read_into(sinks, f"{prefix}.sinks", rows=heads)
    if slopes is None and sinks is None and config.attention_soft_cap is None:
        return None
    return ScoreMod(config.attention_soft_cap, slopes, sinks)


def _grouped_parts(
    name: str, q_part: Part, kv_part: Part, group: int, head_dim: int
) -> list[tuple[str, Part]]:
    """Return where this rank's heads are in a tensor that has them group by group.

    A group: `group` query heads, the key head that they read, and the value head.
    """
    queries, keys, values = [], [], []
    for kv_head in range(kv_part.start, kv_part.start + kv_part.size):
        first = max(q_part.start, kv_head * group)
        end = min(q_part.start + q_part.size, (kv_head + 1) * group)
        queries.append(Part(first + 2 * kv_head, end - first))
        keys.append(Part((kv_head + 1) * group + 2 * kv_head, 1))
        values.append(Part((kv_head + 1) * group + 2 * kv_head + 1, 1))
    return [(name, _features(part, head_dim)) for part in (*queries, *keys, *values)]


class NeighboursApart:
    """A reader that puts rotated pairs half the rotated part of a head apart, as kernels want them.

    Products of queries and keys do not depend on the order of a head's dimensions.
    """

    def __init__(
        self,
        reader: WeightReader,
        rotated: frozenset[tuple[str, int]],
        head_dim: int,
        rotary_dim: int,
        *,
        first: int = 0,
    ) -> None:
        """`rotated`: of parts whose outputs are heads that are rotated, module and first row.

        `first`: number of a head that is the first to be rotated.
        """
        self.dtype, self.device = reader.dtype, reader.device
        self.has = reader.has
        self._reader = reader
        self._rotated = rotated
        before, turned, rest = torch.arange(head_dim).split_with_sizes(
            (first, rotary_dim, head_dim - first - rotary_dim)
        )
        order = torch.cat([before, turned[0::2], turned[1::2], rest])
        self._order = order.to(self.device)

    def read_into(
        self, target: Tensor, name: str, *, rows: Part | None = None, columns: Part | None = None
    ) -> None:
        """See `WeightReader.read_into`; `rows` are whole heads."""
        self._reader.read_into(target, name, rows=rows, columns=columns)
        if self._turns(name, rows):
            heads = target.view(-1, len(self._order), *target.shape[1:])
            heads.copy_(heads.index_select(1, self._order))

    def read_stored(
        self, name: str, *, rows: Part | None = None, columns: Part | None = None
    ) -> StoredWeight | None:
        """See `WeightReader.read_stored`; `rows` are whole heads."""
        weight = self._reader.read_stored(name, rows=rows, columns=columns)
        if weight is None or not self._turns(name, rows):
            return weight
        places = torch.arange(len(weight.values)).view(-1, len(self._order))
        return weight.rows(places[:, self._order.cpu()].flatten())

    def _turns(self, name: str, rows: Part | None) -> bool:
        return rows is not None and (name.rpartition(".")[0], rows.start) in self._rotated


def _features(heads: Part, head_dim: int) -> Part:
    return Part(heads.start * head_dim, heads.size * head_dim)


# ----------------------------------------------------------------------
# Rotary position embedding: a float32 table of cos and sin, computed as transformers does.
#
# Each kind gives inverse frequencies and a factor on cos and sin; the formulas and their order of
# operations are transformers' (`modeling_rope_utils`), so that the tables agree to the bit.
#
# Dynamic NTK. transformers recomputes the base from the length of the longest sequence in each
# call, so the same position is rotated differently from one step to the next. A server caches
# keys and shares them between requests, so a position must always be rotated the same way: the
# base is computed once, for the context length that is served. Up to `max_position_embeddings`
# (the default context length) that is plain RoPE, exactly as transformers; a longer
# --max-model-len gives what transformers gives for a sequence of that length, at every position.
# LongRoPE's factors are chosen the same way.


class Frequencies(NamedTuple):
    """The frequencies that a kind of RoPE comes down to."""

    inverse: Tensor
    """float32 [head_dim / 2], radians per position."""
    scale: float
    """Factor on cos and sin."""


def frequencies(
    rope: RopeConfig, *, head_dim: int, max_position_embeddings: int, context_len: int
) -> Frequencies:
    """Return the frequencies for serving sequences of up to `context_len` tokens.

    `head_dim`: how many of a head's dimensions are rotated.
    """
    match rope:
        case LongRope():
            is_long = context_len > rope.original_max_position_embeddings
            factors = rope.long_factors if is_long else rope.short_factors
            exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
            inverse = 1.0 / (torch.tensor(factors) * rope.theta**exponents)
            return Frequencies(inverse, rope.attention_factor)
        case DefaultRope(theta=theta):
            return Frequencies(_inverse(theta, head_dim), 1.0)
        case LinearRope(theta=theta, factor=factor):
            return Frequencies(_inverse(theta, head_dim) / factor, 1.0)
        case DynamicRope():
            theta = _dynamic_theta(rope, head_dim, max_position_embeddings, context_len)
            return Frequencies(_inverse(theta, head_dim), 1.0)
        case Llama3Rope():
            return Frequencies(_llama3_inverse(rope, head_dim), 1.0)
        case ProportionalRope():
            inverse = _inverse(rope.theta, head_dim)
            inverse[int(rope.share * head_dim // 2) :] = 0
            return Frequencies(inverse / rope.factor, 1.0)
        case YarnRope():
            return Frequencies(_yarn_inverse(rope, head_dim), _yarn_scale(rope))


class RotaryTable:
    """cos and sin of every position of the served context."""

    def __init__(
        self,
        table: Frequencies,
        *,
        context_len: int,
        device: torch.device,
        axes: Sequence[int] = (),
    ) -> None:
        """`axes`: see `VisionConfig.axes`."""
        self._axes = torch.tensor(axes, dtype=torch.int64, device=device)
        positions = torch.arange(context_len, dtype=torch.float32)
        angles = positions[:, None] * table.inverse
        self._cos = (angles.cos() * table.scale).to(device)
        self._sin = (angles.sin() * table.scale).to(device)

    def select(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return float32 cos and sin [T, head_dim / 2] at int64 positions [T] or [3, T]."""
        if positions.dim() == 2:
            places = positions.index_select(0, self._axes).T
            return self._cos.gather(0, places), self._sin.gather(0, places)
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)


def rotary_table(context: ModelContext, rope: RopeConfig, rotary_dim: int) -> RotaryTable:
    """Return the rotary embedding of the served context, for so many of a head's dimensions."""
    config = context.config
    table = frequencies(
        rope,
        head_dim=rotary_dim,
        max_position_embeddings=config.max_position_embeddings,
        context_len=context.context_len,
    )
    axes = () if config.vision is None else config.vision.axes
    device = context.reader.device
    return RotaryTable(table, context_len=context.context_len, device=device, axes=axes)


def _inverse(theta: float, head_dim: int) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / (theta**exponents)


def _dynamic_theta(
    rope: DynamicRope, head_dim: int, max_position_embeddings: int, context_len: int
) -> float:
    length = max(context_len, max_position_embeddings)
    growth = rope.factor * length / max_position_embeddings - (rope.factor - 1)
    return rope.theta * float(growth ** (head_dim / (head_dim - 2)))


def _llama3_inverse(rope: Llama3Rope, head_dim: int) -> Tensor:
    inverse = _inverse(rope.theta, head_dim)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    length = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / inverse
    scaled = torch.where(wavelengths > length / low, inverse / rope.factor, inverse)
    smooth = (length / wavelengths - low) / (high - low)
    between = ~(wavelengths < length / high) & ~(wavelengths > length / low)
    blended = (1 - smooth) * scaled / rope.factor + smooth * scaled
    return torch.where(between, blended, scaled)


def _yarn_inverse(rope: YarnRope, head_dim: int) -> Tensor:
    powers = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    extrapolated, interpolated = 1.0 / powers, 1.0 / (rope.factor * powers)
    low = _yarn_dimension(rope, head_dim, rope.beta_fast)
    high = _yarn_dimension(rope, head_dim, rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # as transformers: no division by zero
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    keep = 1 - ramp.clamp(0, 1)
    return interpolated * (1 - keep) + extrapolated * keep


def _yarn_dimension(rope: YarnRope, head_dim: int, num_rotations: float) -> float:
    """Return the dimension that turns `num_rotations` times over the original length."""
    length = rope.original_max_position_embeddings
    turns = math.log(length / (num_rotations * 2 * math.pi))
    return head_dim * turns / (2 * math.log(rope.theta))


def _yarn_scale(rope: YarnRope) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
