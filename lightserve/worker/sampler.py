"""From logits to tokens, vectorised over the batch, every row on its own.

    temperature -> top-k and top-p, where asked for -> inverse of the cumulative distribution

at one uniform number per row (`random_draw`). A row's path depends on its own parameters alone
and every operation works along the vocabulary, so its token does not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightserve.types import SamplingParams
from lightserve.worker.random_draw import uniform


@dataclass(frozen=True, eq=False)
class Sampled:
    """The step's tokens."""

    token_ids: Tensor
    """int64 [L]; 0 where the row has no valid logits."""
    is_finite: list[bool]
    """Whether each row's logits were all finite."""


def sample(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> Sampled:
    """Draw one token per row.

    Args:
        logits: float32 [L, vocab].
        params: how to draw, one per row.
        positions: position that each new token will have; part of the random number.
    """
    is_finite = torch.isfinite(logits).all(dim=-1)
    if not bool(is_finite.all()):
        logits = torch.where(is_finite[:, None], logits, 0.0)
    token_ids = logits.argmax(dim=-1)
    for draw, rows in ((_draw_truncated, _truncated(params)), (_draw, _untruncated(params))):
        if rows:
            chosen = [params[row] for row in rows]
            numbers = _numbers(chosen, [positions[row] for row in rows])
            token_ids[rows] = draw(_probabilities(logits[rows], chosen), chosen, numbers)
    return Sampled(torch.where(is_finite, token_ids, 0), is_finite.tolist())


def _is_truncated(params: SamplingParams) -> bool:
    return params.top_p < 1.0 or params.top_k > 0


def _truncated(params: Sequence[SamplingParams]) -> list[int]:
    return [i for i, p in enumerate(params) if p.temperature > 0.0 and _is_truncated(p)]


def _untruncated(params: Sequence[SamplingParams]) -> list[int]:
    return [i for i, p in enumerate(params) if p.temperature > 0.0 and not _is_truncated(p)]


def _numbers(params: Sequence[SamplingParams], positions: Sequence[int]) -> Tensor:
    """Return each row's uniform number, float64 [L, 1]."""
    seeds, choices = [p.seed for p in params], [p.choice for p in params]
    return torch.from_numpy(uniform(seeds, choices, positions))[:, None]


def _probabilities(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return softmax(logits / temperature), float32 [L, vocab]."""
    temperature = torch.tensor([p.temperature for p in params], dtype=torch.float32)[:, None]
    # The largest logit becomes 0 first, so that tiny temperatures cannot overflow.
    return ((logits - logits.amax(dim=-1, keepdim=True)) / temperature).softmax(dim=-1)


def _draw(probabilities: Tensor, params: Sequence[SamplingParams], numbers: Tensor) -> Tensor:
    """Draw from the whole vocabulary, in its own order; int64 [L]."""
    del params
    cumulative = probabilities.double().cumsum(dim=-1)
    return _invert(cumulative, numbers * cumulative[:, -1:]).squeeze(1)


def _draw_truncated(
    probabilities: Tensor, params: Sequence[SamplingParams], numbers: Tensor
) -> Tensor:
    """Draw from the most probable tokens that top-k and then top-p keep; int64 [L]."""
    probabilities, order = probabilities.sort(dim=-1, descending=True, stable=True)
    probabilities = probabilities.double()
    cumulative = probabilities.cumsum(dim=-1)
    last = _num_kept(probabilities, cumulative, params) - 1
    index = _invert(cumulative, numbers * cumulative.gather(1, last))
    return order.gather(1, torch.minimum(index, last)).squeeze(1)


def _num_kept(
    probabilities: Tensor, cumulative: Tensor, params: Sequence[SamplingParams]
) -> Tensor:
    """Return how many of the sorted tokens are kept, at least one; int64 [L, 1]."""
    vocab_size = probabilities.shape[-1]
    top_k = torch.tensor([min(p.top_k or vocab_size, vocab_size) for p in params])[:, None]
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64)[:, None]
    # The smallest prefix that reaches the share top_p of what top-k leaves.
    before = cumulative - probabilities
    in_top_p = (before < top_p * cumulative.gather(1, top_k - 1)).sum(dim=-1, keepdim=True)
    return torch.minimum(top_k, in_top_p).clamp(min=1)


def _invert(cumulative: Tensor, target: Tensor) -> Tensor:
    """Return the first index at which the cumulative sum exceeds the target; int64 [L, 1]."""
    index = torch.searchsorted(cumulative, target, right=True)
    return index.clamp(max=cumulative.shape[-1] - 1)
