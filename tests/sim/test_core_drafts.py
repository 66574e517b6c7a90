"""The core with drafts on simulated workers: KV, ends, accounts, and the time that they win."""

from __future__ import annotations

import functools

import pytest
import test_core_properties as properties
from support.drafted import force_drafts
from support.grids import choose, every_value

from lightserve.messages.router_worker import StepPlan, StepResult
from lightserve.router.policies import POLICIES
from lightserve.router.scheduler import Scheduler
from lightserve.router.step import PlannedStep, WaitUntil
from lightserve.sim.hybrid import HybridConfig, run_hybrid
from lightserve.sim.worker import SimulatedWorker


class Guessing(SimulatedWorker):
    """Has some guesses right, and counts them."""

    num_verified = 0

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes, acceptance=0.6)

    def execute(self, plan: StepPlan, *, exec_s: float, idle_s: float) -> StepResult:
        result = super().execute(plan, exec_s=exec_s, idle_s=idle_s)
        Guessing.num_verified += result.num_verified
        return result


@pytest.mark.parametrize(
    ("policy", "store"), every_value(sorted(POLICIES), sorted(properties.STORES))
)
def test_all_requests_end(policy: str, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every number of drafts that may be, while memory runs out and workers die.

    `SimulatedWorker` refuses a plan that reads KV of a guess that was wrong.
    """
    make_core = properties.make_core
    monkeypatch.setattr(properties, "SimulatedWorker", Guessing)
    Guessing.num_verified = 0
    for seed in range(choose(3, 9)):
        monkeypatch.setattr(
            properties,
            "make_core",
            lambda *args, seed=seed, **kwargs: force_drafts(
                make_core(*args, **kwargs), seed, most=(8, 3, 1)[seed % 3]
            ),
        )
        scene = properties.Scene(seed, policy, properties.STORES[store], properties.ODD_SLOTS)
        scene.run(1000)
        for arrival, outcome in zip(scene.arrivals, scene.outcomes, strict=True):
            if outcome.error is None:
                assert outcome.finish_reason is not None
                properties.check_outcome(arrival, outcome)
        assert scene.core.num_used_slots == 0
    assert (Guessing.num_verified > 50) == (store != "exclusive")


@functools.cache
def tokens_per_s(rt: str, acceptance: float | None, duration_s: float = 20.0) -> float:
    """Return what virtual hardware makes; `acceptance` None: without drafts."""
    config = HybridConfig(
        rt=rt,
        rt_lengths="uniform:100-400,100-300",
        duration_s=duration_s,
        margin_s=duration_s / 5,
        draft_acceptance=acceptance or 0.0,
        serve_options={} if acceptance is None else {"speculation": "ngram"},
        checks_kv=acceptance is not None,
    )
    return run_hybrid(config).rt.throughput_tps


@pytest.mark.parametrize(("acceptance", "least"), [(0.0, 0.98), (0.3, 1.05), (0.9, 1.9)])
def test_a_lone_stream(acceptance: float, least: float) -> None:
    assert tokens_per_s("closed:1", acceptance) > least * tokens_per_s("closed:1", None)


@pytest.mark.parametrize("acceptance", [0.0, 0.9])
@pytest.mark.parametrize("num_streams", [16, 150])
def test_many_streams_lose_nothing(num_streams: int, acceptance: float) -> None:
    """Where steps are bound by weights they win, where by computing there are next to no drafts."""
    rt = f"closed:{num_streams}"
    assert tokens_per_s(rt, acceptance) > 0.98 * tokens_per_s(rt, None)


@pytest.mark.parametrize("acceptance", [0.0, 0.6])
def test_a_step_may_be_planned_twice(acceptance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same drafts; nothing that planning knows of them changes before it is sent."""
    plan, num_drafts = Scheduler.plan, []

    def plan_twice(self: Scheduler, now_s: float) -> PlannedStep | WaitUntil:
        first, second = plan(self, now_s), plan(self, now_s)
        if isinstance(first, PlannedStep):
            assert isinstance(second, PlannedStep)
            drafts = first.decodes.drafts.tolist()
            assert second.decodes.drafts.tolist() == drafts
            num_drafts.append(sum(drafts))
        return second

    monkeypatch.setattr(Scheduler, "plan", plan_twice)
    tokens_per_s("closed:3", acceptance, 10.0)
    assert any(num_drafts) and not all(num_drafts)
