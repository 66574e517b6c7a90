"""From logits to tokens, vectorised over the batch, every row on its own.

temperature -> sort -> top-k -> top-p -> inverse of the cumulative distribution at one uniform
number per row (`random_draw`). Each step works row by row on a fixed width, so that a row's
token does not depend on its neighbours.
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
        logits: float32 [L, vocab]; may be overwritten.
        params: how to draw, one per row.
        positions: position that each new token will have; part of the random number.
    """
    is_finite = torch.isfinite(logits.sum(dim=-1)) | torch.isfinite(logits).all(dim=-1)
    if not bool(is_finite.all()):
        logits = torch.where(is_finite[:, None], logits, 0.0)
    token_ids = logits.argmax(dim=-1)
    drawn = [row for row, row_params in enumerate(params) if row_params.temperature > 0.0]
    if drawn:
        token_ids[drawn] = _draw(
            logits[drawn], [params[row] for row in drawn], [positions[row] for row in drawn]
        )
    return Sampled(torch.where(is_finite, token_ids, 0), is_finite.tolist())


def _draw(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> Tensor:
    """Draw from the distribution that temperature, top-k and top-p leave; int64 [L]."""
    temperature = torch.tensor([p.temperature for p in params], dtype=torch.float32)[:, None]
    # The largest logit becomes 0, so that tiny temperatures cannot overflow.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    probabilities, order = scaled.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    probabilities = probabilities.double()
    cumulative = probabilities.cumsum(dim=-1)
    kept = _kept(probabilities, cumulative, params)
    total = cumulative.gather(1, kept.sum(dim=-1, keepdim=True) - 1)
    seeds, choices = [p.seed for p in params], [p.choice for p in params]
    numbers = torch.from_numpy(uniform(seeds, choices, positions))[:, None]
    # The first token at which the cumulative distribution exceeds the number.
    index = (cumulative <= numbers * total).sum(dim=-1, keepdim=True)
    index = torch.minimum(index, kept.sum(dim=-1, keepdim=True) - 1)
    return order.gather(1, index).squeeze(1)


def _kept(probabilities: Tensor, cumulative: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return which of the sorted tokens top-k and top-p keep: a non-empty prefix of each row."""
    vocab_size = probabilities.shape[-1]
    top_k = torch.tensor([p.top_k or vocab_size for p in params])[:, None]
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64)[:, None]
    in_top_k = torch.arange(vocab_size) < top_k
    # top-p is taken of what top-k leaves: the smallest prefix that reaches the share.
    last = torch.clamp(top_k, max=vocab_size) - 1
    before = cumulative - probabilities
    in_top_p = (before < top_p * cumulative.gather(1, last)) | (top_p >= 1.0)
    in_top_p[:, 0] = True
    return in_top_k & in_top_p
