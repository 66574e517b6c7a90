"""The length history: the window, the conditional distribution, keys, the cold start."""

from __future__ import annotations

import numpy as np
import pytest

from lightserve.messages.common import Thinking
from lightserve.router.output_lengths import OutputLengths, prediction_key
from lightserve.router.request import Parameters
from lightserve.types import RequestClass


def draw(
    lengths: OutputLengths,
    generated: int,
    *,
    count: int = 20_000,
    limit: int = 10_000,
    key: str | None = None,
) -> np.ndarray:
    uniforms = np.random.default_rng(3).random((1, count))
    keys = None if key is None else [key]
    return lengths.sample(np.array([generated]), np.array([limit]), uniforms, keys)[0]


def ks_distance(samples: np.ndarray, truth: np.ndarray) -> float:
    grid = np.union1d(samples, truth)
    cdf = [np.searchsorted(np.sort(x), grid, side="right") / len(x) for x in (samples, truth)]
    return float(np.abs(cdf[0] - cdf[1]).max())


@pytest.mark.parametrize("generated", [0, 50, 300, 900])
def test_samples_follow_the_conditional_distribution(generated: int) -> None:
    rng = np.random.default_rng(0)
    history = rng.geometric(1 / 200, 5000)
    lengths = OutputLengths(max_output_tokens=4096)
    for length in history:
        lengths.record(int(length))
    recent = history[-1000:]
    truth = recent[recent > generated]
    samples = draw(lengths, generated)
    assert samples.min() > generated
    assert ks_distance(samples, truth) < 0.015
    assert ks_distance(samples, recent[recent > 0] + 40) > 0.05, "the test can tell"


def test_only_the_window_counts() -> None:
    lengths = OutputLengths(max_output_tokens=4096, window=100)
    for length in [1000] * 100 + [10] * 106:  # of which the last 1 in 16 may not count yet
        lengths.record(length)
    assert set(draw(lengths, 0).tolist()) == {10}
    assert len(lengths) == 100


def test_cuts_at_max_tokens_and_outlives_the_history() -> None:
    lengths = OutputLengths(max_output_tokens=4096, window=10)
    for _ in range(10):
        lengths.record(50)
    assert set(draw(lengths, 3, limit=20).tolist()) == {20}
    beyond = draw(lengths, 80, limit=1000)
    assert beyond.min() >= 81 and beyond.max() <= 1000 and len(set(beyond.tolist())) > 100
    assert set(draw(lengths, 999, limit=1000).tolist()) == {1000}


def test_cold_start_is_a_weak_prior() -> None:
    lengths = OutputLengths(max_output_tokens=4096)
    cold = draw(lengths, 0)
    assert cold.min() == 1 and cold.max() == 4096
    for _ in range(180):
        lengths.record(100)
    assert 0.88 <= (draw(lengths, 0) == 100).mean() <= 0.92


def test_keys_shrink_towards_the_pool() -> None:
    lengths = OutputLengths(max_output_tokens=4096)
    for _ in range(450):
        lengths.record(1000, key="long")
        lengths.record(10, key="short")
    for _ in range(100):
        lengths.record(10)
    assert (draw(lengths, 0, key="long") == 1000).mean() > 0.9
    assert (draw(lengths, 0, key="short") == 10).mean() > 0.9
    for _ in range(63):
        lengths.record(500, key="rare")
    rare = (draw(lengths, 0, key="rare") == 500).mean()
    assert 0.74 <= rare <= 0.8, "63 of 83, and of the others 63 in 1000"
    pooled = (draw(lengths, 0, key="unknown") == 1000).mean()
    assert 0.4 <= pooled <= 0.5


def test_larger_uniforms_mean_longer_outputs() -> None:
    lengths = OutputLengths(max_output_tokens=4096)
    for length in np.random.default_rng(5).integers(1, 900, 1200):
        lengths.record(int(length), key=int(length) % 3)
    uniforms = np.linspace(0, 1, 50, endpoint=False)[None, :].repeat(3, axis=0)
    samples = lengths.sample(np.array([0, 100, 800]), np.array([4096] * 3), uniforms, [0, 1, 2])
    assert (np.diff(samples, axis=1) >= 0).all()


@pytest.mark.parametrize("key", [None, "k"])
def test_tables_are_renewed_when_one_in_sixteen_is_new(key: str | None) -> None:
    """In between samples stay as they are, whatever is recorded and whenever they are read."""
    lengths = OutputLengths(max_output_tokens=4096)
    for _ in range(1000):
        lengths.record(10, key="k")
    version = lengths.version
    for num_new in range(1, 64):
        lengths.record(500, key="k")
        if num_new < 63:
            assert lengths.version == version
            if num_new % 20 == 0:  # also where it is read for the first time
                assert set(draw(lengths, 0, key=key).tolist()) == {10}
    assert lengths.version == version + 1
    assert (draw(lengths, 0, key=key) == 500).mean() == pytest.approx(0.063, abs=0.005)


def test_a_short_history_counts_soon() -> None:
    lengths = OutputLengths(max_output_tokens=4096)
    for num_recorded in range(1, 17):
        lengths.record(10)
        assert lengths.version == num_recorded
    assert lengths.num_known == 16


def drawn(lengths: OutputLengths, budget: int | None, user: str = "") -> list[int]:
    """Outputs of a fresh request whose reasoning has a budget, in a hundred futures."""
    uniforms = ((np.arange(100) + 0.5) / 100)[None, :]
    generated, most = np.array([0]), np.array([100_000])
    key = prediction_key(RequestClass.RT, user, budget)
    found: list[int] = lengths.sample(generated, most, uniforms, [key])[0].tolist()
    return found


def test_a_budget_bounds_what_comes_before_the_answer() -> None:
    """Answers of 50 behind reasoning of 1,000 or 100 tokens, which had no budget."""
    lengths = OutputLengths(max_output_tokens=2048, window=100)
    assert drawn(lengths, 64) == drawn(lengths, None), "nothing is known yet"
    for number in range(100):
        reasoning = 1000 if number % 2 else 100
        lengths.record(reasoning + 50, prediction_key(RequestClass.RT), reasoning)
    assert set(drawn(lengths, None)) == {150, 1050}
    assert set(drawn(lengths, 64)) == {64 + 50}
    assert set(drawn(lengths, 500)) == {150, 512 + 50}, "of the next step"
    assert set(drawn(lengths, 5000)) == {150, 1050}
    # Outputs that had the same budget count before others, as those of a key do.
    for _ in range(100):
        lengths.record(80, prediction_key(RequestClass.RT, "ann", 64), 64)
    own = drawn(lengths, 64, "ann")
    assert own.count(80) > 60 and own.count(80) + own.count(64 + 50) + own.count(64 + 16) >= 100
    assert len(lengths._rows) <= 8


@pytest.mark.parametrize(
    ("budget", "step"),
    [(0, 0), (1, 1), (2, 2), (3, 3), (64, 64), (65, 96), (97, 128), (3000, 3072)],
)
def test_budgets_share_histories_in_steps(budget: int, step: int) -> None:
    key = prediction_key(RequestClass.BE, "ann", budget)
    assert key == (RequestClass.BE, "ann", step)
    assert prediction_key(RequestClass.BE, "ann") == (RequestClass.BE, "ann")


@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [([4, 7, 8, 9], 3), ([7, 8], 2), ([7, 7, 8, 7, 8], 3), ([8, 7], None), ([], None)],
)
def test_where_reasoning_ended_is_seen_from_the_tokens(
    token_ids: list[int], expected: int | None
) -> None:
    thinking = Thinking((), ("x",), (), (6, 7, 8), (7, 8))
    assert Parameters(thinking=thinking).num_reasoning(token_ids) == expected
    assert Parameters().num_reasoning(token_ids) is None
