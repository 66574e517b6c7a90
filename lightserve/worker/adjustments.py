"""What requests do to their logits before a token is drawn: bias, penalties, tokens barred.

In the order of `SamplingParams`. A row is a function of its own logits, options and known tokens
alone: nothing is kept between steps, so a recomputed row gets the same tokens. Rows without
options cost nothing; the others take time in their length and options, never in Python's loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightserve.types import SamplingParams


class RowHistory(NamedTuple):
    """What a row's options refer to."""

    token_ids: Tensor
    """int64 [n], prompt and output."""
    num_prompt_tokens: int
    eos_token_ids: Sequence[int]


def is_adjusted(params: SamplingParams) -> bool:
    """Return whether a row's logits are changed at all."""
    return bool(
        params.logit_bias
        or params.allowed_token_ids
        or params.min_tokens
        or params.frequency_penalty
        or params.presence_penalty
        or params.repetition_penalty != 1.0
    )


def adjust(logits: Tensor, params: SamplingParams, history: RowHistory) -> None:
    """Change one row's logits, float32 [vocab], in place; ids must be below vocab."""
    if params.logit_bias:
        ids, values = zip(*params.logit_bias, strict=True)
        index = torch.tensor(ids, device=logits.device)
        logits[index] += torch.tensor(values, dtype=logits.dtype, device=logits.device)
    _penalise(logits, params, history)
    if params.allowed_token_ids:
        allowed = torch.tensor(params.allowed_token_ids, device=logits.device)
        kept = logits[allowed]
        logits.fill_(float("-inf"))
        logits[allowed] = kept
    num_output_tokens = len(history.token_ids) - history.num_prompt_tokens
    if num_output_tokens < params.min_tokens and history.eos_token_ids:
        logits[torch.tensor(list(history.eos_token_ids), device=logits.device)] = float("-inf")


def _penalise(logits: Tensor, params: SamplingParams, history: RowHistory) -> None:
    """Apply the repetition penalty, then those for frequency and presence."""
    if params.repetition_penalty != 1.0:
        seen = history.token_ids.unique()  # type: ignore[no-untyped-call]
        values = logits[seen]
        factor = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / factor, values * factor)
    if params.frequency_penalty or params.presence_penalty:
        output = history.token_ids[history.num_prompt_tokens :]
        seen, counts = output.unique(return_counts=True)  # type: ignore[no-untyped-call]
        logits[seen] -= params.frequency_penalty * counts + params.presence_penalty
