"""M* against a step-by-step simulation, alone and incrementally."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.grids import choose, more_when_long

from lightserve.router.future_memory import FutureMemory, peak_memory


def brute_force_peak(base: list[int], rest: list[int]) -> int:
    """Let every request grow by one token per step and leave after its last."""
    return max(
        sum(held + step for held, left in zip(base, rest, strict=True) if left >= step)
        for step in range(max(rest, default=0) + 1)
    )


batches = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 40)), min_size=1, max_size=12)


@more_when_long
@settings(max_examples=choose(250, 1000), deadline=None)
@given(batch=batches)
def test_peak_equals_brute_force(batch: list[tuple[int, int]]) -> None:
    base, rest = (list(column) for column in zip(*batch, strict=True))
    peaks = peak_memory(np.array(base), np.array([rest]))
    assert peaks.tolist() == [brute_force_peak(base, rest)]


def test_ten_thousand_random_batches() -> None:
    rng = np.random.default_rng(1)
    for num_requests in range(1, 11):
        base = rng.integers(1, 100, num_requests)
        rest = rng.integers(0, 50, (1000, num_requests))
        expected = [brute_force_peak(base.tolist(), row) for row in rest.tolist()]
        assert peak_memory(base, rest).tolist() == expected


@more_when_long
@settings(max_examples=choose(150, 500), deadline=None)
@given(batch=batches, newcomers=batches)
def test_one_more_request_without_sorting(
    batch: list[tuple[int, int]], newcomers: list[tuple[int, int]]
) -> None:
    base = [held for held, _ in batch]
    rest = [left for _, left in batch]
    memory = FutureMemory(np.array(base), np.array([rest, rest[::-1]]))
    mirrored = rest[::-1]
    for held, left in newcomers:
        at_least = memory.peaks_at_least(held, np.array([left, left + 1]))
        asked = memory.with_newcomer(held, np.array([left, left + 1]))
        base, rest, mirrored = [*base, held], [*rest, left], [*mirrored, left + 1]
        expected = [brute_force_peak(base, rest), brute_force_peak(base, mirrored)]
        assert asked.peaks.tolist() == expected
        assert (memory.peaks <= at_least).all() and (at_least <= asked.peaks).all()
        memory.add(asked)
        assert memory.peaks.tolist() == expected


def test_empty_batch() -> None:
    memory = FutureMemory(np.empty(0, dtype=np.int64), np.empty((3, 0), dtype=np.int64))
    assert memory.peaks.tolist() == [0, 0, 0]
    assert memory.with_newcomer(5, np.array([1, 2, 3])).peaks.tolist() == [6, 7, 8]


def test_sums_beyond_32_bits() -> None:
    """Half of them before any request joins, the others by newcomers."""
    base, rest = [2**29, 2**29 + 5, 7], [3, 9, 100]
    memory = FutureMemory(np.array(base), np.array([rest]))
    for held, left in [(2**29, 50), (2**30 - 1, 2), (2**29, 2000)] * 3:
        asked = memory.with_newcomer(held, np.array([left]))
        base, rest = [*base, held], [*rest, left]
        assert asked.peaks.tolist() == [brute_force_peak(base, rest)]
        memory.add(asked)
