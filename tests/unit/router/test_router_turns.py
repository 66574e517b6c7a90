"""What clients can make a turn of the router's loop do, counted in calls."""

from __future__ import annotations

from typing import Any

import pytest
from support.core_scenes import Arrival, make_core, pack_results, submit

from lightserve.messages.router_worker import (
    RowResult,
    StepPlan,
    plan_rows,
)
from lightserve.router.events import FromFrontend, WorkersReady
from lightserve.router.kv import prefix_tree
from lightserve.router.kv.cache import KVStore
from lightserve.router.kv.prefix_node import common_len, task_aware
from lightserve.router.planner import MAX_NEWCOMERS
from lightserve.router.scheduler import Scheduler
from lightserve.router.step import PlannedStep
from lightserve.types import NO_SLO, SLO, FrontendId, RequestClass

FRONTEND = FrontendId(0)


def _send(
    core: Scheduler,
    number: int,
    prompt: list[int],
    request_class: RequestClass = RequestClass.RT,
    max_tokens: int = 2,
    **fields: Any,
) -> None:
    arrival = Arrival(0.0, len(prompt), 2, max_tokens, request_class=request_class)
    message = submit(number, arrival, prompt=prompt, **fields)
    assert core.on_message(FromFrontend(FRONTEND, message), 1.0) == []


def _step(core: Scheduler) -> StepPlan:
    planned = core.plan(1.0)
    assert isinstance(planned, PlannedStep)
    return core.commit(planned, 1.0)


def _finish(core: Scheduler, plan: StepPlan) -> None:
    rows = [RowResult(row.row, [7]) for row in plan_rows(plan) if row.output]
    core.on_result(pack_results(plan, rows, exec_s=0.01), 1.0)


@pytest.mark.parametrize("slo", [NO_SLO, SLO(ttft_ms=60_000.0)])
def test_waiting_on_a_deep_path_costs_a_plan_little(
    slo: SLO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts branch off after each token of one that all of 200 others begin with.

    A plan looks up those that may start, and where targets are to be weighed a few dozen; in no
    case does it compare the tokens of a prompt again, which was 0.7 ms for each of these.
    """
    prompt = list(range(100, 160))
    core = make_core("unified", cache_order=task_aware, max_num_seqs=4, budget=4096)
    core.on_message(WorkersReady(100_000, 0), 1.0)
    for number in range(1, 60):
        _send(core, number, [*prompt[:number], 1000 + number])
    while core._requests:
        _finish(core, _step(core))
    for number in range(200):
        _send(core, 100 + number, [*prompt, 2000 + number], slo=slo)
    _step(core)
    looked_up: list[object] = []
    compared: list[int] = []

    def look_up(kv: KVStore, request: Any) -> Any:
        looked_up.append(request)
        return plain_look_up(kv, request)

    def compare(first: Any, second: Any) -> int:
        compared.append(len(first))
        return common_len(first, second)

    plain_look_up = KVStore.look_up
    monkeypatch.setattr(KVStore, "look_up", look_up)
    monkeypatch.setattr(prefix_tree, "common_len", compare)
    core.plan(2.0)
    assert not compared
    assert len(looked_up) <= (64 + 8 if slo.ttft_ms else 8)


@pytest.mark.parametrize("request_class", list(RequestClass))
def test_few_begin_in_one_step(request_class: RequestClass) -> None:
    """However many rows are free, and whether or not they were free before."""
    core = make_core("unified", max_num_seqs=200, budget=4096, cache_order=task_aware)
    core.on_message(WorkersReady(100_000, 0), 1.0)
    for number in range(100):
        _send(core, number, [100 + number, 7], request_class=request_class)
    nums = []
    while core._requests:
        plan = _step(core)
        nums.append(len(plan.sequences))
        _finish(core, plan)
    assert max(nums) == MAX_NEWCOMERS and sum(nums) == 100


def test_few_take_the_rows_of_others_in_one_step() -> None:
    core = make_core("unified", max_num_seqs=60, budget=4096, cache_order=task_aware)
    core.on_message(WorkersReady(100_000, 100_000), 1.0)
    for number in range(60):
        _send(core, number, [100 + number, 7], request_class=RequestClass.BE, max_tokens=50)
    for _ in range(2):
        _finish(core, _step(core))
    for number in range(100, 160):
        _send(core, number, [100 + number, 7])
    plan = _step(core)
    assert len(plan.sequences) == MAX_NEWCOMERS
    _finish(core, plan)
    num_running = {c: load.num_running for c, load in core.status(1.0).load.items()}
    assert num_running == {RequestClass.RT: MAX_NEWCOMERS, RequestClass.BE: 60 - MAX_NEWCOMERS}
