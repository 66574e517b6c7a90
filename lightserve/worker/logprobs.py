"""Log-probabilities of tokens: the model's own, before any option changed them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightserve.messages.common import TokenLogprob

PROMPT_ROWS = 64
"""Places of a prompt whose logits are there at a time: a vocabulary of them is large."""


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: Sequence[int]) -> list[TokenLogprob]:
    """Return one per row: its token's, and its most probable tokens', ties by lower id.

    Args:
        logits: float32 [L, vocab], finite.
        token_ids: int64 [L].
        num_top: how many of the most probable tokens each row wants.
    """
    total = logits.logsumexp(dim=-1, keepdim=True)
    chosen = (logits.gather(1, token_ids[:, None]) - total).squeeze(1).tolist()
    most = min(max(num_top, default=0), logits.shape[-1])
    if most == 0:
        return [TokenLogprob(value, [], []) for value in chosen]
    top = logits.topk(most, dim=-1)
    values, ids = (top.values - total).tolist(), top.indices.tolist()
    return [
        TokenLogprob(chosen[row], *_best(values[row], ids[row], num))
        for row, num in enumerate(num_top)
    ]


def _best(values: list[float], ids: list[int], num: int) -> tuple[list[int], list[float]]:
    """Return the `num` best ids and their values, equal ones by id."""
    pairs = sorted(zip(values, ids, strict=True), key=lambda pair: (-pair[0], pair[1]))[:num]
    return [token_id for _, token_id in pairs], [value for value, _ in pairs]


def all_finite(logits: Tensor) -> bool:
    """Return whether no value is infinite or NaN."""
    return bool(torch.isfinite(logits).all())
