"""What takes virtual time: the router, and steps as widely spread as their profile was wrong."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import numpy as np
import pytest
from support.core_scenes import MAX_LEN, MAX_SEQS, NUM_SLOTS, Arrival, make_core, submit

from bench.scheduling.router_times import table
from lightserve import sim
from lightserve.cost.profile import SCHEMA_VERSION, ProfileKey, StepProfile, save_profile
from lightserve.errors import ConfigError
from lightserve.messages.common import DeviceFacts, StepCoefficients
from lightserve.router.events import FromFrontend, WorkersReady
from lightserve.router.step import PlannedStep
from lightserve.sim.hybrid import HybridRun
from lightserve.sim.report import STEP_TARGET_MS, steps_report
from lightserve.sim.simulation import (
    ROUTER_PROMPT_S,
    ROUTER_STEP_S,
    Outcome,
    Simulation,
    TimedEvent,
)
from lightserve.sim.traffic import parse_traffic
from lightserve.sim.worker import SimulatedWorker, WorkSums
from lightserve.types import FrontendId, RequestClass

STEP_S = 0.01


def play(factor: float, *times_s: float) -> list[Outcome]:
    """Run requests of one token that come at these times; each step takes `STEP_S`."""
    worker = SimulatedWorker(num_slots=NUM_SLOTS, max_num_seqs=MAX_SEQS, max_model_len=MAX_LEN)
    simulation = Simulation(
        make_core("chunked"),
        worker,
        lambda _plan: STEP_S,
        WorkersReady(NUM_SLOTS),
        router_time_factor=factor,
    )
    arrivals = [Arrival(time_s, 4, 1, 1) for time_s in times_s]
    simulation.run(
        [
            TimedEvent(a.time_s, FromFrontend(FrontendId(0), submit(number, a)))
            for number, a in enumerate(arrivals)
        ]
    )
    return list(simulation.outcomes.values())


class TestRouterTime:
    PLAN_S = ROUTER_STEP_S + ROUTER_PROMPT_S

    def test_a_plan_leaves_when_the_router_has_made_it(self) -> None:
        (free,), (charged,) = play(0.0, 1.0), play(10.0, 1.0)
        assert free.token_times_s == [pytest.approx(1.0 + STEP_S)]
        assert charged.token_times_s == [pytest.approx(1.0 + 10 * self.PLAN_S + STEP_S)]

    def test_what_comes_while_it_plans_is_heard_afterwards_but_was_sent_before(self) -> None:
        busy_s = 10 * self.PLAN_S
        _, second = play(10.0, 1.0, 1.0 + busy_s / 2)
        assert second.arrival_s == pytest.approx(1.0 + busy_s / 2)
        # Its plan is made at once after the first one's, while that runs: it starts at its end.
        assert second.token_times_s == [pytest.approx(1.0 + busy_s + 2 * STEP_S)]

    def test_a_router_slower_than_steps_leaves_the_worker_idle(self) -> None:
        slow = play(40.0, *[1.0] * 12)
        fast = play(0.0, *[1.0] * 12)
        assert max(o.token_times_s[0] for o in slow) > max(o.token_times_s[0] for o in fast) + 0.02


SMALL = sim.HybridConfig(
    rt="poisson:4",
    rt_lengths="uniform:10-200,5-40",
    be="batch:6",
    be_lengths="uniform:100-300,20-60",
    duration_s=8.0,
    margin_s=1.0,
    capacity_tokens=4000,
)


def test_a_run_charges_its_router_unless_told_otherwise() -> None:
    """Requests of one token, each alone: plan and step follow one another."""
    alone = dataclasses.replace(
        SMALL, be=None, be_lengths=None, rt="poisson:1", rt_lengths="uniform:100-100,1-1", noise=0.0
    )
    free = sim.run_hybrid(dataclasses.replace(alone, router_time_factor=0.0)).rt.ttft_ms_p50
    charged = sim.run_hybrid(alone).rt.ttft_ms_p50
    assert free is not None and charged is not None
    assert charged - free == pytest.approx(1e3 * (ROUTER_STEP_S + ROUTER_PROMPT_S))


def test_a_batch_comes_again_when_all_of_it_is_done() -> None:
    run = HybridRun(dataclasses.replace(SMALL, rt=None, rt_lengths=None))
    run.advance(SMALL.duration_s)
    outcomes = list(run.simulation.outcomes.values())
    assert len(outcomes) >= 12 and len(outcomes) % 6 == 0
    for start in range(6, len(outcomes), 6):
        ends = {max(o.token_times_s) for o in outcomes[start - 6 : start]}
        assert {o.arrival_s for o in outcomes[start : start + 6]} == {max(ends)}


def test_a_batch_needs_a_size_and_lengths() -> None:
    for spec, lengths in (("batch:0", "uniform:8-8,4-4"), ("batch:4", None)):
        with pytest.raises(ConfigError, match="--be"):
            parse_traffic(spec, lengths, request_class=RequestClass.BE, max_tokens=None)


def test_steps_of_a_profile_vary_as_much_as_it_was_wrong(tmp_path: Path) -> None:
    cost = StepCoefficients(1e-2, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    key = ProfileKey("a", "float32", "cpu", 1, 1, "default")
    path = tmp_path / "profile.json"
    save_profile(StepProfile(SCHEMA_VERSION, "0", "m", key, cost, 8, 50, 0.1, 0.3), path)
    hardware = sim.ProfiledHardware.read(path)
    assert hardware.spread == pytest.approx(0.1 / 0.6745, rel=1e-3)
    assert hardware.server_budget == 512
    run = HybridRun(dataclasses.replace(SMALL, hardware=hardware))
    run.advance(SMALL.duration_s)
    ratios = np.log(np.array(run.worker.sums.step_s) / 1e-2)
    assert np.median(np.abs(ratios)) == pytest.approx(0.1, rel=0.25)


def test_a_profile_of_a_gpu_has_a_gpus_budget(tmp_path: Path) -> None:
    facts = DeviceFacts("cuda", "A card", 1 << 34, "550", "12.4", "2.6", "3.1", "triton")
    key = ProfileKey("a", "float32", facts.summary, 1, 1, "default")
    cost = StepCoefficients(1e-2, 0.0, 1e-3, 0.0, 0.0, 0.0, 0.0, 0.0)
    profile = StepProfile(SCHEMA_VERSION, "0", "m", key, cost, 8, 50, 0.1, 0.3)
    path = tmp_path / "profile.json"
    save_profile(profile, path)
    assert sim.ProfiledHardware.read(path).server_budget == 8192
    on_cpu = msgspec.structs.replace(key, device="A processor")
    save_profile(msgspec.structs.replace(profile, key=on_cpu), path)
    assert sim.ProfiledHardware.read(path).server_budget == 256


def test_the_log_of_a_run_that_fails_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[HybridRun] = []

    def close(run: HybridRun) -> None:
        closed.append(run)

    def fail(_seconds: float) -> None:
        raise RuntimeError

    monkeypatch.setattr(HybridRun, "close", close)
    config = dataclasses.replace(SMALL, decision_log=str(tmp_path / "log.jsonl"))
    with pytest.raises(RuntimeError):
        sim.run_hybrid(config, progress=fail)
    assert len(closed) == 1


def test_how_large_steps_are_and_what_they_use() -> None:
    sums = WorkSums(num_tokens=1100, busy_s=2.0)
    sums.step_s.extend([0.1, 0.2, 0.15])
    sums.step_tokens.extend([100, 900, 100])
    report = steps_report(sums, per_token_s=1e-3, stop_s=4.0)
    assert report.tokens_mean == pytest.approx(1100 / 3)
    assert report.short_pct == pytest.approx(200 / 3), f"two of at most {STEP_TARGET_MS} ms"
    assert (report.busy_pct, report.compute_pct) == (pytest.approx(50.0), pytest.approx(27.5))
    assert report.ms_p50 == pytest.approx(150.0)


def test_a_router_takes_what_a_table_says_of_steps_of_as_many_rows(tmp_path: Path) -> None:
    path = tmp_path / "times.csv"
    path.write_text("rows,ms\n1,2\n11,4\n")
    times = sim.RouterTimes.read(path)

    def step(num_rows: int) -> PlannedStep:
        return cast("PlannedStep", SimpleNamespace(decodes=range(num_rows - 1), chunks=[None]))

    assert [times(step(n)) for n in (1, 6, 99)] == pytest.approx([0.002, 0.003, 0.004])
    config = sim.HybridConfig(
        rt="poisson:2",
        rt_lengths="uniform:64-64,8-8",
        duration_s=12.0,
        margin_s=1.0,
        router_times=times,
        noise=0.0,
    )
    slow = sim.run_hybrid(config)
    fast = sim.run_hybrid(dataclasses.replace(config, router_times=sim.RouterTimes([1.0], [0.0])))
    assert slow.rt.ttft_ms_p50 is not None and fast.rt.ttft_ms_p50 is not None
    assert slow.rt.ttft_ms_p50 == pytest.approx(fast.rt.ttft_ms_p50 + 2.0, abs=0.5)


@pytest.mark.parametrize(
    "text", ["", "rows,ms\n", "rows,ms\n2,1\n1,1\n", "rows,ms\n1,x\n", "a\n1\n"]
)
def test_a_table_of_router_times_is_checked(tmp_path: Path, text: str) -> None:
    path = tmp_path / "times.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match="--router-times"):
        sim.RouterTimes.read(path)


def test_measured_router_times_ascend_by_rows() -> None:
    rows = [*range(100), *range(100)]
    found = table(rows, [0.001 * n for n in rows])
    assert [n for n, _ in found] == sorted({n for n, _ in found}) and len(found) == 10
    assert all(abs(ms - n) <= 1.0 for n, ms in found)
