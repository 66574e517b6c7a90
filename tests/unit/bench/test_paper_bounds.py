"""Bounds on best-effort tokens: by hand, and above what is reached."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.scheduling.paper_bounds import (
    Prompt,
    best_effort_bound,
    means_of,
    most_requests,
    oracle_schedule,
    shared_tokens,
)
from bench.scheduling.paper_figures import Figure
from bench.scheduling.papers import UNIFIED, verdict
from lightserve.sim import HybridConfig, Targets, run_hybrid
from lightserve.sim.virtual_gpus import VirtualHardware

STEPS = VirtualHardware(
    floor_s=0.01,
    per_new_token_s=0.001,
    constant_s=0.0,
    per_decode_context_s=0.0,
    per_chunk_context_s=0.0,
    per_copied_token_s=0.0,
    kv_bytes_per_token=1,
)
TEN_TOKENS = means_of(np.array([10]), np.array([11]), np.array([0]))
"""A prompt of ten tokens, and ten decodes, which hold 15.5 slots."""


@pytest.mark.parametrize(
    ("num_slots", "rate_rps", "gap_s", "expected"),
    [
        (10**9, 0.0, np.inf, 50.0),  # 20 tokens of 1 ms
        (10**9, 25.0, np.inf, 25.0),  # others like it have half of the time
        (10**9, 25.0, 0.0095, 0.0),  # and so many steps that their floor takes all of it
        (155, 0.0, np.inf, 50.0),  # ten at a time, 50 steps of 10 ms
        (31, 0.0, np.inf, 20.0),  # two at a time: 100 steps are all there is time for
    ],
)
def test_time_memory_and_deadlines_limit(
    num_slots: int, rate_rps: float, gap_s: float, expected: float
) -> None:
    others = (rate_rps, TEN_TOKENS) if rate_rps else None
    found = most_requests(STEPS, num_slots, others, TEN_TOKENS, gap_s)
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-3)


def test_a_block_is_computed_once_and_all_that_read_it_share_that() -> None:
    assert shared_tokens([[1, 2], [1], [1], [1]]).tolist() == [384, 384, 384, 384]


def test_no_run_is_above_it() -> None:
    config = HybridConfig(
        rt="poisson:4",
        rt_lengths="uniform:64-256,16-64",
        be="closed:48",
        be_lengths="uniform:64-256,16-64",
        duration_s=24.0,
        margin_s=4.0,
        capacity_tokens=8_000,
        targets=Targets(1.0, 0.2, None),
    )
    bound = best_effort_bound(config)
    assert bound is not None
    reached = run_hybrid(config).be.throughput_tps
    assert 0.6 * bound < reached < 1.02 * bound  # requests of before the window end in it


def test_of_a_backlog_the_shortest_prompts_count(tmp_path: Path) -> None:
    path = tmp_path / "backlog.csv"

    def bound(lengths: list[int]) -> float:
        rows = "".join(f"{length},8\n" for length in lengths)
        path.write_text("prompt_tokens,output_tokens\n" + rows)
        config = HybridConfig(be=str(path), duration_s=6.0, margin_s=1.0, capacity_tokens=10_000)
        return best_effort_bound(config) or 0.0

    short = bound([512] * 400)
    assert bound([512] * 400 + [4096] * 400) == pytest.approx(short, rel=0.01)
    assert bound([4096] * 400) < short / 4


def test_an_oracle_gives_up_what_makes_most_late() -> None:
    long = Prompt(0.0, 11.0, 10.0)
    short = [Prompt(1.0 + n, 3.0 + n, 1.0) for n in range(4)]
    assert oracle_schedule([long, *short]) == {1, 2, 3, 4}
    assert oracle_schedule([long._replace(due_s=14.0), *short]) == {0, 1, 2, 3, 4}  # it waits
    late = [Prompt(20.0, 20.5, 1.0), Prompt(20.0, 21.0, 1.0)]
    assert oracle_schedule([long, *late]) == {0, 2}


def _figures(kept: float, goodput: float, tokens: float, of_bound: float) -> dict[str, Figure]:
    values = {"ttft": kept, "gaps": 100.0, "goodput": goodput, "be_tokens": tokens}
    values |= {"be_of_bound": of_bound, "be_bound": 100.0}
    return {name: Figure(value, 0.0) for name, value in values.items()}


def test_the_verdict_compares_with_those_that_keep_as_much() -> None:
    rows = {
        UNIFIED.name: _figures(99.5, 10.0, 90.0, 90.0),
        "late": _figures(10.0, 1.0, 120.0, 120.0),
        "kept": _figures(99.0, 8.0, 60.0, 60.0),
    }
    text = verdict(rows)
    assert "1.25 times the goodput of the best other (kept)" in text
    assert "90.0 % of the bound" in text and "1.50 times those of the best" in text
