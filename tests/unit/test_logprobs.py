"""Log-probabilities of drawn tokens."""

from __future__ import annotations

import pytest
import torch

from lightserve.worker.logprobs import token_logprobs


def test_the_most_probable_first_and_ties_by_lower_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [0.0, 0.0, 0.0, 2.0]])
    first, second = token_logprobs(logits, torch.tensor([0, 3]), [3, 0])
    expected = logits[0].log_softmax(-1)
    assert first.top_token_ids == [1, 2, 0] and second.top_token_ids == []
    assert first.logprob == pytest.approx(float(expected[0]))
    assert first.top_logprobs == pytest.approx(expected[[1, 2, 0]].tolist())
    assert second.logprob == pytest.approx(float(logits[1].log_softmax(-1)[3]))
