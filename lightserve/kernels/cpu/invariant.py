"""Kernels whose every row is computed in the same way whatever stands beside it (contract N2).

Floating-point sums depend on the order of their terms, and a library picks that order by the
shape of the whole problem. So every problem here has one shape, however large the batch:
linears run in tiles of `ROW_TILE` rows, attention in tiles of `QUERY_TILE` queries by
`KV_BLOCK` keys, and the blocks are added up one after the other. Masked keys contribute exact
zeros. Measured on torch's CPU build in float32: a row's result does not depend on its place in
a tile, nor a tile's on how many there are; `F.silu` does depend on where its vector ends, so it
is written out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lightserve.kernels.cpu.default import TorchKernels
from lightserve.kernels.interface import AttentionBatch

ROW_TILE = 32
QUERY_TILE = 16
KV_BLOCK = 64


class InvariantKernels(TorchKernels):
    """`TorchKernels` with linears, attention and activation of fixed shapes; float32 only."""

    name = "torch-batch-invariant"

    def __init__(self) -> None:
        super().__init__()
        self._tiles_of: AttentionBatch | None = None
        self._tiles: dict[int | None, _Tiles] = {}

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `Kernels.linear`."""
        num_rows = x.shape[0]
        padded = F.pad(x, (0, 0, 0, -num_rows % ROW_TILE))
        tiles = [F.linear(tile, weight, bias) for tile in torch.split(padded, ROW_TILE)]
        return torch.cat(tiles)[:num_rows] if tiles else F.linear(x, weight, bias)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """See `Kernels.silu_and_mul`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return gate / (1.0 + torch.exp(-gate)) * up

    def attention(
        self,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> Tensor:
        """See `Kernels.attention`."""
        if self._tiles_of is not batch:
            self._tiles_of, self._tiles = batch, {}
        if sliding_window not in self._tiles:
            self._tiles[sliding_window] = _tile(batch, sliding_window)
        return _attend(q, k_pool, v_pool, self._tiles[sliding_window], scale)


@dataclass(frozen=True)
class _Tiles:
    """P tiles of queries, each of one row, against NB blocks of keys."""

    queries: Tensor
    """int64 [P, QUERY_TILE], index of each query token; padding repeats a token."""
    slots: Tensor
    """int64 [P, NB * KV_BLOCK]; padding repeats a slot of the same row."""
    hidden: Tensor
    """bool [P, QUERY_TILE, NB * KV_BLOCK], keys that a query does not see."""
    is_real: Tensor
    """bool [P, QUERY_TILE], False for padding."""


def _tile(batch: AttentionBatch, sliding_window: int | None) -> _Tiles:
    starts = [
        (row, token, min(QUERY_TILE, q_len - offset), context_len - q_len + offset)
        for row, q_len, context_len, begin in zip(
            batch.host_rows,
            batch.host_q_lens,
            batch.host_context_lens,
            batch.cu_seqlens_q.tolist()[:-1],
            strict=True,
        )
        for offset in range(0, q_len, QUERY_TILE)
        for token in [begin + offset]
    ]
    rows, tokens, counts, positions = (torch.tensor(column) for column in zip(*starts, strict=True))
    lane = torch.arange(QUERY_TILE)
    is_real = lane < counts[:, None]
    lane = torch.where(is_real, lane, 0)
    query_positions = positions[:, None] + lane
    longest = int((positions + counts).max())
    keys = torch.arange(longest + -longest % KV_BLOCK)
    hidden = keys > query_positions[..., None]
    if sliding_window is not None:
        hidden |= keys <= query_positions[..., None] - sliding_window
    known = torch.minimum(keys, (positions + counts - 1)[:, None])
    slots = batch.req_to_slot[rows[:, None], known].long()
    return _Tiles(tokens[:, None] + lane, slots, hidden, is_real)


def _attend(q: Tensor, k_pool: Tensor, v_pool: Tensor, tiles: _Tiles, scale: float) -> Tensor:
    num_tiles, num_keys = tiles.slots.shape
    num_blocks = num_keys // KV_BLOCK
    num_kv_heads, head_dim = k_pool.shape[1:]
    group = q.shape[1] // num_kv_heads
    lanes = QUERY_TILE * group

    def blocks(pool: Tensor) -> Tensor:
        """Gather a pool as [P * NB * Hkv, KV_BLOCK, D]."""
        gathered = pool.index_select(0, tiles.slots.view(-1))
        split = gathered.view(num_tiles * num_blocks, KV_BLOCK, num_kv_heads, head_dim)
        return split.transpose(1, 2).reshape(-1, KV_BLOCK, head_dim)

    # [P, QUERY_TILE, Hkv, group, D] -> [P, NB, Hkv, QUERY_TILE * group, D]
    queries = q[tiles.queries].view(num_tiles, QUERY_TILE, num_kv_heads, group, head_dim)
    queries = queries.transpose(1, 2).reshape(num_tiles, 1, num_kv_heads, lanes, head_dim)
    queries = queries.expand(-1, num_blocks, -1, -1, -1).reshape(-1, lanes, head_dim)
    scores = torch.bmm(queries, blocks(k_pool).transpose(1, 2)).mul_(scale)
    scores = scores.view(num_tiles, num_blocks, num_kv_heads, QUERY_TILE, group, KV_BLOCK)
    hidden = tiles.hidden.view(num_tiles, QUERY_TILE, num_blocks, KV_BLOCK).transpose(1, 2)
    scores.masked_fill_(hidden[:, :, None, :, None], -torch.inf)
    peak = scores.amax(dim=(1, 5), keepdim=True)
    weights = torch.exp(scores.sub_(peak))
    totals = weights.sum(dim=-1)  # [P, NB, Hkv, QUERY_TILE, group]
    parts = torch.bmm(weights.view(-1, lanes, KV_BLOCK), blocks(v_pool))
    parts = parts.view(num_tiles, num_blocks, num_kv_heads, QUERY_TILE, group, head_dim)
    heads = _add_blocks(parts) / _add_blocks(totals)[..., None]
    heads = heads.transpose(1, 2).reshape(num_tiles, QUERY_TILE, q.shape[1], head_dim)
    out = torch.empty_like(q)
    out[tiles.queries[tiles.is_real]] = heads[tiles.is_real]
    return out


def _add_blocks(parts: Tensor) -> Tensor:
    """Sum over dimension 1 in order, so that trailing zeros change nothing."""
    total = parts[:, 0].clone()
    for block in range(1, parts.shape[1]):
        total += parts[:, block]
    return total
