"""Kernels whose every row is computed in the same way whatever stands beside it.

Floating-point sums depend on the order of their terms, and a library picks that order by the
shape of the whole problem. So the shape of the problem in which a token is computed is a function
of the token's position alone, never of the batch or of the chunk:

- linears run in tiles of `ROW_TILE` rows;
- queries run in tiles of `QUERY_TILE` that begin at multiples of it, against all keys up to the
  next multiple of `KV_BLOCK`. Masked keys have a weight of exactly zero.

Measured on torch's CPU build in float32: a row's product does not depend on its place in a tile
(`pack_weight` checks it for each weight), nor a batched product on the size of the batch; norms,
exp and softmax do not depend on their neighbours. `F.linear` of 1, 2, 3 or 7 rows differs from
that of 16, and `F.silu` depends on where its vector ends, so it is written out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from lightserve.errors import StartupError
from lightserve.kernels.cpu import default
from lightserve.kernels.cpu.default import TorchKernels
from lightserve.kernels.cpu.plan import KVSource
from lightserve.kernels.interface import AttentionBatch, Can, ScoreMod
from lightserve.kernels.weights import Weight

ROW_TILE = 16
QUERY_TILE = 16
KV_BLOCK = 64
GROUP_TOKENS = 8192
"""Most keys gathered at once, unless one tile has more."""

IntArray = npt.NDArray[np.int64]


class InvariantKernels(TorchKernels):
    """`TorchKernels` with linears, attention and activation of fixed shapes; float32 only."""

    name = "torch-batch-invariant"
    can = Can(0)
    chunk_size = 1

    def pack_weight(self, weight: Tensor, *, is_gated: bool = False) -> Tensor:
        """See `Kernels.pack_weight`."""
        result = default.pack(weight)
        rows = torch.linspace(-1.0, 1.0, weight.shape[1]).to(weight.dtype).expand(ROW_TILE, -1)
        products = default.linear(rows, result, None)
        if not bool((products == products[0]).all()):
            raise StartupError(
                "--batch-invariant is not possible on this machine: with a weight of shape"
                f" {list(weight.shape)} a row's product depends on its place in the batch"
            )
        return result

    def linear(
        self, x: Tensor, weight: Weight, bias: Tensor | None, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        """See `Kernels.linear`."""
        assert isinstance(weight, Tensor)
        num_rows = x.shape[0]
        padded = F.pad(x, (0, 0, 0, -num_rows % ROW_TILE))
        out = x.new_empty(padded.shape[0], weight.shape[0])
        for start in range(0, num_rows, ROW_TILE):
            tile = slice(start, start + ROW_TILE)
            out[tile] = default.linear(padded[tile], weight, bias)
        return out[:num_rows].to(dtype or x.dtype)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """See `Kernels.silu_and_mul`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return gate / torch.exp(-gate).add_(1.0) * up

    def attention(
        self,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        sliding_window: int | None,
        score_mod: ScoreMod | None = None,
    ) -> Tensor:
        """See `Kernels.attention`."""
        if not len(q):
            return torch.empty_like(q)
        key = (InvariantKernels, sliding_window)
        groups: list[_TileGroup] | None = batch.prepared.get(key)
        if groups is None:
            groups = batch.prepared[key] = list(_tile_groups(batch, sliding_window))
        out, mod = torch.empty_like(q), score_mod or ScoreMod()
        for group in groups:
            heads = _attend(q[group.tokens], k_pool, v_pool, group, scale, mod=mod)
            out[group.tokens[group.is_real]] = heads[group.is_real]
        return out


@dataclass(frozen=True, eq=False)
class _TileGroup:
    """P tiles of queries, each of one row, against equally many keys."""

    tokens: Tensor
    """int64 [P, QUERY_TILE], index of each query token; padding repeats one."""
    is_real: Tensor
    """bool [P, QUERY_TILE], False for padding."""
    source: KVSource
    """Slots [P, length]; padding repeats one of the same row."""
    hidden: Tensor
    """bool [P, QUERY_TILE, 1, length], keys that a query does not see."""
    distances: Tensor
    """int64, as `hidden`: how far a key stands before the query."""


@dataclass(frozen=True, eq=False)
class _Tiles:
    """All tiles of a pass, int64 [P] each. Positions are in the sequence."""

    row: IntArray
    """Row of req_to_slot."""
    token: IntArray
    """Index of the first real query among the pass's tokens."""
    first: IntArray
    """Position of the first real query."""
    last: IntArray
    """Position of the last real query."""

    def __getitem__(self, index: IntArray) -> _Tiles:
        return _Tiles(self.row[index], self.token[index], self.first[index], self.last[index])


def _tiles(batch: AttentionBatch) -> _Tiles:
    """Cut every row's queries at multiples of QUERY_TILE."""
    q_lens = np.array(batch.host_q_lens, dtype=np.int64)
    ends = np.array(batch.host_context_lens, dtype=np.int64)
    starts = ends - q_lens
    num_tiles = np.where(q_lens > 0, (ends - 1) // QUERY_TILE - starts // QUERY_TILE + 1, 0)
    owner = np.repeat(np.arange(len(ends)), num_tiles)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    begin = (starts[owner] // QUERY_TILE + number) * QUERY_TILE
    first = np.maximum(begin, starts[owner])
    return _Tiles(
        row=np.array(batch.host_rows, dtype=np.int64)[owner],
        token=(np.cumsum(q_lens) - q_lens)[owner] + first - starts[owner],
        first=first,
        last=np.minimum(begin + QUERY_TILE, ends[owner]) - 1,
    )


def _tile_groups(batch: AttentionBatch, sliding_window: int | None) -> Iterator[_TileGroup]:
    """Put tiles with equally many keys together, within GROUP_TOKENS."""
    tiles = _tiles(batch)
    begin = tiles.first // QUERY_TILE * QUERY_TILE
    end = _round_up(begin + QUERY_TILE)
    start = np.zeros_like(begin)
    if sliding_window is not None:
        start = np.maximum(0, begin + 1 - sliding_window) // KV_BLOCK * KV_BLOCK
    lengths = end - start
    for length in np.unique(lengths):
        members = np.flatnonzero(lengths == length)
        size = max(1, GROUP_TOKENS // int(length))
        for offset in range(0, len(members), size):
            some = members[offset : offset + size]
            yield _group(batch, tiles[some], start[some], int(length), sliding_window)


def _group(
    batch: AttentionBatch, tiles: _Tiles, start: IntArray, length: int, sliding_window: int | None
) -> _TileGroup:
    lane = tiles.first[:, None] // QUERY_TILE * QUERY_TILE + np.arange(QUERY_TILE)
    query = np.clip(lane, tiles.first[:, None], tiles.last[:, None])
    key = start[:, None] + np.arange(length)
    hidden = key[:, None] > query[..., None]
    lowest = np.zeros_like(tiles.first)
    if sliding_window is not None:
        hidden |= key[:, None] <= query[..., None] - sliding_window
        lowest = np.maximum(0, tiles.first + 1 - sliding_window)
    # Only slots that a real query sees are read: the others may hold anything.
    known = np.clip(key, lowest[:, None], tiles.last[:, None])
    slots = batch.req_to_slot.numpy()[tiles.row[:, None], known]
    return _TileGroup(
        tokens=torch.from_numpy(tiles.token[:, None] + query - tiles.first[:, None]),
        is_real=torch.from_numpy(query == lane),
        source=KVSource(length, -1, torch.from_numpy(slots.reshape(-1))),
        hidden=torch.from_numpy(hidden[:, :, None]),
        distances=torch.from_numpy((query[..., None] - key[:, None])[:, :, None]),
    )


def _attend(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, group: _TileGroup, scale: float, *, mod: ScoreMod
) -> Tensor:
    """Attend q [P, QUERY_TILE, Hq, D] -> the same shape."""
    num_tiles, _, num_heads, head_dim = q.shape
    num_kv_heads, length = k_pool.shape[1], group.hidden.shape[-1]
    size = num_heads // num_kv_heads

    def gather(pool: Tensor) -> Tensor:
        """Return [Hkv * P, length, D]."""
        return group.source.read(pool).view(num_kv_heads * num_tiles, length, head_dim)

    lanes = q.view(num_tiles, QUERY_TILE, num_kv_heads, size, head_dim).permute(2, 0, 1, 3, 4)
    queries = (lanes * scale).reshape(num_kv_heads * num_tiles, QUERY_TILE * size, head_dim)
    scores = torch.bmm(queries, gather(k_pool).mT)
    by_head = scores.view(num_kv_heads, num_tiles, QUERY_TILE, size, length)
    if mod.soft_cap is not None:
        # tanh written out: torch's own depends, in its last bits, on where its vectors end.
        power = torch.exp(scores * (2.0 / mod.soft_cap)).clamp_(max=1e30)
        scores.copy_((power - 1.0) / (power + 1.0) * mod.soft_cap)
    if mod.slopes is not None:
        by_head -= mod.slopes.view(num_kv_heads, 1, 1, size, 1) * group.distances
    by_head.masked_fill_(group.hidden, float("-inf"))
    if mod.sinks is not None:
        last = mod.sinks.view(num_kv_heads, 1, 1, size, 1).expand(-1, num_tiles, QUERY_TILE, -1, 1)
        scores = torch.cat([scores, last.reshape(*scores.shape[:2], 1)], dim=-1)
    heads = torch.bmm(scores.softmax(dim=-1)[..., :length], gather(v_pool))
    heads = heads.view(num_kv_heads, num_tiles, QUERY_TILE, size, head_dim)
    return heads.permute(1, 2, 0, 3, 4).reshape(q.shape)


def _round_up(value: IntArray) -> IntArray:
    result: IntArray = -(-value // KV_BLOCK) * KV_BLOCK
    return result
