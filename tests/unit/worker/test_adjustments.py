"""Bias, penalties, barred tokens and min-p against a plain loop."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sampled_rows import History, draw, make_batch

from lightserve.types import SamplingParams
from lightserve.worker.sampling.sampler import adjust, sample_on_host

VOCAB = 12
TOKENS = st.integers(0, VOCAB - 1)


def by_loop(logits: list[float], params: SamplingParams, history: History) -> list[float]:
    known = list(history.token_ids)
    output = known[history.num_prompt_tokens :]
    bias = dict(params.logit_bias)
    result = []
    for token, logit in enumerate(logits):
        value = logit + bias.get(token, 0.0)
        if token in known:
            factor = params.repetition_penalty
            value = value / factor if value > 0 else value * factor
        if token in output:
            value -= params.presence_penalty + output.count(token) * params.frequency_penalty
        barred = len(output) < params.min_tokens and token in history.eos_token_ids
        barred |= any(
            word[-1] == token and tuple(output[len(output) - len(word) + 1 :]) == word[:-1]
            for word in params.bad_words
            if len(word) <= len(output) + 1
        )
        if barred or (params.allowed_token_ids and token not in params.allowed_token_ids):
            value = -math.inf
        result.append(value)
    return result


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(st.floats(-5, 5, width=32), min_size=VOCAB, max_size=VOCAB),
    prompt=st.lists(TOKENS, min_size=1, max_size=8),
    output=st.lists(st.integers(0, 3), max_size=8),
    eos=st.lists(TOKENS, max_size=2),
    params=st.builds(
        SamplingParams,
        temperature=st.just(0.0),
        frequency_penalty=st.sampled_from([0.0, 0.5, -1.5]),
        presence_penalty=st.sampled_from([0.0, 0.25, -2.0]),
        repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
        logit_bias=st.dictionaries(TOKENS, st.floats(-9, 9, width=16), max_size=3).map(
            lambda bias: tuple(bias.items())
        ),
        allowed_token_ids=st.lists(TOKENS, max_size=4, unique=True).map(tuple),
        bad_words=st.lists(st.lists(TOKENS, min_size=1, max_size=4).map(tuple), max_size=5).map(
            tuple
        ),
        min_tokens=st.integers(0, 6),
    ),
)
def test_adjusted_logits_are_those_of_a_loop(
    logits: list[float],
    prompt: list[int],
    output: list[int],
    eos: list[int],
    params: SamplingParams,
) -> None:
    history = History(prompt + output, len(prompt), eos)
    expected = by_loop(logits, params, history)
    # A neighbour without options changes nothing, and a row with nothing left is an error.
    greedy = SamplingParams(temperature=0.0)
    both = torch.tensor([logits, logits])
    batch = make_batch([greedy, params], [9, 9], [None, history])
    adjusted = adjust(both, batch)
    torch.testing.assert_close(adjusted[1], torch.tensor(expected), atol=1e-5, rtol=1e-5)
    assert torch.equal(both, torch.tensor([logits, logits])), "the model's own stay"
    sampled = sample_on_host(both, batch)
    assert sampled.is_finite.tolist() == [True, max(expected) > -math.inf]
    assert int(sampled.token_ids[0]) == both[0].argmax()
    if sampled.is_finite[1]:
        assert int(sampled.token_ids[1]) == adjusted[1].argmax()


def test_rows_with_options_do_not_touch_each_other() -> None:
    torch.manual_seed(2)
    logits = torch.randn(4, 40)
    options = [
        SamplingParams(repetition_penalty=1.5, logit_bias=((3, 2.0), (5, -1.0))),
        SamplingParams(),
        SamplingParams(frequency_penalty=0.5, allowed_token_ids=(1, 2, 3, 39)),
        SamplingParams(presence_penalty=1.0, repetition_penalty=0.7, min_tokens=30),
        SamplingParams(bad_words=((9,), (7, 4, 8), (3, 7, 5, 8))),
        SamplingParams(bad_words=((5, 1), (4, 1), (39,))),
    ]
    logits = torch.cat([logits, torch.randn(2, 40)])
    histories = [History([n, 3, 3, 7, n], 2, [n]) for n in range(6)]
    together = adjust(logits, make_batch(options, [0] * 6, histories))
    assert together[4].isinf().nonzero().flatten().tolist() == [8, 9]
    assert together[5].isinf().nonzero().flatten().tolist() == [1, 39]
    for row in range(6):
        batch = make_batch(options[row : row + 1], [0], histories[row : row + 1])
        alone = sample_on_host(logits[row : row + 1], batch)
        assert alone.is_finite.all()
        if batch.rows.adjustments is not None:
            assert torch.equal(adjust(logits[row : row + 1], batch)[0], together[row])
        else:
            assert torch.equal(together[row], logits[row])


def test_min_p_keeps_the_share_of_the_most_probable() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    for min_p, kept in ((0.0, 4), (0.2, 3), (0.5, 2), (1.0, 1)):
        params = SamplingParams(min_p=min_p, seed=3)
        tokens = draw(logits.expand(2000, -1), [params] * 2000, range(2000)).token_ids
        assert set(tokens.tolist()) == set(range(kept))
