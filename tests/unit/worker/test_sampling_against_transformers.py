"""Sampling options mean what they mean in transformers, where both have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.sampled_rows import History, draw, make_batch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lightserve.types import SamplingParams
from lightserve.worker.sampling.sampler import adjust

VOCAB, NUM_DRAWS = 60, 600


def processors(params: SamplingParams) -> LogitsProcessorList:
    """Theirs, in our order."""
    chosen: list[Any] = [TemperatureLogitsWarper(params.temperature)]
    if params.repetition_penalty != 1.0:
        chosen.insert(0, RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.min_p:
        chosen.append(MinPLogitsWarper(params.min_p))
    if params.top_k:
        chosen.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        chosen.append(TopPLogitsWarper(params.top_p))
    return LogitsProcessorList(chosen)


@pytest.mark.parametrize(
    "options",
    [
        {"min_p": 0.3},
        {"top_k": 5},
        {"top_p": 0.7},
        {"top_k": 9, "top_p": 0.6},
        {"min_p": 0.1, "top_k": 12},
        {"repetition_penalty": 1.8, "min_p": 0.2},
        {"repetition_penalty": 0.6, "top_p": 0.5, "temperature": 0.7},
        {"repetition_penalty": 3.0, "top_k": 7, "top_p": 0.9, "temperature": 1.6},
    ],
    ids=str,
)
def test_the_same_tokens_with_the_same_chances(options: dict[str, Any]) -> None:
    """Every token drawn is one they keep, and each as often as they would draw it."""
    torch.manual_seed(4)
    logits, seen = torch.randn(VOCAB) * 2, torch.randint(0, VOCAB, (40,))
    theirs = processors(SamplingParams(**options))(seen[None], logits[None].clone())[0].softmax(
        dim=-1
    )
    drawn = draw(
        logits.expand(NUM_DRAWS, VOCAB).contiguous(),
        [SamplingParams(seed=seed, **options) for seed in range(NUM_DRAWS)],
        [0] * NUM_DRAWS,
        [History(seen.tolist(), 10)] * NUM_DRAWS,
    )
    counts = torch.bincount(drawn.token_ids, minlength=VOCAB)
    assert not counts[theirs == 0].any(), "a token that they drop"
    spread = (theirs * (1 - theirs) * NUM_DRAWS).sqrt()
    assert ((counts - theirs * NUM_DRAWS).abs() <= 5 * spread + 1).all()


def test_repetition_penalty_gives_the_same_logits() -> None:
    torch.manual_seed(5)
    logits, seen = torch.randn(VOCAB), torch.randint(0, VOCAB, (25,))
    expected = RepetitionPenaltyLogitsProcessor(1.7)(seen[None], logits[None].clone())[0]
    params = SamplingParams(repetition_penalty=1.7)
    batch = make_batch([params], [0], [History(seen.tolist(), 5)])
    torch.testing.assert_close(adjust(logits[None], batch)[0], expected)
