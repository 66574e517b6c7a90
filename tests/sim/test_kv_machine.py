"""Allocator, prefix tree, host ranges and queues under random moves, through the real core.

The simulated worker stands for the tensors: it keeps a hash of the prefix in every slot of the
pool and of the host, so a token read from the wrong place, before it was loaded, or after it was
overwritten, is an error. The invariants of architecture 6 are checked after every move.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from functools import partial
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.core_scenes import (
    MAX_LEN,
    MAX_SEQS,
    NUM_SLOTS,
    Arrival,
    RecklessAdmission,
    check_outcome,
    events_of,
    make_core,
    make_simulation,
    submit,
)
from support.grids import choose, more_when_long

from lightserve import sim
from lightserve.messages.common import StepCoefficients
from lightserve.messages.frontend_router import Abort
from lightserve.messages.router_worker import StepPlan
from lightserve.router.events import FromFrontend, WorkersGone, WorkersReady
from lightserve.router.kv.cache import KVOptions, KVStore, Preemption
from lightserve.router.kv.prefix_node import MAX_DEPTH, least_recently_used, task_aware
from lightserve.router.kv.prefix_tree import PrefixTree
from lightserve.router.queue import OLDEST_EVERY
from lightserve.router.request import Request
from lightserve.router.step import PlannedStep, Reason
from lightserve.sim.hybrid import HybridRun
from lightserve.sim.simulation import Outcome
from lightserve.sim.traffic import DrawnTraffic
from lightserve.sim.virtual_gpus import A100_LLAMA2_7B, VirtualHardware
from lightserve.sim.worker import SimulatedWorker
from lightserve.types import FrontendId, RequestClass, RequestId, RequestKey

FRONTEND = FrontendId(0)
BUDGET = 24
SLOW_LINK = StepCoefficients(0.01, 1.0, 1e-4, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, per_loaded_token_s=2e-3)
"""Beside a step, four or five tokens come back from the host."""

kv_options = st.builds(
    KVOptions,
    cache_order=st.sampled_from([None, task_aware, least_recently_used]),
    block_size=st.sampled_from([1, 2, 4, 8, 16]),
    preemption=st.sampled_from(list(Preemption)),
    rt_cache_min_tokens=st.sampled_from([0, 30]),
)


class KVMachine(RuleBasedStateMachine):
    """Arrivals, aborts, deaths and steps in any order; steps may be one ahead."""

    @initialize(
        options=kv_options,
        policy=st.sampled_from(["priority", "unified", "chunked", "fcfs"]),
        num_host_slots=st.sampled_from([0, 24, 200]),
        step_cost=st.sampled_from([None, SLOW_LINK, SLOW_LINK]),
        overlaps_copies=st.sampled_from([True, True, False]),
    )
    def start(
        self,
        options: KVOptions,
        policy: str,
        num_host_slots: int,
        step_cost: StepCoefficients | None,
        overlaps_copies: bool,
    ) -> None:
        self.options, self.num_host_slots = options, num_host_slots
        self.step_cost, self.overlaps_copies = step_cost, overlaps_copies
        self.core = make_core(policy, budget=BUDGET, admission=RecklessAdmission(), kv=options)
        self.is_class_aware = policy in ("priority", "unified")
        self.arrivals: dict[RequestKey, Arrival] = {}
        self.outcomes: dict[RequestKey, Outcome] = {}
        self.sent: deque[StepPlan] = deque()
        self.now_s = 0.0
        self.restart()

    max_depth = MAX_DEPTH
    """Of the prefix tree."""

    def restart(self) -> None:
        self.worker = SimulatedWorker(
            num_slots=NUM_SLOTS,
            max_num_seqs=MAX_SEQS,
            max_model_len=MAX_LEN,
            num_host_slots=self.num_host_slots,
        )
        ready = WorkersReady(NUM_SLOTS, self.num_host_slots, self.step_cost, self.overlaps_copies)
        shallow = partial(PrefixTree, max_depth=self.max_depth)
        with patch("lightserve.router.kv.cache.PrefixTree", shallow):
            self.tell(ready)

    def tell(self, event: FromFrontend | WorkersReady | WorkersGone) -> None:
        self.take_in(self.core.on_message(event, self.now_s))

    def take_in(self, news: list) -> None:  # type: ignore[type-arg]
        for outgoing in news:
            for delta in outgoing.message.each():
                outcome = self.outcomes[RequestKey(outgoing.frontend_id, delta.request_id)]
                assert outcome.finish_reason is None, "news after the end"
                outcome.token_ids.extend(delta.token_ids)
                outcome.finish_reason, outcome.error = delta.finish_reason, delta.error

    @rule(
        num_prompt=st.integers(1, 40),
        num_output=st.integers(1, 24),
        is_rt=st.booleans(),
        family=st.none() | st.integers(0, 1),
    )
    def arrive(self, num_prompt: int, num_output: int, is_rt: bool, family: int | None) -> None:
        number = len(self.arrivals)
        request_class = RequestClass.RT if is_rt else RequestClass.BE
        arrival = Arrival(
            0.0, num_prompt, num_output, 24, request_class=request_class, family=family
        )
        key = RequestKey(FRONTEND, RequestId(number))
        self.arrivals[key], self.outcomes[key] = arrival, Outcome(self.now_s)
        self.tell(FromFrontend(FRONTEND, submit(number, arrival)))

    @rule(
        count=st.integers(2, 8),
        num_prompt=st.integers(10, 40),
        num_output=st.integers(8, 24),
        is_rt=st.booleans(),
        family=st.none() | st.integers(0, 1),
    )
    def burst(
        self, count: int, num_prompt: int, num_output: int, is_rt: bool, family: int | None
    ) -> None:
        for _ in range(count):
            self.arrive(num_prompt, num_output, is_rt, family)

    @rule(choice=st.integers(0, 1000))
    def abort(self, choice: int) -> None:
        alive = [key for key, o in self.outcomes.items() if o.finish_reason is None]
        if alive:
            key = alive[choice % len(alive)]
            del self.outcomes[key]
            self.tell(FromFrontend(FRONTEND, Abort(request_id=key.request_id)))

    @rule(choice=st.integers(0, 30))
    def die(self, choice: int) -> None:
        if choice == 0:
            self.sent.clear()
            self.tell(WorkersGone())
            self.restart()

    @rule(num_steps=st.integers(1, 12))
    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.send()
            self.answer()
            self.agrees()

    @rule()
    def send(self) -> None:
        self.now_s += 1.0
        while isinstance(step := self.core.plan(self.now_s), PlannedStep):
            self.check_victims(step)
            self.check_loads(step)
            self.sent.append(self.core.commit(step, self.now_s))

    @precondition(lambda self: self.sent)
    @rule()
    def answer(self) -> None:
        if self.sent:
            result = self.worker.execute(self.sent.popleft(), exec_s=0.01, idle_s=0.0)
            self.take_in(self.core.on_result(result, self.now_s))

    def check_victims(self, step: PlannedStep) -> None:
        """Invariants 3 and 6: real-time goes last, and only for a more senior one."""
        moved = {request for request, _ in step.scheduled}
        is_alone = bool(self.core._suspects)  # one that may have killed workers
        is_full = sum(count for _, count in step.scheduled) >= BUDGET
        if self.is_class_aware and not is_full and not is_alone:
            stuck = [
                request
                for request in self.core.running
                if request.request_class is RequestClass.RT
                and request.num_schedulable_tokens
                and request not in moved
                and request not in step.paused
            ]
            assert not stuck or self.num_left_of_best_effort(step) <= 0, "stuck beside memory"
        losers = {*step.paused, *step.preempted, *(request for request, _ in step.checkpointed)}
        assert not moved & losers, "takes part and loses"
        if not losers:
            return
        assert not step.paused or not self.sent, "paused on a guess"
        assert moved, "a request loses for none"
        if not self.is_class_aware:
            return
        if any(r.request_class is RequestClass.RT for r in losers):
            assert self.num_left_of_best_effort(step) <= 0

    def check_loads(self, step: PlannedStep) -> None:
        """A request that loads beside a step is paused, stays so, and loses nothing in it."""
        moved = {request for request, _ in step.scheduled}
        losers = {*step.paused, *step.preempted, *(request for request, _ in step.checkpointed)}
        loading = {request for request, _ in step.loaded}
        assert len(loading) == len(step.loaded) and not loading & (moved | losers)
        assert moved or not loading, "a step of copies alone"
        for request, num_tokens in step.loaded:
            assert request.is_paused and 0 < num_tokens <= step.found[request].num_loaded
            assert (request, Reason.LOADING) in step.left_out.each()

    def holders(self) -> list[Request]:
        return self.core._planner.holders()

    def num_left_of_best_effort(self, step: PlannedStep) -> int:
        """Slots that best-effort requests could lose besides what the step takes from them."""
        kv = self.core._kv
        assert kv is not None
        best_effort = [r for r in self.holders() if r.request_class is RequestClass.BE]
        kept = [r for r in best_effort if r not in step.preempted]
        taken = sum(count for r, count in step.checkpointed if r in kept)
        return kv.num_freed_by([*step.preempted, *kept]) - kv.num_freed_by(step.preempted) - taken

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "core"):
            return
        self.core.check_integrity()
        assert self.core._waiting.num_since_oldest < OLDEST_EVERY

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for _ in range(3000):
            if not any(o.finish_reason is None for o in self.outcomes.values()):
                break
            self.send()
            self.answer()
        for key, outcome in self.outcomes.items():
            if outcome.error is None:
                check_outcome(self.arrivals[key], outcome)
        while self.sent:
            self.answer()
        kv = self.core._kv
        assert kv is not None
        assert kv.num_used == 0
        assert kv.checkpoints.num_used == 0
        counters = self.core.counters.values()
        assert all(c.saved_tokens <= c.taken_tokens for c in counters)


TestKV = more_when_long(KVMachine.TestCase)
TestKV.settings = settings(
    max_examples=choose(25, 300),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


class ShallowKVMachine(KVMachine):
    """Prompts of a family end and branch off everywhere; hardly any of that fits into the tree."""

    max_depth = 2


TestShallowKV = more_when_long(ShallowKVMachine.TestCase)
TestShallowKV.settings = settings(TestKV.settings, max_examples=choose(8, 40))


# Best-effort requests start while the host has room for what could be taken from them.

CONFIG = sim.HybridConfig(
    rt="poisson:14",
    rt_lengths="uniform:10-200,20-100",
    rt_max_tokens=100,
    be="closed:40",
    be_lengths="uniform:200-400,20-60",
    duration_s=12.0,
    margin_s=0.0,
    capacity_tokens=4000,
    host_kv_tokens=1000,
)


@more_when_long
def test_little_is_computed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without regard to the host it is full of copies when more is taken, which is lost then."""
    config = dataclasses.replace(CONFIG, duration_s=choose(8.0, 12.0))
    with_regard = sim.run_hybrid(config)
    monkeypatch.setattr(KVStore, "saves", False)
    without = sim.run_hybrid(config)
    assert without.kv.recomputed_tokens > 200
    assert with_regard.kv.recomputed_tokens < 0.2 * without.kv.recomputed_tokens


def test_best_effort_work_does_not_wait_until_real_time_memory_was_seen() -> None:
    """Two small real-time requests per second leave nearly all of the pool to be taken from none.

    Counted as the whole pool until they had been seen for two windows, they left best-effort
    requests half of their work for half a minute.
    """
    light = dataclasses.replace(
        CONFIG, rt="poisson:2", rt_lengths="uniform:10-100,5-30", duration_s=5.0
    )
    ample, small = (
        sim.run_hybrid(dataclasses.replace(light, host_kv_tokens=num_slots)).be.throughput_tps
        for num_slots in (2 * CONFIG.capacity_tokens, 1000)
    )
    assert small >= 0.8 * ample


# Ways to take memory from best-effort requests: what they have in common, and what they do.

WAYS: dict[str, dict[str, int | str]] = {
    "two-ended 16, checkpoint": {"block_size": 16, "preemption": "checkpoint"},
    "B = 1, checkpoint": {"block_size": 1, "preemption": "checkpoint"},
    "two-ended 16, recompute": {"block_size": 16, "preemption": "recompute"},
    "exclusive 16, recompute": {
        "block_size": 16,
        "block_owner": "exclusive",
        "preemption": "recompute",
    },
}


@pytest.fixture(scope="module")
def reports() -> dict[str, sim.HybridReport]:
    """Return a short run of each way, memory so short that best-effort requests are paused."""
    config = sim.HybridConfig(
        rt="poisson:4",
        rt_lengths="bench/traces/sharegpt_lengths.csv.gz",
        be="closed:256",
        be_lengths="uniform:512-1024,32-128",
        duration_s=10.0,
        margin_s=1.0,
        capacity_tokens=7000,
        policy="priority",
        targets=sim.Targets(ttft_s=0.4, tpot_s=0.2, mtpot_s=0.2),
    )
    found = {}
    for way, options in WAYS.items():
        given = options | {"cache_policy": "off"}
        found[way] = sim.run_hybrid(dataclasses.replace(config, serve_options=given))
    return found


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


# `recomputed_tokens` is what the workers computed twice, whatever the reason.

TIGHT = sim.HybridConfig(
    rt="poisson:12",
    rt_lengths="uniform:10-200,5-80",
    rt_max_tokens=100,
    be="closed:30",
    be_lengths="uniform:100-300,20-60",
    duration_s=6.0,
    margin_s=1.0,
    capacity_tokens=2500,
    policy="priority",
)
SLOW_COPIES = dataclasses.replace(A100_LLAMA2_7B, per_copied_token_s=2e-3)


@pytest.mark.parametrize(
    ("preemption", "host_kv_tokens", "hardware"),
    [
        pytest.param("recompute", -1, A100_LLAMA2_7B, id="nothing is saved"),
        pytest.param("checkpoint", -1, SLOW_COPIES, id="loading is slower"),
        pytest.param("checkpoint", 100, A100_LLAMA2_7B, id="the host is full"),
    ],
)
def test_computed_twice(preemption: str, host_kv_tokens: int, hardware: VirtualHardware) -> None:
    run = HybridRun(
        dataclasses.replace(
            TIGHT,
            host_kv_tokens=host_kv_tokens,
            hardware=hardware,
            serve_options={"preemption": preemption, "cache_policy": "off"},
        )
    )
    run.advance(TIGHT.duration_s)
    traffic = run.clients[RequestClass.BE].traffic
    assert isinstance(traffic, DrawnTraffic)
    traffic.num_clients = None
    run.advance(1000.0)  # no request is replaced any more
    assert not run.core.running
    needed = sum(
        sum(clients.num_prompt_tokens) + sum(clients.num_output_tokens)
        for clients in run.clients.values()
    )
    num_requests = len(run.simulation.outcomes)
    needed -= num_requests  # the last token is not read
    computed = run.worker.sums.num_tokens
    lost = run.report().kv.recomputed_tokens
    assert lost > 2 * num_requests
    # The step that was sent when a request ended may have computed one token more.
    assert needed + lost <= computed <= needed + lost + num_requests


# What is kept for real-time's cache is not kept from a request that could never run otherwise.


@pytest.mark.parametrize("num_prompt", [30, 50])
def test_the_reserve_gives_way_where_nothing_else_can_run(num_prompt: int) -> None:
    """30 tokens start beside the reserve and then cannot grow, 50 cannot even start."""
    arrivals = [
        Arrival(0.0, 48, 2, 2),
        Arrival(0.0, 48, 2, 2),
        Arrival(5.0, num_prompt, 12, 12, request_class=RequestClass.BE),
    ]
    options = KVOptions(cache_order=task_aware, rt_cache_min_tokens=90)
    core = make_core("priority", budget=64, admission=RecklessAdmission(), kv=options)
    simulation = make_simulation(core)
    simulation.run(events_of(arrivals), until_s=4.0)
    assert core.kv is not None and NUM_SLOTS - core.kv.num_cached < num_prompt + 12
    simulation.run([])
    assert len(simulation.outcomes) == 3
    for arrival, outcome in zip(arrivals, simulation.outcomes.values(), strict=True):
        check_outcome(arrival, outcome)
