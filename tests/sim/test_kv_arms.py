"""The comparison of `bench.memory.arms`, small: what its arms have in common, and what they do."""

from __future__ import annotations

import dataclasses

import pytest

from bench.memory import arms
from lightserve import sim


@pytest.fixture(scope="module")
def reports() -> dict[str, sim.HybridReport]:
    """Return a short run of every arm, memory so short that best-effort requests are paused."""
    cells = {arm: arms.Cell(arm, 4.0, 7000, 0, 10.0, 1.0) for arm in arms.ARMS}
    outcomes = {arm: arms.run(cell) for arm, cell in cells.items()}
    assert all(arms.row_of(arm, [outcome]) for arm, outcome in outcomes.items())
    return {arm: outcome.report for arm, outcome in outcomes.items()}


def test_the_size_of_a_block_decides_nothing_but_where_slots_lie(
    reports: dict[str, sim.HybridReport],
) -> None:
    blocks, single = reports["two-ended 16, checkpoint"], reports["B = 1, checkpoint"]
    assert (blocks.rt, blocks.be) == (single.rt, single.be)
    runs = blocks.kv.mean_run_tokens, single.kv.mean_run_tokens
    assert None not in runs and runs[0] != runs[1]
    assert dataclasses.replace(blocks.kv, mean_run_tokens=None) == dataclasses.replace(
        single.kv, mean_run_tokens=None
    )


def test_each_arm_takes_memory_in_its_own_way(reports: dict[str, sim.HybridReport]) -> None:
    assert all(report.kv.pauses > 0 for report in reports.values())
    for arm, report in reports.items():
        if "recompute" in arm:
            assert report.kv.copied_tokens == 0 < report.kv.recomputed_tokens, arm
        else:
            assert report.kv.loaded_tokens > 0, arm
    swap = reports["exclusive 16, swap"].kv
    checkpoint = reports["two-ended 16, checkpoint"].kv
    assert swap.ahead_tokens == 0 < checkpoint.ahead_tokens
    assert swap.saved_tokens > checkpoint.saved_tokens
