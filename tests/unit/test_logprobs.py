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


def test_ties_do_not_depend_on_neighbours() -> None:
    """Four different logits only: whatever the others ask for, the lowest ids of equals."""
    torch.manual_seed(1)
    logits = torch.randint(0, 4, (40, 300)).float()
    token_ids = torch.zeros(40, dtype=torch.int64)
    wanted = [5, 20, 1, 0] * 10
    together = token_logprobs(logits, token_ids, wanted)
    for row, num in enumerate(wanted):
        order = sorted(range(300), key=lambda i, row=row: (-float(logits[row, i]), i))[:num]  # type: ignore[misc]
        assert together[row].top_token_ids == order
        assert token_logprobs(logits[row : row + 1], token_ids[:1], [num]) == [together[row]]
