"""Sampling of rows of logits on a GPU: what is launched.

    scan      every chunk of every row: largest, first of the largest, sum of weights, finite?
    cut       rows with min-p, top-k or top-p: a logit that enough tokens reach, but not too many
    gather    their chunks again: sums without what min-p drops; the tokens that reach the cut
    draw      every row: its greedy token, or one from the whole vocabulary
    draw_top  rows with top-k or top-p: exact searches among the gathered tokens or, where these
              are not certain to be enough, among all

A chunk is CHUNK tokens whatever the batch is, so every sum has the same terms in the same order: a
row's token is a function of the row. No launch depends on a value that the host would have to
read, and rows that need nothing of a kernel leave it at once. Passes over the logits: one for
greedy and plain sampling, two with min-p, top-k or top-p. Rows whose options change their logits
are copied first (`sampling_adjust`), the others never.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.kernels.triton import sampling_scan, sampling_search
from lightserve.kernels.triton.launch import cdiv, launched, next_power_of_2
from lightserve.kernels.triton.sampling_scan import logit_of, token_of, weights_of
from lightserve.kernels.triton.sampling_search import HIGHEST_KEY, measure

# The kernel of `sampling` that finds log-probabilities among a row's candidates.


@launched
@triton.jit(do_not_specialize=["num_top"])
def logprobs_kernel(
    own_ptr, token_ptr, largest_ptr, total_ptr, finite_ptr, number_ptr, keys_ptr, chosen_ptr,
    top_token_ptr, top_ptr, is_finite_ptr, stride, vocab_size, num_chunks, num_top,
    CANDIDATES: tl.constexpr, TILE: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One program per row: the given token, then the most probable ones, one after the other."""
    row = tl.program_id(0)
    chunks = tl.arange(0, BLOCK_C)
    there = chunks < num_chunks
    at = row * num_chunks + chunks
    largest = tl.load(largest_ptr + at, mask=there, other=-float("inf"))
    is_fine = tl.min(tl.load(finite_ptr + at, mask=there, other=1), axis=0) != 0
    top = tl.max(largest, axis=0)
    totals = tl.load(total_ptr + at, mask=there, other=0.0) * weights_of(largest, top, 1.0)
    everything = top + tl.log(tl.sum(tl.where(there, totals, 0.0), axis=0))
    own = own_ptr + row.to(tl.int64) * stride
    tl.store(chosen_ptr + row, tl.load(own + tl.load(token_ptr + row)).to(tl.float32) - everything)
    tl.store(is_finite_ptr + row, is_fine)
    if is_fine & (num_top > 0):
        keys = keys_ptr + row.to(tl.int64) * (2 * CANDIDATES)
        size = tl.load(number_ptr + 2 * row)
        is_all = (size > CANDIDATES) | (size < num_top)
        size = tl.where(is_all, vocab_size, size)
        last = tl.full((), HIGHEST_KEY, tl.int64)
        for number in range(0, num_top):
            _, _, _, last = measure(
                (own, own, -1, vocab_size), False, keys, size, is_all, last - 1, (top, 1.0, 0.0),
                CANDIDATES, TILE,
            )  # fmt: skip
            tl.store(top_token_ptr + row * num_top + number, token_of(last).to(tl.int32))
            tl.store(top_ptr + row * num_top + number, logit_of(last) - everything)


CHUNK = 4096
"""Tokens of a program that reads logits; a multiple of GROUP."""
GROUP = 64
"""Tokens that share an entry of `Scan.peaks`."""
CANDIDATES = 2048
"""Most tokens of a row that `gather` keeps; a multiple of TILE."""
TILE = 1024
"""Tokens that a search looks at together."""


@dataclass(frozen=True, eq=False)
class Logits:
    """Rows of logits; those whose options changed them are elsewhere."""

    own: Tensor
    """[L, V], of the model's type, the elements of a row side by side."""
    adjusted: Tensor | None = None
    """float32 [A, V]; minus infinity: may not be drawn."""
    source: Tensor | None = None
    """int32 [L], row of `adjusted`; -1: of `own`."""

    @property
    def pointers(self) -> tuple[Tensor, Tensor, Tensor]:
        """The first arguments of every kernel; absent tensors are not read."""
        if self.adjusted is None or self.source is None:
            return self.own, self.own, self.own
        return self.own, self.adjusted, self.source


class Draws(NamedTuple):
    """The options by which each row is drawn, all [L]."""

    temperature: Tensor
    """float32, 0: greedy."""
    min_p: Tensor
    """float32."""
    top_p: Tensor
    """float64, 1: everything."""
    top_k: Tensor
    """int32, 0: everything."""
    states: Tensor
    """int64, of the random numbers."""
    positions: Tensor
    """int64, of the new tokens."""


class Scan(NamedTuple):
    """The results of one pass over the logits for each chunk, [L, C]."""

    largest: Tensor
    """float32."""
    first: Tensor
    """int32, lowest token whose logit is the largest."""
    total: Tensor
    """float32, sum of exp((logit - chunk's largest) / temperature)."""
    is_finite: Tensor
    """int32."""
    peaks: Tensor
    """float32 [L, C * CHUNK / GROUP], the largest of each group; empty if it is not wanted."""


class Candidates(NamedTuple):
    """The results of a second pass."""

    cut: Tensor
    """float32 [L], logit that candidates reach."""
    number: Tensor
    """int32 [L, 2], of candidates; beyond CANDIDATES some are missing. The second of each row is a
    search's own."""
    keys: Tensor
    """int64 [L, 2, CANDIDATES], in any order, see `sampling_scan`; then room for a search."""
    kept: Tensor
    """float32 [L, C], sum of exp((logit - row's largest) / temperature) over the tokens that min-p
    leaves; of rows with min-p alone."""


def scan(
    logits: Logits, temperature: Tensor, *, has_totals: bool = True, has_peaks: bool = True
) -> Scan:
    """Read all logits once."""
    own = logits.own
    num_rows, vocab_size = own.shape
    num_chunks = cdiv(vocab_size, CHUNK)
    num_groups = num_chunks * (CHUNK // GROUP) if has_peaks else 0
    found = Scan(
        own.new_empty(num_rows, num_chunks, dtype=torch.float32),
        own.new_empty(num_rows, num_chunks, dtype=torch.int32),
        own.new_empty(num_rows, num_chunks, dtype=torch.float32),
        own.new_empty(num_rows, num_chunks, dtype=torch.int32),
        own.new_empty(num_rows, num_groups, dtype=torch.float32),
    )
    sampling_scan.scan_kernel[num_chunks, num_rows](
        *logits.pointers, temperature, *found, own.stride(0), vocab_size, num_chunks,
        IS_ADJUSTED=logits.adjusted is not None,
        HAS_TOTALS=has_totals,
        HAS_PEAKS=has_peaks,
        CHUNK=CHUNK,
        GROUP=GROUP,
        num_warps=8,
        enable_fp_fusion=True,
    )  # fmt: skip
    return found


def gather(logits: Logits, draws: Draws, found: Scan) -> Candidates:
    """Look again at the rows with min-p, top-k or top-p, at the tokens that may be drawn."""
    own = logits.own
    num_rows, vocab_size = own.shape
    num_chunks, num_groups = found.largest.shape[1], found.peaks.shape[1]
    block_c = next_power_of_2(num_chunks)
    candidates = Candidates(
        own.new_empty(num_rows, dtype=torch.float32),
        own.new_empty(num_rows, 2, dtype=torch.int32),
        own.new_empty(num_rows, 2, CANDIDATES, dtype=torch.int64),
        own.new_empty(num_rows, num_chunks, dtype=torch.float32),
    )
    sampling_scan.cut_kernel[num_rows,](
        draws.temperature, draws.top_p, draws.top_k, found.largest, found.total, found.peaks,
        candidates.cut, candidates.number, vocab_size, num_chunks, num_groups,
        CANDIDATES=CANDIDATES,
        BLOCK_C=block_c,
        BLOCK_G=next_power_of_2(num_groups),
        num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip
    sampling_scan.gather_kernel[num_chunks, num_rows](
        *logits.pointers, draws.temperature, draws.min_p, found.largest, *candidates, own.stride(0),
        vocab_size, num_chunks,
        IS_ADJUSTED=logits.adjusted is not None,
        CANDIDATES=CANDIDATES,
        CHUNK=CHUNK,
        BLOCK_C=block_c,
        num_warps=8,
        enable_fp_fusion=True,
    )  # fmt: skip
    return candidates


def draw(
    logits: Logits, draws: Draws, found: Scan, candidates: Candidates | None
) -> tuple[Tensor, Tensor]:
    """Return tokens, int64 [L], and whether their rows are finite, bool [L].

    Rows with top-k or top-p get their most probable token; `draw_top` is for them.
    """
    own = logits.own
    num_rows, vocab_size = own.shape
    num_chunks = found.largest.shape[1]
    token_ids = own.new_empty(num_rows, dtype=torch.int64)
    is_finite = own.new_empty(num_rows, dtype=torch.bool)
    sampling_scan.draw_kernel[num_rows,](
        *logits.pointers, *draws, *found[:4],
        found.total if candidates is None else candidates.kept, token_ids, is_finite, own.stride(0),
        vocab_size, num_chunks,
        IS_ADJUSTED=logits.adjusted is not None,
        HAS_KEPT=candidates is not None,
        CHUNK=CHUNK,
        BLOCK_C=next_power_of_2(num_chunks),
        num_warps=8,
        enable_fp_fusion=True,
    )  # fmt: skip
    return token_ids, is_finite


def draw_top(
    logits: Logits, draws: Draws, found: Scan, candidates: Candidates, drawn: tuple[Tensor, Tensor]
) -> None:
    """Put the tokens of rows with top-k or top-p into the result of `draw`."""
    own = logits.own
    num_rows, vocab_size = own.shape
    num_chunks = found.largest.shape[1]
    sampling_search.draw_top_kernel[num_rows,](
        *logits.pointers, *draws, *found[:3], *candidates, *drawn, own.stride(0), vocab_size,
        num_chunks,
        IS_ADJUSTED=logits.adjusted is not None,
        CANDIDATES=CANDIDATES,
        TILE=TILE,
        BLOCK_C=next_power_of_2(num_chunks),
        num_warps=8,
        enable_fp_fusion=True,
    )  # fmt: skip


def logprobs(
    own: Tensor, token_ids: Tensor, num_top: int, draws: Draws
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-probabilities of tokens int64 [n], and of the `num_top` most probable ones.

    float32 [n]; int32 and float32 [n, num_top], falling, equal ones by rising id; bool [n],
    whether all logits are finite: elsewhere the others mean nothing. `draws`: temperature 1,
    min_p 0, top_p 1, top_k `num_top`.
    """
    num_rows, vocab_size = own.shape
    found = scan(Logits(own), draws.temperature)
    candidates = gather(Logits(own), draws, found)
    num_chunks = found.largest.shape[1]
    chosen = own.new_empty(num_rows, dtype=torch.float32)
    top = own.new_empty(num_rows, num_top, dtype=torch.float32)
    top_ids = own.new_empty(num_rows, num_top, dtype=torch.int32)
    is_finite = own.new_empty(num_rows, dtype=torch.bool)
    logprobs_kernel[num_rows,](
        own, token_ids, found.largest, found.total, found.is_finite, candidates.number,
        candidates.keys, chosen, top_ids, top, is_finite, own.stride(0), vocab_size, num_chunks,
        num_top,
        CANDIDATES=CANDIDATES,
        TILE=TILE,
        BLOCK_C=next_power_of_2(num_chunks),
        num_warps=8,
        enable_fp_fusion=True,
    )  # fmt: skip
    return chosen, top_ids, top, is_finite
