"""Log-probabilities of drawn tokens."""

from __future__ import annotations

import pytest
import torch
from support.sampled_rows import make_batch

from lightserve.messages.common import TokenLogprob
from lightserve.types import SamplingParams
from lightserve.worker.sampling.sampler import logprob_tensors, sample, to_token_logprobs


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: list[int]
) -> list[TokenLogprob]:
    return to_token_logprobs(logprob_tensors(logits, token_ids, max(num_top)), num_top)


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


def test_rows_that_want_some_get_them_in_their_order() -> None:
    torch.manual_seed(2)
    logits = torch.randn(4, 30)
    logits[3, 1] = torch.nan
    wanted = [None, 3, 0, 50]
    params = [SamplingParams(seed=9, num_logprobs=number) for number in wanted]
    batch = make_batch(params, [4, 5, 6, 7])
    sampled = sample(logits, batch)
    assert batch.rows.logprob_indices == [1, 2, 3] and sampled.logprobs is not None
    assert sampled.logprobs.is_finite.tolist() == [True, True, False]
    first, second, _ = to_token_logprobs(sampled.logprobs, batch.rows.num_logprobs)
    expected = token_logprobs(logits[1:3], sampled.token_ids[1:3], [3, 0])
    assert [first, second] == expected and len(first.top_logprobs) == 3
    assert logprob_tensors(logits, torch.zeros(4, dtype=torch.int64), 2).is_finite.tolist() == [
        True,
        True,
        True,
        False,
    ]
    assert sample(logits, make_batch([SamplingParams()] * 4, [1] * 4)).logprobs is None
