"""The inputs and results of a sampler; all tensors lie where the logits are.

`L` is the number of rows that a step samples, `A` how many of them have options that change their
logits, `V` the size of the vocabulary. Nothing here is read on the host of a GPU: it knows from the
parameters which kernels are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# How often each token is known in rows with penalties: kept on a GPU from step to step.
#
#     counts[row, token]    of the row's first `num_counted[row]` known tokens
#
# Nothing tells it of tokens that are drawn: before a row's penalties are applied, the kernel of
# `kernels.triton.sampling_adjust` counts what the token table has beyond `num_counted`. That is one
# token in steady decoding, none when the same token is drawn once more (its grammar was not ready),
# and everything when a sequence has come to the row, new, resumed or from another row. Drafts are
# not counted: they may be refused.


class KnownCounts:
    """Counts of the tokens of one rank's rows."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.counts = torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=device)
        """In the form of `count_kernel`."""
        self.num_counted = torch.zeros(num_rows, dtype=torch.int32, device=device)

    def begin(self, rows: Tensor) -> None:
        """Forget the counts of rows, int64 [n], to which other sequences have come."""
        self.counts.index_fill_(0, rows, 0)
        self.num_counted.index_fill_(0, rows, 0)


# Uniform numbers that are a function of (seed, choice, position), and of nothing else.
#
# A draw never depends on the batch, so a request gives the same tokens wherever and
# whenever it runs. Counter-based: the 64-bit finaliser of SplitMix64 (Steele, Lea, Flood 2014)
# over the three numbers, one after the other. Seed and choice stay the same for all of a sequence:
# their share is worked out once (`sequence_state`), the position's in every step, here on the CPU
# and to the same bits in `kernels.triton.sampling` on a GPU.

_UInt64 = npt.NDArray[np.uint64]
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1


def uniform(
    seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int]
) -> npt.NDArray[np.float64]:
    """Return numbers in [0, 1), float64 [n]; seeds are signed 64-bit."""
    state = _mix(_unsigned(seeds))
    state = _mix(state ^ _unsigned(choices))
    return uniform_at(state, _unsigned(positions))


def sequence_state(seed: int, choice: int) -> np.uint64:
    """Return the part of seed and choice in all numbers of a sequence."""
    state: np.uint64 = _mix(_mix(_unsigned([seed])) ^ _unsigned([choice]))[0]
    return state


def uniform_at(states: _UInt64, positions: _UInt64) -> npt.NDArray[np.float64]:
    """Return the numbers of sequences, by `sequence_state`, at positions; float64 [n]."""
    state = _mix(states ^ positions)
    result: npt.NDArray[np.float64] = (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return result


def _unsigned(values: Sequence[int]) -> _UInt64:
    return np.array([value & _MASK for value in values], dtype=np.uint64)


def _mix(value: _UInt64) -> _UInt64:
    value = value + _GAMMA
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@dataclass(frozen=True, eq=False)
class Adjustments:
    """Changes that rows make to their logits before a token is drawn, in the order of
    `SamplingParams`."""

    indices: Tensor
    """int64 [A], among the step's sampled rows; rising."""
    num_prompt_tokens: Tensor
    """int32 [A]; known tokens behind them are output."""
    drafts_before: Tensor
    """int32 [A], draws of the same row before it in the step: so many of the last tokens before its
    position are drafts."""
    repetition: Tensor
    """float32 [A], 1 changes nothing."""
    frequency: Tensor
    """float32 [A]."""
    presence: Tensor
    """float32 [A]."""
    min_tokens: Tensor
    """int32 [A]."""
    eos_token_ids: Tensor
    """int32 [A, most of a row], barred before `min_tokens`; filled up with -1."""
    bias_rows: Tensor
    """int64 [entries of logit_bias], index among the A."""
    bias_token_ids: Tensor
    """int64, each once per row."""
    bias_values: Tensor
    """float32."""
    allowed_rows: Tensor
    """int32 [A], row of `allowed_bits`; -1: every token is allowed."""
    allowed_bits: Tensor
    """int32 [rows, words], bit t % 32 of word t // 32: whether t may be drawn; 0 beyond."""
    word_rows: Tensor
    """int64 [entries of bad_words], index among the A."""
    word_starts: Tensor
    """int32 [entries, longest - 1], the tokens before the last; -1 before the first of them."""
    word_ends: Tensor
    """int64, the last token."""
    typical_rows: Tensor
    """int64 [rows with typical-p], index among the A."""
    typical_shares: Tensor
    """float32."""
    _: KW_ONLY
    has_penalties: bool
    """Whether any row's known tokens matter."""
    allowed_token_ids: list[npt.NDArray[np.int64]]
    """`allowed_bits` on the host."""


@dataclass(frozen=True, eq=False)
class SampledRows:
    """The sampling options of a step's rows: the same from step to step while the rows are the
    same."""

    rows: Tensor
    """int64 [L], of the token table."""
    states: Tensor
    """int64 [L], bits of `sequence_state`."""
    temperature: Tensor
    """float32 [L]; 0 is greedy, all others are at least MIN_TEMPERATURE."""
    min_p: Tensor
    """float32 [L]."""
    top_p: Tensor
    """float64 [L]."""
    top_k: Tensor
    """int32 [L]; 0: all."""
    source: Tensor
    """int32 [L], index among the A; -1: the row's logits are as the model made them."""
    logprob_rows: Tensor
    """int64, `logprob_indices`."""
    _: KW_ONLY
    adjustments: Adjustments | None
    drawn: list[int]
    """Indices of rows that are drawn from the whole vocabulary."""
    truncated: list[int]
    """Indices of rows that are drawn from the tokens that top-k or top-p leave."""
    has_min_p: bool
    logprob_indices: list[int]
    """Indices of rows that want log-probabilities, rising."""
    num_logprobs: list[int]
    """Number of most probable tokens that each of them wants."""

    def __len__(self) -> int:
        return self.rows.shape[0]


@dataclass(frozen=True, eq=False)
class RowMasks:
    """The tokens that the constrained rows of a step may draw."""

    rows: Tensor
    """int32 [L], row of `bits`; -1: no constraint."""
    bits: Tensor
    """int32 [constrained rows, words], as `Adjustments.allowed_bits`."""
    indices: list[int]
    """Indices of the constrained rows among the L."""
    allowed: Tensor | None
    """bool [constrained rows, V], the same as `bits`, on the CPU alone."""
    forced_rows: Tensor | None = None
    """int64 [n], of the L: those that draw no token but …"""
    forced_ids: Tensor | None = None
    """… these, int64 [n], whatever their options say. None: there are no such rows."""


@dataclass(frozen=True, eq=False)
class SamplingBatch:
    """Everything that a step's tokens depend on but the logits."""

    rows: SampledRows
    positions: Tensor
    """int64 [L], that each new token will have; everything before is known."""
    token_ids: Tensor
    """int32 [at least max_num_seqs, max_model_len + 1], known tokens of each row of the table."""
    masks: RowMasks | None = None
    known_counts: KnownCounts | None = None
    """Counts of the token table's rows; the CPU has none and counts anew."""


class LogprobTensors(NamedTuple):
    """Log-probabilities of n tokens, the model's own; meaningless where not `is_finite`."""

    token: Tensor
    """float32 [n], the given token's."""
    top_token_ids: Tensor
    """int32 [n, most], the most probable first, equal ones by rising id."""
    top: Tensor
    """float32 [n, most]."""
    is_finite: Tensor
    """bool [n], whether all of the model's logits are."""


class Tokens(NamedTuple):
    """The tokens that a sampler draws."""

    token_ids: Tensor
    """int64 [L]; 0 where not `is_finite`."""
    is_finite: Tensor
    """bool [L]: the row's logits were all finite, and its options left a token to draw."""


class Sampled(NamedTuple):
    """The step's tokens, as `Tokens`."""

    token_ids: Tensor
    is_finite: Tensor
    logprobs: LogprobTensors | None
    """Log-probabilities of the rows `SampledRows.logprob_indices`, in their order; None if there
    are none."""


# Bars the last token of a bad word where the output ends with the others, on any device.


def bar_words(logits: Tensor, rows: Tensor, options: Adjustments, batch: SamplingBatch) -> None:
    """Bar the ends of bad words in logits, contiguous float32 [rows, vocab], in place.

    `rows`, int64 [A]: where each of the A has its logits. Waits for nothing.
    """
    if not len(options.word_ends):
        return
    owners = options.word_rows
    indices = options.indices[owners]
    width = options.word_starts.shape[1]
    # The last tokens before each new one, [entries, width]; those of a prompt are no output.
    places = torch.arange(-width, 0, device=logits.device) + batch.positions[indices, None]
    known = batch.token_ids[batch.rows.rows[indices, None], places.clamp(min=0)]
    is_output = places >= options.num_prompt_tokens[owners, None]
    fits = (known == options.word_starts) & is_output | (options.word_starts < 0)
    # Added, as words of a row may have the same end: what is barred by one of them is barred.
    added = torch.zeros(len(owners), dtype=logits.dtype, device=logits.device)
    added.masked_fill_(fits.all(dim=1), float("-inf"))
    place = rows[owners] * logits.shape[1] + options.word_ends
    logits.view(-1).scatter_add_(0, place, added)


SHARE_ROUNDING = 1e-6
"""How far sums of shares in another order may be apart."""
FIRST_PLACES = 1024
"""Places that a CPU puts in order first, before it orders more."""


def _order_of(distances: Tensor, shares: Tensor, wanted: Tensor) -> Tensor:
    """Return places by distance, equal ones as they stand, int64; all, float32 [vocab].

    On a CPU only the first ones, as many as have the share that is wanted or more: the order of a
    whole vocabulary takes ten times as long as finding which come first.
    """
    count = FIRST_PLACES if distances.device.type == "cpu" else len(distances)
    while count < len(distances):
        places = (distances <= distances.kthvalue(count).values).nonzero().squeeze(1)
        if bool(shares[places].double().sum() > wanted + SHARE_ROUNDING):
            return places[distances[places].sort(stable=True).indices]
        count *= 16
    return distances.sort(stable=True).indices


def keep_typical(logits: Tensor, rows: Tensor, options: Adjustments, temperature: Tensor) -> None:
    """Bar tokens that are not typical, in logits, contiguous float32 [rows, vocab], in place.

    Row by row, as few ask for it and an order of the vocabulary takes memory. Waits for nothing.

    Args:
        logits: after everything else that changes them.
        rows: int64 [A], where each of the A has its logits.
        options: of the A.
        temperature: float32 [A]; the order of a greedy row stays as it is.
    """
    for number in range(len(options.typical_rows)):
        owner = options.typical_rows[number : number + 1]
        row = logits.index_select(0, rows[owner]).squeeze(0)
        is_random = temperature[owner] > 0
        scaled = (row - row.amax()) / torch.where(is_random, temperature[owner], 1.0)
        surprise = -scaled.log_softmax(-1)
        share = surprise.neg().exp()
        expected = torch.where(share > 0, share * surprise, 0.0).sum()
        order = _order_of(
            (surprise - expected).abs(), share, options.typical_shares[number : number + 1]
        )
        share = share[order]
        before = share.double().cumsum(0) - share
        is_barred = (before >= options.typical_shares[number]) & is_random
        kept = torch.where(is_random, torch.full_like(row, float("-inf")), row)
        kept[order] = row[order].masked_fill(is_barred, float("-inf"))
        row = kept
        logits.index_copy_(0, rows[owner], row[None])
