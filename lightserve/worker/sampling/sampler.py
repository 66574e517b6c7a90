"""One token per row: the same call on the CPU and on a GPU.

    constraint -> options that change logits -> temperature -> min-p -> top-k and top-p -> draw

at one uniform number per row (`random_draw`). A row's token is a function of its own logits,
options and known tokens, never of its neighbours. What top-k or top-p leave is drawn from in the
order of falling probability, everything else in the order of the vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from lightserve.worker.sampling.host import sample_on_host
from lightserve.worker.sampling.interface import Sampled, SamplingBatch, Tokens
from lightserve.worker.sampling.logprobs import logprob_tensors


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
