"""The grounds of four papers: who runs there can be made, and the loads are what they say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.scheduling.paper_baselines import LongestWait
from bench.scheduling.paper_figures import COLUMNS, Cell, add_cell, over_seeds, read_cells
from bench.scheduling.paper_loads import (
    LONG_SHARE,
    LONG_TOKENS,
    NUM_DOCUMENTS,
    PEAK_RPS,
    PEAK_S,
    accelgen_load,
    echo_load,
    peak_load,
)
from bench.scheduling.papers import GROUNDS, PRESETS, System, play
from lightserve.sim import HybridConfig
from lightserve.sim.hybrid import HybridRun
from lightserve.sim.traffic import parse_block_ids, read_trace
from tests.support.policy_scenes import (
    Admitting,
    Queue,
    filled,
    make_limits,
    make_request,
    running_of,
)


@pytest.mark.parametrize("name", GROUNDS)
def test_every_system_can_be_made(name: str, tmp_path: Path) -> None:
    load = GROUNDS[name].workload(tmp_path, 0)
    short = {"rt": "poisson:1", "rt_lengths": "uniform:8-8,4-4", "be": None, "be_lengths": None}
    if name in ("bros", "echo", "accelgen", "past-future"):
        assert {preset.name for preset in PRESETS} < {s.name for s in GROUNDS[name].systems}
    names = [system.name for system in GROUNDS[name].systems]
    assert len(set(names)) == len(names)
    for system in GROUNDS[name].systems:
        HybridRun(HybridConfig(**load | system.config() | short))
    assert set(GROUNDS[name].columns) <= set(COLUMNS)


def test_questions_are_about_few_documents(tmp_path: Path) -> None:
    trace = read_trace(Path(echo_load(tmp_path, 0)["be"]))
    assert trace.block_ids is not None
    assert len({parse_block_ids(ids)[0] for ids in trace.block_ids}) == NUM_DOCUMENTS
    assert 6_000 < trace.prompt_tokens.mean() < 10_000


def test_a_third_of_the_mix_is_long_and_each_has_targets_of_its_own(tmp_path: Path) -> None:
    trace = read_trace(Path(accelgen_load(tmp_path, 0)["rt"]))
    assert abs(np.mean(trace.prompt_tokens >= LONG_TOKENS[0]) - LONG_SHARE) < 0.08
    assert trace.slos is not None and len(set(trace.slos)) > 0.9 * len(trace.slos)


def test_chats_peak(tmp_path: Path) -> None:
    times = read_trace(Path(peak_load(tmp_path, 0)["rt"])).arrival_s
    assert times is not None
    is_peak = (times >= PEAK_S[0]) & (times < PEAK_S[1])
    assert is_peak.sum() / (PEAK_S[1] - PEAK_S[0]) == pytest.approx(PEAK_RPS, rel=0.25)
    assert (~is_peak).sum() / 70.0 == pytest.approx(3.0, rel=0.3)


def test_a_run_is_kept(tmp_path: Path) -> None:
    short = {"duration_s": 14.0, "margin_s": 2.0}
    system = System("echo", "echo", load=short)
    cell = play("echo-peak", system, 0)
    assert cell.figures["be"] > 0
    path = tmp_path / "cells.jsonl"
    add_cell(path, cell)
    add_cell(path, Cell("echo-peak", "echo", 1, cell.figures))
    cells = read_cells(path)
    assert cells["echo-peak", "echo", 0] == cell and len(cells) == 2
    both = over_seeds(list(cells.values()))
    assert both["be"] == (pytest.approx(cell.figures["be"]), 0.0)


@pytest.mark.parametrize(
    ("last_s", "in_flight", "expected"),
    [
        ((9.0, 9.0), (0, 0), [5]),  # a prompt that came at 5 has waited longer
        ((4.0, 9.0), (0, 0), [2, 3]),  # a decode has, and all decodes go together
        ((4.0, 9.0), (1, 0), [5]),  # it is in the step before
    ],
)
def test_what_has_waited_longest_goes_on_first(
    last_s: tuple[float, float], in_flight: tuple[int, int], expected: list[int]
) -> None:
    running = running_of([make_request(3, output=1), make_request(2, output=1)])
    running.table.last_s[running.rows] = last_s[::-1]
    running.table.inflight_steps[running.rows] = in_flight[::-1]
    limits = make_limits(max_num_batched_tokens=10, num_free_rows=4, start_s=10.0)
    waiting = Queue([make_request(5, prompt=6)])
    step = filled(LongestWait(), running, waiting, limits, Admitting())
    assert [request.key.request_id for request, _ in step.budget.parts] == expected
