"""The length history: the window, the conditional distribution, keys, the cold start."""

from __future__ import annotations

import numpy as np
import pytest

from lightserve.router.output_lengths import OutputLengths


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
    for length in [1000] * 100 + [10] * 100:
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
    lengths.record(500, key="rare")
    rare = (draw(lengths, 0, key="rare") == 500).mean()
    assert 0.005 <= rare <= 0.05
    pooled = (draw(lengths, 0, key="unknown") == 1000).mean()
    assert 0.4 <= pooled <= 0.5


def test_larger_uniforms_mean_longer_outputs() -> None:
    lengths = OutputLengths(max_output_tokens=4096)
    for length in np.random.default_rng(5).integers(1, 900, 1200):
        lengths.record(int(length), key=int(length) % 3)
    uniforms = np.linspace(0, 1, 50, endpoint=False)[None, :].repeat(3, axis=0)
    samples = lengths.sample(np.array([0, 100, 800]), np.array([4096] * 3), uniforms, [0, 1, 2])
    assert (np.diff(samples, axis=1) >= 0).all()


@pytest.mark.parametrize("num_own", [10, 320, 1000])
def test_samples_lag_behind_their_key_by_a_share_of_it_at_most(num_own: int) -> None:
    """All keys said 10 so far, now this key says 500."""
    lengths = OutputLengths(max_output_tokens=4096)
    for _ in range(num_own):
        lengths.record(10, key="k")
    for _ in range(1000 - num_own):
        lengths.record(10)
    assert set(draw(lengths, 0, key="k").tolist()) == {10}
    num_new = num_own // 128 + 1
    for _ in range(num_new):
        lengths.record(500, key="k")
    share = (draw(lengths, 0, key="k") == 500).mean()
    num_own = min(1000, num_own + num_new)
    weight = num_own / (num_own + 50)
    expected = weight * num_new / num_own + (1 - weight) * num_new / 1000
    assert share == pytest.approx(expected, abs=0.005)


def test_samples_lag_behind_the_pool_by_32_lengths_at_most() -> None:
    lengths = OutputLengths(max_output_tokens=4096)
    for _ in range(1000):
        lengths.record(10, key="k")
    assert set(draw(lengths, 0, key="unknown").tolist()) == {10}
    for _ in range(33):
        lengths.record(500)
    assert (draw(lengths, 0, key="unknown") == 500).mean() == pytest.approx(0.033, abs=0.005)
