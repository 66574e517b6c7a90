"""One token per row: the same call on the CPU and on a GPU.

    constraint -> options that change logits -> temperature -> min-p -> top-k and top-p -> draw

at one uniform number per row (`uniform_at`). A row's token is a function of its own logits,
options and known tokens, never of its neighbours. What top-k or top-p leave is drawn from in the
order of falling probability, everything else in the order of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightserve.messages.common import TokenLogprob
from lightserve.worker.sampling.host import sample_on_host
from lightserve.worker.sampling.interface import LogprobTensors, Sampled, SamplingBatch, Tokens

# Log-probabilities of tokens: the model's own, before any option changed them.
#
# In two halves: `logprob_tensors` where the logits are, `to_token_logprobs` on the host once its
# tensors are there.

PROMPT_ROWS = 64
"""Places of a prompt whose logits are there at a time: a vocabulary of them is large."""


def logprob_tensors(
    logits: Tensor, token_ids: Tensor, num_top: int, is_finite: Tensor | None = None
) -> LogprobTensors:
    """Return log-probabilities of given tokens and of the most probable ones.

    Args:
        logits: [n, vocab], float32 on the CPU, n >= 1.
        token_ids: int64 [n].
        num_top: how many of the most probable ones, the same for each row.
        is_finite: bool [n], whether each row's logits are, if that is known.
    """
    num_top = min(num_top, logits.shape[1])
    if logits.device.type != "cpu":
        # Triton: an optional dependency, which a CPU does without.
        from lightserve.worker.sampling.device import logprobs_on_device  # noqa: PLC0415

        return logprobs_on_device(logits, token_ids, num_top)
    if is_finite is None:
        is_finite = torch.isfinite(logits).all(dim=-1)
    return _on_host(logits, token_ids, num_top, is_finite)


def to_token_logprobs(tensors: LogprobTensors, num_top: Sequence[int]) -> list[TokenLogprob]:
    """Return tensors that have come to the host as one message per row, with its own number."""
    tokens, ids, values = (part.tolist() for part in tensors[:3])
    return [
        TokenLogprob(tokens[row], ids[row][:num], values[row][:num])
        for row, num in enumerate(num_top)
    ]


def _on_host(logits: Tensor, token_ids: Tensor, num_top: int, is_finite: Tensor) -> LogprobTensors:
    total = logits.logsumexp(dim=-1, keepdim=True)
    chosen = (logits.gather(1, token_ids[:, None]) - total).squeeze(1)
    ids = torch.zeros(len(logits), num_top, dtype=torch.int64)
    if num_top:
        top = logits.topk(num_top, dim=-1)
        for row in range(len(logits)):
            ids[row] = _best(logits[row], top.values[row], top.indices[row])
    return LogprobTensors(chosen, ids.int(), logits.gather(1, ids) - total, is_finite)


def _best(logits: Tensor, values: Tensor, ids: Tensor) -> Tensor:
    """Return the ids of a row's largest logits, equal ones by id; int64 [n].

    `topk` takes any of the tokens that are equal at its end.
    """
    last = values[-1]
    above = ids[values > last]
    equal = (logits == last).nonzero().flatten()[: len(ids) - len(above)]
    found = torch.cat([above[_by_value(logits[above], above)], equal])
    # Without a number among them nothing is equal to anything; such rows mean nothing.
    return found if len(found) == len(ids) else ids


def _by_value(values: Tensor, ids: Tensor) -> Tensor:
    """Return the order of falling values, equal ones by rising id."""
    by_id = ids.argsort()
    return by_id[values[by_id].argsort(descending=True, stable=True)]


def sample(logits: Tensor, batch: SamplingBatch) -> Sampled:
    """Draw one token per row; on a GPU this waits for nothing.

    Args:
        logits: [L, vocab], float32 on the CPU, unchanged afterwards, L >= 1.
        batch: how; on the device of the logits.
    """
    token_ids, is_finite = _draw(logits, batch)
    rows = batch.rows
    if not rows.logprob_indices:
        return Sampled(token_ids, is_finite, None)
    wanted, chosen, known = logits, token_ids, is_finite
    if len(rows.logprob_indices) < len(rows):
        wanted, chosen, known = (part[rows.logprob_rows] for part in (wanted, chosen, known))
    most = max(rows.num_logprobs)
    return Sampled(token_ids, is_finite, logprob_tensors(wanted, chosen, most, known))


def _draw(logits: Tensor, batch: SamplingBatch) -> Tokens:
    if logits.device.type == "cpu":
        return sample_on_host(logits, batch)
    # Triton: an optional dependency, which a CPU does without.
    from lightserve.worker.sampling.device import sample_on_device  # noqa: PLC0415

    return sample_on_device(logits, batch)
