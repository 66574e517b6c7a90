"""Which chunks' contexts are cut into stretches, so that a few programs need not walk them alone.

A block of queries walks its context in one program, and a chunk of some hundred tokens has but a
few blocks: over a long context the rest of the GPU would wait for them.

    64 tokens over 16,320 cached, 8 KV heads, 132 multiprocessors
    whole    2 blocks x 8 heads =  16 programs, each walks 16,384 positions
    cut      … x 8 stretches    = 128 programs, each walks  2,048, then a merge

A context is cut where it is at least twice a program's fair share of the step: of all positions
that blocks walk, divided by the programs that run at once. All numbers are the host's.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightserve.kernels.triton.configs import (
    AttentionShape,
    Gpu,
    PrefillConfig,
    num_prefill_programs,
)

Ints = npt.NDArray[np.int64]


class Blocks(NamedTuple):
    """Blocks of queries, int64 [num blocks] each."""

    rows: Ints
    starts: Ints
    """First token of each within its row's new tokens."""


class Cuts(NamedTuple):
    """Stretches of the contexts of blocks, and the parts that they give each token; int64."""

    rows: Ints
    """[num stretches], of the block."""
    starts: Ints
    """[num stretches], of the block."""
    stretches: Ints
    """[num stretches, 4]: begin, end, the part of the block's first token, parts of a token."""
    tokens: Ints
    """[num tokens], indices among the batch's new tokens."""
    firsts: Ints
    """[num tokens], first part of each."""
    counts: Ints
    """[num tokens], parts of each."""

    @property
    def num_parts(self) -> int:
        """Of all tokens."""
        return int(self.counts.sum())


def blocks_of(chunks: Ints, q_lens: Ints, size: int) -> Blocks:
    """Return the blocks of `size` tokens of the rows `chunks`, in order."""
    counts = _up(q_lens[chunks], size)
    starts = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * size
    return Blocks(np.repeat(chunks, counts), starts)


def rows_to_cut(
    q_lens: Ints,
    context_lens: Ints,
    shape: AttentionShape,
    window: int | None,
    config: PrefillConfig,
    gpu: Gpu,
) -> Ints:
    """Return the rows with several new tokens of which some block's context is to be cut."""
    chunks = np.flatnonzero(q_lens > 1)
    # Most steps: no context is long enough, whoever walks it.
    if not chunks.size or int(context_lens[chunks].max()) < 2 * config.split_len:
        return chunks[:0]
    size = config.tokens(shape.group)
    blocks = blocks_of(chunks, q_lens, size)
    lens = _lens(blocks, q_lens, context_lens, size, window)
    is_long = lens >= 2 * _least(lens, shape, config, gpu)
    return np.unique(blocks.rows[is_long])


def cut(
    chunks: Ints,
    q_lens: Ints,
    context_lens: Ints,
    shape: AttentionShape,
    window: int | None,
    config: PrefillConfig,
    gpu: Gpu,
    *,
    max_splits: int,
) -> Cuts:
    """Cut the contexts of all blocks of some rows, evenly, into at most `max_splits` each.

    Stretches are whole blocks of positions: begin …[ ][ ]…[ ]… end.
    """
    size = config.tokens(shape.group)
    blocks = blocks_of(chunks, q_lens, size)
    lens = _lens(blocks, q_lens, context_lens, size, window)
    least = _least(lens, shape, config, gpu)
    wanted = np.clip(lens // least, 1, max_splits)
    firsts = (context_lens - q_lens)[blocks.rows] + blocks.starts
    begins = np.zeros_like(firsts)
    if window is not None:
        begins = np.maximum(0, firsts - window + 1) // config.block_n * config.block_n
    ends = np.minimum(context_lens[blocks.rows], firsts + size)
    stretch = _up(_up(ends - begins, wanted), config.block_n) * config.block_n
    counts = _up(ends - begins, stretch)

    # A token's parts follow one another, as do the tokens of a block.
    num_tokens = np.minimum(size, q_lens[blocks.rows] - blocks.starts)
    block_parts = np.cumsum(counts * num_tokens) - counts * num_tokens
    number = _within(counts)
    own_begins = np.repeat(begins, counts) + number * np.repeat(stretch, counts)
    own_ends = np.minimum(own_begins + np.repeat(stretch, counts), np.repeat(ends, counts))
    token = _within(num_tokens)
    token_counts = np.repeat(counts, num_tokens)
    row_starts = np.cumsum(q_lens) - q_lens
    return Cuts(
        rows=np.repeat(blocks.rows, counts),
        starts=np.repeat(blocks.starts, counts),
        stretches=np.stack(
            [
                own_begins,
                own_ends,
                np.repeat(block_parts, counts) + number,
                np.repeat(counts, counts),
            ],
            axis=1,
        ),
        tokens=np.repeat(row_starts[blocks.rows] + blocks.starts, num_tokens) + token,
        firsts=np.repeat(block_parts, num_tokens) + token * token_counts,
        counts=token_counts,
    )


def _lens(blocks: Blocks, q_lens: Ints, context_lens: Ints, size: int, window: int | None) -> Ints:
    """Return how many positions each block walks."""
    firsts = (context_lens - q_lens)[blocks.rows] + blocks.starts
    ends = np.minimum(context_lens[blocks.rows], firsts + size)
    return ends if window is None else ends - np.maximum(0, firsts - window + 1)


def _least(lens: Ints, shape: AttentionShape, config: PrefillConfig, gpu: Gpu) -> int:
    """Return the shortest stretch: a program's fair share, if that is worth a program."""
    num_programs = num_prefill_programs(config, shape, gpu)
    return max(config.split_len, -(-int(lens.sum()) * shape.num_kv_heads // num_programs))


def _up(numbers: Ints, size: Ints | int) -> Ints:
    """Return numbers / size, rounded up."""
    return -(-numbers // size)


def _within(counts: Ints) -> Ints:
    """Return 0 … c-1 for each count c, one after the other."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
