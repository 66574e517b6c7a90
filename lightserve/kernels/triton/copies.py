"""Copies of KV slots, see `kernels.copies`: one launch for all layers of a list of tokens.

Everything is moved as integers, 16 bytes at a time where a head has them. On the device a copy
takes the whole GPU for a moment. Over the bus it takes a few programs, as many as it needs to be
busy, and the rest of the GPU decodes meanwhile: page-locked memory has an address on the device,
so any rows of the host are read or written in place and no copy engine needs them in order.

Compiled once per model: neither the number of tokens nor where lists begin makes another kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_BYTES = 16384
"""What a program moves at once: 128 threads with eight accesses of 16 bytes each in flight."""
NUM_WARPS = 4
BUS_WRITERS = 16
"""Programs that write to the host: each has 16 KiB under way, and writes need no answer."""
BUS_READERS = 32
"""Programs that read from the host: 55 GB/s with 2 µs until an answer are 110 KiB under way; this
is 4 times that."""
MAX_PROGRAMS = 4096


@triton.jit(
    do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slots_ptr", "row_ids_ptr"]
)
def _move_kernel(
    pool_ptr,
    slots_ptr,
    rows_ptr,
    row_ids_ptr,
    num_tokens,
    num_slots,
    NUM_PIECES: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_PIECES: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    TO_POOL: tl.constexpr,
):
    """Move tokens between slots of the pool and rows; a tile is some pieces of one token."""
    tiles_per_token: tl.constexpr = (NUM_PIECES + BLOCK_PIECES - 1) // BLOCK_PIECES
    words = tl.arange(0, BLOCK_WORDS)[None, :]
    for tile in range(tl.program_id(0), num_tokens * tiles_per_token, tl.num_programs(0)):
        token = tile // tiles_per_token
        pieces = (tile % tiles_per_token) * BLOCK_PIECES + tl.arange(0, BLOCK_PIECES)[:, None]
        mask = (pieces < NUM_PIECES) & (words < WORDS)
        slot = tl.load(slots_ptr + token).to(tl.int64)
        in_pool = pool_ptr + (pieces.to(tl.int64) * num_slots + slot) * WORDS + words
        if TO_POOL:
            row = tl.load(row_ids_ptr + token).to(tl.int64)
            in_rows = rows_ptr + (row * NUM_PIECES + pieces) * WORDS + words
            tl.store(in_pool, tl.load(in_rows, mask=mask), mask=mask)
        else:
            in_rows = rows_ptr + (tl.cast(token, tl.int64) * NUM_PIECES + pieces) * WORDS + words
            tl.store(in_rows, tl.load(in_pool, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["row_ids_ptr"])
def _put_rows_kernel(
    source_ptr,
    rows_ptr,
    row_ids_ptr,
    num_rows,
    ROW_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy rows to numbered ones; a tile is a part of one row."""
    tiles_per_row: tl.constexpr = (ROW_WORDS + BLOCK - 1) // BLOCK
    for tile in range(tl.program_id(0), num_rows * tiles_per_row, tl.num_programs(0)):
        source_row = tl.cast(tile // tiles_per_row, tl.int64)
        row = tl.load(row_ids_ptr + source_row).to(tl.int64)
        words = (tile % tiles_per_row) * BLOCK + tl.arange(0, BLOCK)
        mask = words < ROW_WORDS
        found = tl.load(source_ptr + source_row * ROW_WORDS + words, mask=mask)
        tl.store(rows_ptr + row * ROW_WORDS + words, found, mask=mask)


class TritonCopies:
    """See `CopyKernels`."""

    def gather(self, pool: Tensor, slots: Tensor, rows: Tensor) -> None:
        """See `CopyKernels.gather`."""
        _move(pool, slots, rows, slots, to_pool=False, max_programs=MAX_PROGRAMS)

    def scatter(self, rows: Tensor, row_ids: Tensor, pool: Tensor, slots: Tensor) -> None:
        """See `CopyKernels.scatter`."""
        from_host = rows.device != pool.device
        most = BUS_READERS if from_host else MAX_PROGRAMS
        _move(pool, slots, rows, row_ids, to_pool=True, max_programs=most)

    def put_rows(self, source: Tensor, rows: Tensor, row_ids: Tensor) -> None:
        """See `CopyKernels.put_rows`."""
        if len(row_ids) == 0:
            return
        source, rows = _as_words(source.flatten(1)), _as_words(rows.flatten(1))
        row_words = source.shape[1]
        block = min(TILE_BYTES // source.itemsize, triton.next_power_of_2(row_words))
        to_host = rows.device != source.device
        most = BUS_WRITERS if to_host else MAX_PROGRAMS
        num_tiles = len(row_ids) * triton.cdiv(row_words, block)
        _put_rows_kernel[min(most, num_tiles),](
            source,
            rows,
            row_ids,
            len(row_ids),
            ROW_WORDS=row_words,
            BLOCK=block,
            num_warps=NUM_WARPS,
        )


def _move(
    pool: Tensor,
    slots: Tensor,
    rows: Tensor,
    row_ids: Tensor,
    *,
    to_pool: bool,
    max_programs: int,
) -> None:
    if len(slots) == 0:
        return
    pool, rows = _as_words(pool), _as_words(rows)
    num_pieces, words = rows.shape[1:]
    block_words = triton.next_power_of_2(words)
    block_pieces = max(1, TILE_BYTES // (block_words * pool.itemsize))
    block_pieces = min(block_pieces, triton.next_power_of_2(num_pieces))
    num_tiles = len(slots) * triton.cdiv(num_pieces, block_pieces)
    _move_kernel[min(max_programs, num_tiles),](
        pool,
        slots,
        rows,
        row_ids,
        len(slots),
        pool.shape[3],
        NUM_PIECES=num_pieces,
        WORDS=words,
        BLOCK_PIECES=block_pieces,
        BLOCK_WORDS=block_words,
        TO_POOL=to_pool,
        num_warps=NUM_WARPS,
    )


def _as_words(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as integers, the widest that its last dimension is made of."""
    assert tensor.is_contiguous()
    num_bytes = tensor.shape[-1] * tensor.itemsize
    if num_bytes % 8 == 0:
        return tensor.view(torch.int64)
    if num_bytes % 4 == 0:
        return tensor.view(torch.int32)
    return tensor.view(torch.int16)
