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
    vocab_size = logits.shape[-1]
    most = min(max(num_top, default=0), vocab_size)
    if most == 0:
        return [TokenLogprob(value, [], []) for value in chosen]
    top = logits.topk(most, dim=-1)
    return [
        TokenLogprob(
            chosen[row], *_best(logits[row], total[row], (top.values[row], top.indices[row]), num)
        )
        if (num := min(wanted, vocab_size))
        else TokenLogprob(chosen[row], [], [])
        for row, wanted in enumerate(num_top)
    ]


def _best(
    logits: Tensor, total: Tensor, top: tuple[Tensor, Tensor], num: int
) -> tuple[list[int], list[float]]:
    """Return the `num` best ids of a row and their log-probabilities, equal ones by id.

    `topk` takes any of the tokens that are equal at its end, and its end is another row's wish.
    """
    values, ids = top
    last = values[num - 1]
    above = ids[values > last]
    equal = (logits == last).nonzero().flatten()[: num - len(above)]
    order = torch.cat([above[_by_value(logits[above], above)], equal])
    return order.tolist(), (logits[order] - total).tolist()


def _by_value(values: Tensor, ids: Tensor) -> Tensor:
    """Return the order of falling values, equal ones by rising id."""
    by_id = ids.argsort()
    return by_id[values[by_id].argsort(descending=True, stable=True)]


def all_finite(logits: Tensor) -> bool:
    """Return whether no value is infinite or NaN."""
    return bool(torch.isfinite(logits).all())
