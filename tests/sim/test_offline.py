"""The offline simulation: hand-made scenes, its report against a slow count, the rules' order."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from support.grids import choose, every_value

from lightserve.errors import ConfigError
from lightserve.sim.offline import OfflineConfig, run_offline
from lightserve.sim.report import Report
from lightserve.sim.traffic import Workload, load_workload
from lightserve.types import RequestClass


def workload(*rows: tuple[int, int], limit: int = 64) -> Workload:
    prompt, output = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    return Workload(
        prompt, output, np.full(len(rows), limit), ("",) * len(rows), np.zeros(len(rows))
    )


def run(rows: Workload, capacity: int, admission: str = "oracle", **changes: object) -> Report:
    config = OfflineConfig(capacity_tokens=capacity, admission=admission)
    return run_offline(rows, replace(config, **changes))  # type: ignore[arg-type]


def test_one_request_by_hand() -> None:
    """Prompt 10, output 5: the prompt yields the first token, four decode steps the rest."""
    report = run(workload((10, 5)), 100)
    assert (report.decode_steps, report.finished, report.evicted_pct) == (4, 1, 0.0)
    assert report.consumed_pct == pytest.approx(np.mean([11, 12, 13, 14]))
    assert report.future_pct == pytest.approx(15)


def test_two_that_fit_only_one_after_the_other() -> None:
    both = workload((10, 5), (10, 5), limit=6)
    assert run(both, 100).decode_steps == 4
    assert run(both, 25).decode_steps == 8


def test_reckless_admission_evicts_and_still_finishes() -> None:
    rows = workload(*[(10, 40)] * 8)
    oracle = run(rows, 200)
    reckless = run(rows, 200, "aggressive", admission_options={"watermark": 1.0})
    assert oracle.evicted_pct == 0.0 and oracle.recomputed_tokens == 0
    assert reckless.evicted_pct > 0.0 and reckless.recomputed_tokens > 0
    assert reckless.finished == oracle.finished == 8
    assert reckless.future_pct > 100.0 >= oracle.future_pct


def test_the_same_seed_gives_the_same_report() -> None:
    rows = load_workload("dist3", num_requests=20, rng=np.random.default_rng(5))
    reports = [
        replace(run(rows, 60_000, "past-future", seed=seed), cpu_ms_p50=0.0, cpu_ms_p99=0.0)
        for seed in (1, 1, 2)
    ]
    assert reports[0] == reports[1] != reports[2]


@pytest.mark.parametrize(
    ("admission", "changes"),
    every_value(
        ["oracle", "risk", "past-future", "ema", "aggressive"],
        [
            {"paper_artifact": True},
            {"request_class": RequestClass.BE},
            {"num_warm_up": 10, "policy": "chunked"},
            {"num_clients": 9},
        ],
    ),
    ids=str,
)
def test_steps_at_once_change_no_decision(admission: str, changes: dict[str, Any]) -> None:
    """Runs of decode steps and single ones: the same admissions, evictions and times."""
    rng = np.random.default_rng(2)
    spec = "uniform:50-400:5-400"
    rows = load_workload(spec, num_requests=choose(30, 60), rng=rng, arrivals="poisson:2")
    if "num_warm_up" not in changes:
        rows = rows.arriving(np.zeros(len(rows)))
    runs, steps = (
        run(rows, 2500, admission, steps_at_once=at_once, **changes) for at_once in (True, False)
    )
    assert len(runs.timeline) < 0.5 * len(steps.timeline)
    assert runs.evicted_pct > 0 or admission != "aggressive"
    for name, value in asdict(steps).items():
        if not name.startswith(("cpu_", "timeline")):
            assert getattr(runs, name) == pytest.approx(value), name
    assert [p for p in steps.timeline if p in runs.timeline] == list(runs.timeline)


def test_warm_up_rows_are_history_only() -> None:
    rows = load_workload("dist1", num_requests=30, rng=np.random.default_rng(0))
    report = run(rows, 60_000, "risk", num_warm_up=20, request_class=RequestClass.BE)
    assert report.finished == 10


@pytest.mark.parametrize(
    ("spec", "message"),
    [("nowhere.csv.gz", "cannot be read"), ("tests/sim/test_offline.py", "is not a trace")],
)
def test_bad_traces(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_workload(spec, num_requests=1, rng=np.random.default_rng(0))


def test_traces_and_drift() -> None:
    rng = np.random.default_rng(0)
    spec = "bench/traces/servegen_mlarge_day3.csv.gz+dist2"
    rows = load_workload(spec, num_requests=50, rng=rng)
    assert len(rows) == 100 and rows.clients[0] and not rows.clients[99]
    assert set(rows.max_tokens[:50]) == {8192} and set(rows.max_tokens[50:]) == {4096}
    assert rows.output_tokens[50:].max() <= 4096
    assert (
        load_workload("dist2", num_requests=50, rng=rng, cut_outputs=False).output_tokens.max()
        > 4096
    )
