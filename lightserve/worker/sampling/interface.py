"""What is given to a sampler and what comes back; all tensors lie where the logits are.

`L` is the number of rows that a step samples, `A` how many of them have options that change their
logits, `V` the size of the vocabulary. Nothing here is read on the host of a GPU: what it must
know (which kernels are needed at all) it knows from the parameters.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from lightserve.worker.sampling.known_counts import KnownCounts


@dataclass(frozen=True, eq=False)
class Adjustments:
    """What rows do to their logits before a token is drawn, in the order of `SamplingParams`."""

    indices: Tensor
    """int64 [A], among the step's sampled rows; rising."""
    num_prompt_tokens: Tensor
    """int32 [A]; what is known behind them is output."""
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
    _: KW_ONLY
    has_penalties: bool
    """Whether any row's known tokens matter."""
    allowed_token_ids: list[npt.NDArray[np.int64]]
    """The same as `allowed_bits`, on the host."""


@dataclass(frozen=True, eq=False)
class SampledRows:
    """How a step's rows are sampled: the same from step to step while the same rows are."""

    rows: Tensor
    """int64 [L], of the token table."""
    states: Tensor
    """int64 [L], bits of `random_draw.sequence_state`."""
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
    """Indices of rows that are drawn from what top-k or top-p leave."""
    has_min_p: bool
    logprob_indices: list[int]
    """Indices of rows that want log-probabilities, rising."""
    num_logprobs: list[int]
    """How many most probable tokens each of them wants."""

    def __len__(self) -> int:
        return self.rows.shape[0]


@dataclass(frozen=True, eq=False)
class RowMasks:
    """Which tokens the constrained rows of a step may draw."""

    rows: Tensor
    """int32 [L], row of `bits`; -1: no constraint."""
    bits: Tensor
    """int32 [constrained rows, words], as `Adjustments.allowed_bits`."""
    indices: list[int]
    """Of the constrained rows among the L."""
    allowed: Tensor | None
    """bool [constrained rows, V], the same as `bits`, on the CPU alone."""


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
    """Of the token table's rows; the CPU has none and counts anew."""


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
    """What a sampler draws."""

    token_ids: Tensor
    """int64 [L]; 0 where not `is_finite`."""
    is_finite: Tensor
    """bool [L]: the row's logits were all finite, and its options left a token to draw."""


class Sampled(NamedTuple):
    """The step's tokens, as `Tokens`."""

    token_ids: Tensor
    is_finite: Tensor
    logprobs: LogprobTensors | None
    """Of the rows `SampledRows.logprob_indices`, in their order; None if there are none."""
