"""Log-probabilities of drawn tokens: the model's own, before any option changed them."""

from __future__ import annotations

import torch
from torch import Tensor

from lightserve.messages.common import TokenLogprob


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: list[int]) -> list[TokenLogprob]:
    """Return one per row: its token's, and its most probable tokens', ties by lower id.

    Args:
        logits: float32 [L, vocab], finite.
        token_ids: int64 [L].
        num_top: how many of the most probable tokens each row wants.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, token_ids[:, None]).squeeze(1).tolist()
    most = min(max(num_top, default=0), logits.shape[-1])
    order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :most]
    values, ids = logprobs.gather(1, order).tolist(), order.tolist()
    return [
        TokenLogprob(chosen[row], ids[row][:num], values[row][:num])
        for row, num in enumerate(num_top)
    ]
