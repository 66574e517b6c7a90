"""Sampling: the random numbers, the distribution, truncation, and independence of the batch."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.grids import choose, more_when_long
from support.sampled_rows import History, barred_tokens, draw, extreme_rows, make_batch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from lightserve.messages.common import TokenLogprob
from lightserve.types import SAMPLING_FIELDS, SamplingParams
from lightserve.worker.sampling import interface
from lightserve.worker.sampling.interface import sequence_state, uniform, uniform_at
from lightserve.worker.sampling.sampler import (
    adjust,
    logprob_tensors,
    sample,
    sample_on_host,
    to_token_logprobs,
)

NUM_DRAWS = 20_000
LOGITS = torch.tensor([2.0, -1.0, 0.5, 1.0, -3.0, 0.0])


def frequencies(params: SamplingParams, logits: torch.Tensor = LOGITS) -> torch.Tensor:
    rows = logits.expand(NUM_DRAWS, -1)
    tokens = draw(rows, [params] * NUM_DRAWS, range(NUM_DRAWS)).token_ids
    return torch.bincount(tokens, minlength=len(logits)) / NUM_DRAWS


def chi_square(observed: torch.Tensor, expected: torch.Tensor) -> float:
    kept = expected > 0
    assert float(observed[~kept].sum()) == 0.0
    return float(NUM_DRAWS * ((observed - expected)[kept] ** 2 / expected[kept]).sum())


def truncated(probabilities: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Brute force: walk down the sorted tokens."""
    order = sorted(range(len(probabilities)), key=lambda i: -float(probabilities[i]))
    order = order[: top_k or len(order)]
    total = sum(float(probabilities[i]) for i in order)
    kept, mass = [], 0.0
    for i in order:
        if kept and mass >= top_p * total:
            break
        kept.append(i)
        mass += float(probabilities[i])
    result = torch.zeros_like(probabilities)
    result[kept] = probabilities[kept]
    return result / result.sum()


def test_uniform_numbers_are_uniform_and_independent() -> None:
    numbers = uniform([7] * 100_000, [0] * 100_000, range(100_000))
    counts, _ = np.histogram(numbers, bins=100, range=(0, 1))
    assert ((counts - 1000) ** 2 / 1000).sum() < 160  # 99 degrees of freedom
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.01
    by_seed = uniform(range(100_000), [0] * 100_000, [5] * 100_000)
    assert abs(np.corrcoef(numbers, by_seed)[0, 1]) < 0.01


def test_uniform_numbers_depend_on_all_three() -> None:
    values = {
        float(uniform([seed], [choice], [position])[0])
        for seed in (-(2**63), -1, 0, 1, 2**63 - 1)
        for choice in (0, 1)
        for position in (0, 1, 8191)
    }
    assert len(values) == 30
    assert float(uniform([3], [1], [2])[0]) == 0.6912595630656752
    known = np.array([sequence_state(-7, 2)])
    assert uniform_at(known, np.array([9], dtype=np.uint64))[0] == uniform([-7], [2], [9])[0]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.5, 0, 1.0), (2.0, 0, 1.0), (1.0, 3, 1.0), (1.0, 0, 0.8), (1.5, 4, 0.6)],
)
def test_draws_follow_the_distribution(temperature: float, top_k: int, top_p: float) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=11)
    expected = truncated((LOGITS / temperature).softmax(-1).double(), top_k, top_p)
    assert chi_square(frequencies(params), expected.float()) < 20.5  # 5 degrees, p = 0.001
    other = truncated((LOGITS / (temperature + 0.2)).softmax(-1).double(), top_k, top_p)
    if temperature < 2.0:
        assert chi_square(frequencies(params), other.float()) > 20.5, "the test can tell"


WITHOUT_EXAMPLE: dict[str, Any] = {
    "temperature": 0.5,
    "top_k": 2,
    "logit_bias": ((0, 5.0),),
    "allowed_token_ids": (1, 2),
    "bad_words": ((0, 3),),
}


@pytest.mark.parametrize("name", [n for n, spec in SAMPLING_FIELDS.items() if spec.changes])
def test_no_parameter_is_declared_and_ignored(name: str) -> None:
    example = SAMPLING_FIELDS[name].example
    value = WITHOUT_EXAMPLE[name] if example is None else example
    plain = [SamplingParams(seed=seed) for seed in range(2000)]
    changed = [msgspec.structs.replace(params, **{name: value}) for params in plain]
    histories = [History([3, 0, 0], 1, eos_token_ids=(0,))] * len(plain)
    rows, at = LOGITS.expand(len(plain), -1), range(len(plain))
    tokens = [draw(rows, each, at, histories).token_ids for each in (plain, changed)]
    assert not torch.equal(*tokens)


@more_when_long
@settings(max_examples=choose(60, 200), deadline=None)
@given(
    seed=st.integers(0, 2**31),
    vocab=st.integers(1, 40),
    top_k=st.integers(0, 50),
    top_p=st.floats(0.01, 1.0),
)
def test_only_kept_tokens_are_drawn(seed: int, vocab: int, top_k: int, top_p: float) -> None:
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 3
    params = SamplingParams(temperature=0.9, top_k=top_k, top_p=top_p, seed=seed)
    kept = truncated((logits / 0.9).softmax(-1).double(), top_k, top_p) > 0
    tokens = draw(logits.expand(64, -1), [params] * 64, range(64)).token_ids
    assert bool(kept[tokens].all())


@pytest.mark.parametrize("vocab", [255, 256, 257, 1000])
def test_draws_invert_the_cumulative_distribution(vocab: int) -> None:
    """Vocabularies of several blocks, one of them full of impossible tokens, and a rest."""
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    logits[300:600] = -1e9
    params = SamplingParams(temperature=0.8, seed=vocab)
    tokens = draw(logits.expand(4000, -1), [params] * 4000, range(4000)).token_ids
    cumulative = (logits / 0.8).double().softmax(-1).cumsum(-1)
    numbers = torch.from_numpy(uniform([vocab] * 4000, [0] * 4000, range(4000)))
    expected = torch.searchsorted(cumulative, numbers, right=True)
    # Where a number is next to a border, float32 may fall on the other side.
    assert int((tokens != expected).sum()) <= 4
    assert float(cumulative.diff(prepend=torch.zeros(1)).gather(0, tokens).min()) > 0.0


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 0.99), (0, 0.3), (400, 0.9), (256, 1.0), (5, 1.0)]
)
@pytest.mark.parametrize("spread", [0.1, 5.0])
def test_truncation_of_a_large_vocabulary(top_k: int, top_p: float, spread: float) -> None:
    """Nearly flat, hundreds of tokens are kept; otherwise a few."""
    logits = torch.randn(900, generator=torch.Generator().manual_seed(3)) * spread
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, seed=9)
    kept = truncated(logits.softmax(-1).double(), top_k, top_p) > 0
    tokens = draw(logits.expand(4000, -1), [params] * 4000, range(4000)).token_ids
    assert bool(kept[tokens].all())
    likely = kept & (logits.softmax(-1) > 3e-3)
    assert bool(torch.isin(likely.nonzero().flatten(), tokens).all())


def test_greedy_and_nearly_greedy_take_the_largest() -> None:
    for temperature in (0.0, 1e-6, 1e-50, 5e-324):
        params = SamplingParams(temperature=temperature, seed=1)
        assert float(frequencies(params)[0]) == 1.0


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(0)
    logits = torch.randn(60, 500) * 4
    params = [
        SamplingParams(
            temperature=(0.0, 0.7, 1.0, 1.3)[i % 4],
            top_k=(0, 5)[i % 2],
            top_p=(1.0, 0.9)[i % 3 == 0],
            seed=i,
        )
        for i in range(60)
    ]
    positions = [3 * i for i in range(60)]
    whole = draw(logits, params, positions).token_ids
    for rows in ([5], [59, 0, 7], list(range(30, 60)), list(torch.randperm(60))):
        part = draw(logits[rows], [params[i] for i in rows], [positions[i] for i in rows])
        assert torch.equal(part.token_ids, whole[rows])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_without_finite_logits_is_alone(value: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 50)
    params = [SamplingParams(temperature=t, seed=4) for t in (0.0, 1.0, 1.0)]
    clean = draw(logits.clone(), params, [1, 2, 3]).token_ids
    logits[1, 7] = value
    sampled = draw(logits, params, [1, 2, 3])
    assert sampled.is_finite.tolist() == [True, False, True]
    assert sampled.token_ids.tolist() == [int(clean[0]), 0, int(clean[2])]


@pytest.mark.parametrize("scale", [0.0, 1.0, 3e4])
def test_every_legal_extreme_gives_a_token_that_is_allowed(scale: float) -> None:
    params, histories = zip(*extreme_rows(200, 257, num_known=1000), strict=True)
    torch.manual_seed(1)
    logits = torch.randn(len(params), 257) * scale
    drawn = draw(logits, params, [0] * len(params), histories)
    assert drawn.is_finite.all()
    for row, token_id in enumerate(drawn.token_ids.tolist()):
        barred = barred_tokens(params[row], histories[row], 257)
        assert 0 <= token_id < 257 and token_id not in barred, params[row]


# Log-probabilities of drawn tokens.


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


# Bias, penalties, barred tokens and min-p against a plain loop.

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


@more_when_long
@settings(max_examples=choose(60, 200), deadline=None)
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
        SamplingParams(typical_p=0.5, temperature=0.8, presence_penalty=1.0),
        SamplingParams(typical_p=0.3, temperature=0.0),
    ]
    logits = torch.cat([logits, torch.randn(4, 40)])
    histories = [History([n, 3, 3, 7, n], 2, [n]) for n in range(8)]
    together = adjust(logits, make_batch(options, [0] * 8, histories))
    assert 0 < int(together[6].isinf().sum()) < 39 and torch.equal(together[7], logits[7])
    assert together[4].isinf().nonzero().flatten().tolist() == [8, 9]
    assert together[5].isinf().nonzero().flatten().tolist() == [1, 39]
    for row in range(8):
        batch = make_batch(options[row : row + 1], [0], histories[row : row + 1])
        alone = sample_on_host(logits[row : row + 1], batch)
        assert alone.is_finite.all()
        if batch.rows.adjustments is not None:
            assert torch.equal(adjust(logits[row : row + 1], batch)[0], together[row])
        else:
            assert torch.equal(together[row], logits[row])


@pytest.mark.parametrize("typical_p", [0.05, 0.7, 0.99, 0.999999])
def test_typical_tokens_are_found_without_an_order_of_all(
    typical_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole numbers are equally far from what is expected, and one row has logits that are none."""
    logits = torch.randn(3, 3000, generator=torch.Generator().manual_seed(1)).mul(4).round()
    logits[2, ::2] = -torch.inf
    params = [
        SamplingParams(typical_p=typical_p, temperature=temperature) for temperature in (1, 9)
    ]
    histories = [History([1, 2], 1)] * 3
    batch = make_batch([*params, params[0]], [0] * 3, histories)
    monkeypatch.setattr(interface, "FIRST_PLACES", 10**6)
    truth = adjust(logits, batch)
    for first_places in (1, 40, 2999):
        monkeypatch.setattr(interface, "FIRST_PLACES", first_places)
        assert torch.equal(adjust(logits, batch), truth), first_places
    assert truth[0].isinf().any()


def test_min_p_keeps_the_share_of_the_most_probable() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    for min_p, kept in ((0.0, 4), (0.2, 3), (0.5, 2), (1.0, 1)):
        params = SamplingParams(min_p=min_p, seed=3)
        tokens = draw(logits.expand(2000, -1), [params] * 2000, range(2000)).token_ids
        assert set(tokens.tolist()) == set(range(kept))


# Sampling options mean what they mean in transformers, where both have them.

SMALL_VOCAB, FEW_DRAWS = 60, 600


def processors(params: SamplingParams) -> LogitsProcessorList:
    """Theirs, in our order."""
    chosen: list[Any] = [TemperatureLogitsWarper(params.temperature)]
    if params.repetition_penalty != 1.0:
        chosen.insert(0, RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.typical_p < 1.0:
        chosen.append(TypicalLogitsWarper(params.typical_p))
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
        {"typical_p": 0.4, "temperature": 1.3},
        {"typical_p": 0.8, "top_k": 6, "repetition_penalty": 1.4},
        {"repetition_penalty": 0.6, "top_p": 0.5, "temperature": 0.7},
        {"repetition_penalty": 3.0, "top_k": 7, "top_p": 0.9, "temperature": 1.6},
    ],
    ids=str,
)
def test_the_same_tokens_with_the_same_chances(options: dict[str, Any]) -> None:
    """Every token drawn is one they keep, and each as often as they would draw it."""
    torch.manual_seed(4)
    logits, seen = torch.randn(SMALL_VOCAB) * 2, torch.randint(0, SMALL_VOCAB, (40,))
    theirs = processors(SamplingParams(**options))(seen[None], logits[None].clone())[0].softmax(
        dim=-1
    )
    drawn = draw(
        logits.expand(FEW_DRAWS, SMALL_VOCAB).contiguous(),
        [SamplingParams(seed=seed, **options) for seed in range(FEW_DRAWS)],
        [0] * FEW_DRAWS,
        [History(seen.tolist(), 10)] * FEW_DRAWS,
    )
    counts = torch.bincount(drawn.token_ids, minlength=SMALL_VOCAB)
    assert not counts[theirs == 0].any(), "a token that they drop"
    spread = (theirs * (1 - theirs) * FEW_DRAWS).sqrt()
    assert ((counts - theirs * FEW_DRAWS).abs() <= 5 * spread + 1).all()


def test_repetition_penalty_gives_the_same_logits() -> None:
    torch.manual_seed(5)
    logits, seen = torch.randn(SMALL_VOCAB), torch.randint(0, SMALL_VOCAB, (25,))
    expected = RepetitionPenaltyLogitsProcessor(1.7)(seen[None], logits[None].clone())[0]
    params = SamplingParams(repetition_penalty=1.7)
    batch = make_batch([params], [0], [History(seen.tolist(), 5)])
    torch.testing.assert_close(adjust(logits[None], batch)[0], expected)
