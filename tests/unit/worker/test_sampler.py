"""Sampling: the random numbers, the distribution, truncation, and independence of the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sampled_rows import barred_tokens, draw, extreme_rows

from lightserve.types import SamplingParams
from lightserve.worker.sampling.interface import sequence_state, uniform, uniform_at

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


@settings(max_examples=200, deadline=None)
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
