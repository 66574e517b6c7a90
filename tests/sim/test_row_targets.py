"""Targets of requests' own, as the rows of a trace have them; closed loops of real-time clients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lightserve.errors import ConfigError
from lightserve.loadtest.options import ArrivalKind, Traffic
from lightserve.loadtest.options import Targets as ClientTargets
from lightserve.loadtest.workload import make_plan
from lightserve.sim import HybridConfig, Targets, run_hybrid
from lightserve.sim.hybrid import HybridRun
from lightserve.sim.report import Seen, Window, class_report
from lightserve.sim.traffic import read_trace
from lightserve.types import SLO, RequestClass

HEAD = "t,prompt_tokens,output_tokens,ttft_ms,tpot_ms,completion_s\n"
ROWS = "0,40,6,900,,\n1,40,6,,,30\n2,40,6,,,\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(HEAD + ROWS)
    return path


def test_a_trace_has_them_by_row(trace: Path) -> None:
    assert read_trace(trace).slos == [SLO(ttft_ms=900.0), SLO(completion_s=30.0), SLO()]
    trace.write_text("prompt_tokens,output_tokens\n4,4\n")
    assert read_trace(trace).slos is None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("0,40,6,0,,\n", "needs targets above 0"),
        ("0,40,6,nan,,\n", "needs targets above 0"),
        ("0,40,6,soon,,\n", "is not a trace: could not convert"),
        ("0,40,6,900,,30\n", "completion_s and another target"),
        ("0,40,6,,,\nnan,40,6,,,\n", "trace.csv, row 2: column t must be a finite .*got 'nan'"),
        ("inf,40,6,,,\n", "row 1: column t must be a finite .*got 'inf'"),
    ],
)
def test_wrong_ones_are_refused(trace: Path, row: str, message: str) -> None:
    trace.write_text(HEAD + row)
    with pytest.raises(ConfigError, match=message):
        read_trace(trace)


def test_each_request_is_judged_by_its_own() -> None:
    """The first and the second take as long; the third has those of its class."""
    times = [1.5, 1.7]
    requests = [
        Seen(1.0, 2, times, True, targets=Targets(ttft_s=0.4)),
        Seen(1.0, 2, times, True, targets=Targets(ttft_s=0.6)),
        Seen(1.0, 2, times, True),
        Seen(1.0, 2, times, True, targets=Targets(completion_s=0.9)),
    ]
    report = class_report(
        requests, Targets(tpot_s=0.1), Window(0.0, 2.0, 3.0), evictions=0, recomputed_tokens=0
    )
    assert report.ttft_attainment == 0.5
    assert (report.tpot_attainment, report.completion_attainment) == (0.0, 1.0)
    assert report.goodput_rps == 1.0  # two of four, in two seconds


def test_the_router_is_told(trace: Path) -> None:
    run = HybridRun(HybridConfig(rt=str(trace), duration_s=5.0, margin_s=0.5))
    sent = [timed.event.message.slo for timed in run._events]  # type: ignore[union-attr]
    assert sent == [SLO(ttft_ms=900.0), SLO(completion_s=30.0), SLO()]
    run.advance(5.0)
    report = run.report()
    assert report.rt.arrivals == 2
    assert (report.rt.ttft_attainment, report.rt.completion_attainment) == (None, 1.0)


def test_real_time_clients_in_a_closed_loop() -> None:
    """One after the other: as many requests as answers, and one in flight."""
    report = run_hybrid(
        HybridConfig(
            rt="closed:1", rt_lengths="uniform:8-8,4-4", duration_s=3.0, margin_s=0.5, noise=0.0
        )
    )
    assert report.rt.arrivals > 20
    assert abs(report.rt.arrivals - 2.0 * report.rt.throughput_rps) <= 1.0
    assert report.kv.consumed_pct < 0.1


def test_the_load_client_sends_and_judges_by_them(trace: Path) -> None:
    traffic = Traffic(trace=str(trace), arrivals=ArrivalKind.TRACE)
    plan = make_plan(traffic, np.random.default_rng(0))
    assert plan.targets == (
        ClientTargets(ttft_ms=900.0),
        ClientTargets(e2el_ms=30_000.0),
        ClientTargets(),
    )
    assert traffic.targets_of(RequestClass.RT) == ClientTargets()
