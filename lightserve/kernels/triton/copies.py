"""Copies of KV slots, see `kernels.interface`: one launch for all layers of a list of tokens.

Everything is moved as integers, 16 bytes at a time where a head has them. Compiled once per model:
neither the number of tokens nor where lists begin makes another kernel.

Rows of the host are read and written in place, as page-locked memory has an address on the device.
That takes few programs: as many as the bus needs to be busy, so that the rest of the GPU decodes
meanwhile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.kernels.triton.launch import cdiv, launched, next_power_of_2

TILE_BYTES = 16384
"""Bytes that a program moves at once: 128 threads with eight accesses of 16 bytes each in
flight."""
NUM_WARPS = 4
BUS_WRITERS = 16
"""Programs that write to the host: each has 16 KiB under way, and writes need no answer."""
BUS_READERS = 32
"""Programs that read from the host: 55 GB/s with 2 µs until an answer are 110 KiB under way; this
is 4 times that."""
MAX_PROGRAMS = 4096


@launched
@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slots_ptr"])
def _move_kernel(
    pool_ptr, slots_ptr, rows_ptr, num_tokens, num_slots, NUM_PIECES: tl.constexpr,
    WORDS: tl.constexpr, BLOCK_PIECES: tl.constexpr, BLOCK_WORDS: tl.constexpr,
    TO_POOL: tl.constexpr,
):  # fmt: skip
    """Move tokens between slots of the pool and rows; a tile is some pieces of one token."""
    tiles_per_token: tl.constexpr = (NUM_PIECES + BLOCK_PIECES - 1) // BLOCK_PIECES
    words = tl.arange(0, BLOCK_WORDS)[None, :]
    for tile in range(tl.program_id(0), num_tokens * tiles_per_token, tl.num_programs(0)):
        token = tl.cast(tile // tiles_per_token, tl.int64)
        pieces = (tile % tiles_per_token) * BLOCK_PIECES + tl.arange(0, BLOCK_PIECES)[:, None]
        mask = (pieces < NUM_PIECES) & (words < WORDS)
        slot = tl.load(slots_ptr + token).to(tl.int64)
        in_pool = pool_ptr + (pieces.to(tl.int64) * num_slots + slot) * WORDS + words
        in_rows = rows_ptr + (token * NUM_PIECES + pieces) * WORDS + words
        if TO_POOL:
            tl.store(in_pool, tl.load(in_rows, mask=mask), mask=mask)
        else:
            tl.store(in_rows, tl.load(in_pool, mask=mask), mask=mask)


@launched
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["row_ids_ptr"])
def _rows_kernel(
    dense_ptr, rows_ptr, row_ids_ptr, num_rows, ROW_WORDS: tl.constexpr, BLOCK: tl.constexpr,
    TO_ROWS: tl.constexpr,
):  # fmt: skip
    """Copy rows in order to numbered ones, or back; a tile is a part of one row."""
    tiles_per_row: tl.constexpr = (ROW_WORDS + BLOCK - 1) // BLOCK
    for tile in range(tl.program_id(0), num_rows * tiles_per_row, tl.num_programs(0)):
        dense_row = tl.cast(tile // tiles_per_row, tl.int64)
        row = tl.load(row_ids_ptr + dense_row).to(tl.int64)
        words = (tile % tiles_per_row) * BLOCK + tl.arange(0, BLOCK)
        mask = words < ROW_WORDS
        dense = dense_ptr + dense_row * ROW_WORDS + words
        numbered = rows_ptr + row * ROW_WORDS + words
        if TO_ROWS:
            tl.store(numbered, tl.load(dense, mask=mask), mask=mask)
        else:
            tl.store(dense, tl.load(numbered, mask=mask), mask=mask)


class TritonCopies:
    """See `CopyKernels`."""

    def gather(self, pool: Tensor, slots: Tensor, rows: Tensor) -> None:
        """See `CopyKernels.gather`."""
        _move(pool, slots, rows, to_pool=False)

    def scatter(self, rows: Tensor, pool: Tensor, slots: Tensor) -> None:
        """See `CopyKernels.scatter`."""
        _move(pool, slots, rows, to_pool=True)

    def put_rows(self, source: Tensor, rows: Tensor, row_ids: Tensor) -> None:
        """See `CopyKernels.put_rows`."""
        _copy_rows(source, rows, row_ids, to_rows=True)

    def take_rows(self, rows: Tensor, row_ids: Tensor, target: Tensor) -> None:
        """See `CopyKernels.take_rows`."""
        _copy_rows(target, rows, row_ids, to_rows=False)


def _copy_rows(dense: Tensor, rows: Tensor, row_ids: Tensor, *, to_rows: bool) -> None:
    if len(row_ids) == 0:
        return
    is_over_bus = rows.device != dense.device
    dense, rows = _as_words(dense.flatten(1)), _as_words(rows.flatten(1))
    row_words = dense.shape[1]
    block = min(TILE_BYTES // dense.itemsize, next_power_of_2(row_words))
    most = MAX_PROGRAMS
    if is_over_bus:
        most = BUS_WRITERS if to_rows else BUS_READERS
    _rows_kernel[min(most, len(row_ids) * cdiv(row_words, block)),](
        dense,
        rows,
        row_ids,
        len(row_ids),
        ROW_WORDS=row_words,
        BLOCK=block,
        TO_ROWS=to_rows,
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )


def _move(pool: Tensor, slots: Tensor, rows: Tensor, *, to_pool: bool) -> None:
    if len(slots) == 0:
        return
    pool, rows = _as_words(pool), _as_words(rows)
    num_pieces, words = rows.shape[1:]
    block_words = next_power_of_2(words)
    block_pieces = max(1, TILE_BYTES // (block_words * pool.itemsize))
    block_pieces = min(block_pieces, next_power_of_2(num_pieces))
    num_tiles = len(slots) * cdiv(num_pieces, block_pieces)
    _move_kernel[min(MAX_PROGRAMS, num_tiles),](
        pool, slots, rows, len(slots), pool.shape[3],
        NUM_PIECES=num_pieces,
        WORDS=words,
        BLOCK_PIECES=block_pieces,
        BLOCK_WORDS=block_words,
        TO_POOL=to_pool,
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )  # fmt: skip


def _as_words(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as integers, the widest that its last dimension is made of."""
    assert tensor.is_contiguous()
    num_bytes = tensor.shape[-1] * tensor.itemsize
    if num_bytes % 8 == 0:
        return tensor.view(torch.int64)
    if num_bytes % 4 == 0:
        return tensor.view(torch.int32)
    return tensor.view(torch.int16)
