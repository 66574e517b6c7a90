"""Windows that are alike have a cosine of one, others less; a client's own count by themselves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.memory.window_similarity import rows_of, similarity


def test_lengths_that_do_not_drift_are_alike() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 1000, size=8000)
    small, large = similarity(lengths, 100), similarity(lengths, 1000)
    assert 0.8 < small.neighbours < large.neighbours < 1.0
    assert large.any_two == pytest.approx(large.neighbours, abs=0.01)


def test_a_drift_shows_far_apart_more_than_between_neighbours() -> None:
    lengths = np.repeat(np.array([10, 20, 40, 80, 160, 320, 640, 1280]), 200)
    half = similarity(lengths, 100)
    assert half.neighbours == pytest.approx(8 / 15) and half.worst == 0.0
    assert half.any_two < half.neighbours
    assert np.isnan(similarity(lengths[:150], 100).neighbours)


def test_clients_with_lengths_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    lines = ["prompt_tokens,output_tokens,client"]
    for number in range(400):
        client, length = ("a", 10) if number // 100 % 2 == 0 else ("b", 3000)
        lines.append(f"5,{length},{client}")
    path.write_text("\n".join(lines) + "\n")
    ((window, all_of_it, keys),) = rows_of(path, (100, 300))
    assert (window, all_of_it.neighbours, keys) == (100, 0.0, pytest.approx(1.0))
