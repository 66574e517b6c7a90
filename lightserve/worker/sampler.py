"""From logits to tokens, vectorised over the batch, every row on its own.

    adjustments -> temperature -> min-p -> top-k and top-p -> inverse of the cumulative distribution

at one uniform number per row (`random_draw`). A row's path depends on its own parameters alone
and every operation works along the vocabulary, so its token does not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lightserve.types import SamplingParams
from lightserve.worker.adjustments import RowHistory, adjust
from lightserve.worker.constraints import StepMasks
from lightserve.worker.random_draw import uniform

BLOCK = 256
"""Tokens of the vocabulary that a draw takes together at first."""
CANDIDATES = 256
"""Most probable tokens that top-k and top-p look at first."""


MIN_TEMPERATURE = 1e-6
"""Below this every float32 gap between logits decides; much below it they divide to NaN."""


@dataclass(frozen=True, eq=False)
class Sampled:
    """The step's tokens."""

    token_ids: Tensor
    """int64 [L]; 0 where the row has no valid logits."""
    is_finite: list[bool]
    """Whether each row's logits were all finite, and its options left a token to draw."""


def sample(
    logits: Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    histories: Mapping[int, RowHistory] = MappingProxyType({}),
    masks: StepMasks | None = None,
) -> Sampled:
    """Draw one token per row.

    Args:
        logits: float32 [L, vocab].
        params: how to draw, one per row.
        positions: position that each new token will have; part of the random number.
        histories: of the rows whose options change their logits (`is_adjusted`), by index.
        masks: what rows with a constraint may draw.
    """
    is_finite = _finite_rows(logits)
    if histories or masks is not None:
        logits = logits.clone()
        if masks is not None:
            masks.apply(logits)
        for row, history in histories.items():
            adjust(logits[row], params[row], history)
        is_finite &= logits.amax(dim=-1).isfinite()
    if not bool(is_finite.all()):
        logits = torch.where(is_finite[:, None], logits, 0.0)
    token_ids = _largest(logits)
    for draw, rows in ((_draw_truncated, _truncated(params)), (_draw, _untruncated(params))):
        if rows:
            chosen = [params[row] for row in rows]
            numbers = _numbers(chosen, [positions[row] for row in rows])
            some = logits if len(rows) == len(params) else logits[rows]
            token_ids[rows] = draw(_probabilities(some, chosen), chosen, numbers)
    return Sampled(torch.where(is_finite, token_ids, 0), is_finite.tolist())


def _finite_rows(logits: Tensor) -> Tensor:
    """Return whether all of each row is finite, bool [L]."""
    # One pass where all is well: a sum is finite only if its terms are.
    if bool(logits.sum().isfinite()):
        return torch.ones(logits.shape[0], dtype=torch.bool)
    return torch.isfinite(logits).all(dim=-1)


def _largest(logits: Tensor) -> Tensor:
    """Return the first of the largest logits of each row, int64 [L]."""
    # On a CPU numpy takes a tenth of torch's time for the same.
    return torch.from_numpy(logits.numpy().argmax(axis=-1))


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
    """Return softmax(logits / temperature) without what min-p drops, float32 [L, vocab]."""
    temperature = torch.tensor([max(p.temperature, MIN_TEMPERATURE) for p in params])[:, None]
    # The largest logit becomes 0 first, so that small temperatures cannot overflow.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)).div_(temperature)
    torch.softmax(scaled, dim=-1, out=scaled)
    if any(p.min_p for p in params):
        least = torch.tensor([p.min_p for p in params])[:, None] * scaled.amax(-1, keepdim=True)
        scaled.masked_fill_(scaled < least, 0.0)
    return scaled


def _draw(probabilities: Tensor, params: Sequence[SamplingParams], numbers: Tensor) -> Tensor:
    """Draw from the whole vocabulary, in its own order; int64 [L].

    First a block of tokens, then a token of it: running sums over everything are slow.
    """
    del params
    num_rows, vocab_size = probabilities.shape
    if vocab_size % BLOCK:
        probabilities = F.pad(probabilities, (0, -vocab_size % BLOCK))
    blocks = probabilities.view(num_rows, -1, BLOCK)
    totals = blocks.sum(dim=-1).double()
    cumulative = totals.cumsum(dim=-1)
    target = numbers * cumulative[:, -1:]
    block = _invert(cumulative, target)
    target -= cumulative.gather(1, block) - totals.gather(1, block)
    within = blocks[torch.arange(num_rows), block.squeeze(1)].double().cumsum(dim=-1)
    # The block's two sums differ by a rounding: the target must not pass the second one.
    target = torch.minimum(target, within[:, -1:] * (1 - 1e-15)).clamp(min=0.0)
    return (block * BLOCK + _invert(within, target)).squeeze(1)


def _draw_truncated(
    probabilities: Tensor, params: Sequence[SamplingParams], numbers: Tensor
) -> Tensor:
    """Draw from the most probable tokens that top-k and then top-p keep; int64 [L]."""
    vocab_size = probabilities.shape[-1]
    drawn = _draw_from_top(probabilities, params, numbers, min(CANDIDATES, vocab_size))
    if missing := (~drawn.is_certain).nonzero().flatten().tolist():
        rest = [params[row] for row in missing]
        again = _draw_from_top(probabilities[missing], rest, numbers[missing], vocab_size)
        drawn.token_ids[missing] = again.token_ids
    return drawn.token_ids


class _Drawn(NamedTuple):
    token_ids: Tensor
    """int64 [L]."""
    is_certain: Tensor
    """bool [L], False where tokens that were not looked at may be kept too."""


def _draw_from_top(
    probabilities: Tensor, params: Sequence[SamplingParams], numbers: Tensor, count: int
) -> _Drawn:
    """Draw as if the vocabulary were each row's `count` most probable tokens."""
    vocab_size = probabilities.shape[-1]
    top_k = torch.tensor([min(p.top_k or vocab_size, vocab_size) for p in params])[:, None]
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64)[:, None]
    values, order = probabilities.topk(count, dim=-1)
    values = values.double()
    cumulative = values.cumsum(dim=-1)
    limit = top_k.clamp(max=count)
    # What top-k leaves, of which top-p takes the smallest prefix that reaches its share.
    total = cumulative.gather(1, limit - 1)
    if count < vocab_size:
        everything = probabilities.sum(dim=-1, keepdim=True, dtype=torch.float64)
        total = torch.where(top_k > count, everything, total)
    in_top_p = (cumulative - values < top_p * total).sum(dim=-1, keepdim=True)
    last = torch.minimum(limit, in_top_p).clamp(min=1) - 1
    index = _invert(cumulative, numbers * cumulative.gather(1, last))
    token_ids = order.gather(1, torch.minimum(index, last)).squeeze(1)
    reaches = (top_k == vocab_size) & (cumulative[:, -1:] >= top_p * total)
    return _Drawn(token_ids, ((top_k <= count) | reaches).squeeze(1))


def _invert(cumulative: Tensor, target: Tensor) -> Tensor:
    """Return the first index at which the cumulative sum exceeds the target; int64 [L, 1]."""
    index = torch.searchsorted(cumulative, target, right=True)
    return index.clamp(max=cumulative.shape[-1] - 1)
