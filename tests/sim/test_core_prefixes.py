"""Prefix caching in the core: shared KV is right KV, and nothing leaks."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
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
    pack_results,
    step_time,
    submit,
)
from support.grids import choose, every_value, long_but, more_when_long

from lightserve.config import ServeConfig
from lightserve.config.scheduling import CLASS_BLIND_POLICIES
from lightserve.errors import ConfigError
from lightserve.messages.common import RegexConstraint
from lightserve.messages.frontend_router import ClassLoad, KVPool, unpack_kinds
from lightserve.messages.router_worker import StepPlan, plan_rows, row_results
from lightserve.router.config import (
    SchedulerConfig,
    make_accepted_risk,
    make_admission,
    make_scheduler_config,
)
from lightserve.router.events import FromFrontend, FrontendGone, WorkersGone, WorkersReady
from lightserve.router.from_submit import QueueLimits
from lightserve.router.kv.cache import KVOptions, Preemption
from lightserve.router.kv.prefix_node import least_recently_used, task_aware
from lightserve.router.output_lengths import OutputLengths
from lightserve.router.policies import POLICIES
from lightserve.router.scheduler import Scheduler
from lightserve.router.step import PlannedStep
from lightserve.sim.simulation import Simulation, TimedEvent
from lightserve.sim.worker import SimulatedWorker
from lightserve.types import (
    FrontendId,
    RequestClass,
    RequestId,
    RequestKey,
    SamplingParams,
    SlotKind,
)

FRONTEND = FrontendId(0)

families = st.lists(
    st.builds(
        Arrival,
        time_s=st.floats(0, 0.4),
        num_prompt=st.integers(1, 40),
        num_output=st.integers(1, 24),
        max_tokens=st.integers(1, 24),
        frontend_id=st.integers(0, 1),
        abort_after_s=st.none() | st.none() | st.floats(0, 0.2),
        family=st.integers(0, 2),
        request_class=st.sampled_from(RequestClass),
    ),
    min_size=1,
    max_size=30,
)


@pytest.mark.parametrize(
    ("policy", "reckless", "order"),
    every_value(sorted(POLICIES), [True, False], [task_aware, least_recently_used]),
)
@settings(max_examples=choose(10, 80), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(arrivals=families, budget=st.integers(MAX_SEQS, 64))
def test_random_traffic(
    policy: str, reckless: bool, order: object, arrivals: list[Arrival], budget: int
) -> None:
    """The worker refuses a slot that does not hold exactly the reader's prefix."""
    admission = RecklessAdmission() if reckless else None
    core = make_core(policy, budget, admission=admission, cache_order=order)
    simulation = make_simulation(core)
    for until_s in (0.05, 0.1, 0.2, float("inf")):
        simulation.run(events_of(arrivals) if until_s == 0.05 else [], until_s=until_s)
        core.check_integrity()
    for number, arrival in enumerate(arrivals):
        key = RequestKey(FrontendId(arrival.frontend_id), RequestId(number))
        if key in simulation.outcomes:
            check_outcome(arrival, simulation.outcomes[key])
    status = core.status(simulation.now_s)
    assert set(status.load.values()) == {ClassLoad(0, 0, 0)} and status.num_used_slots == 0


def run_one_after_another(salts: tuple[str, str], **fields: object) -> list[int]:
    """Return the cached tokens that two requests with the same prompt of 20 were told."""
    core = make_core("chunked", cache_order=task_aware)
    simulation = make_simulation(core)
    arrival = Arrival(0.0, 20, 4, 8, family=1)
    for number, salt in enumerate(salts):
        # Numbers that differ by a multiple of three have the very same prompt.
        message = submit(3 * number, arrival, prefix_salt=salt, **fields)
        simulation.run([TimedEvent(simulation.now_s, FromFrontend(FRONTEND, message))])
    core.check_integrity()
    outcomes = [simulation.outcomes[RequestKey(FRONTEND, RequestId(3 * n))] for n in (0, 1)]
    assert outcomes[0].token_ids == outcomes[1].token_ids
    return [outcome.num_cached_tokens for outcome in outcomes]


def test_a_repeated_prompt_is_found_but_for_its_last_token() -> None:
    assert run_one_after_another(("", "")) == [0, 19]


def test_salts_keep_apart() -> None:
    assert run_one_after_another(("a", "b")) == [0, 0]


def test_prompt_logprobs_compute_everything() -> None:
    sampling = SamplingParams(seed=24, num_prompt_logprobs=0)
    assert run_one_after_another(("", ""), sampling=sampling) == [0, 0]


def test_what_was_generated_is_found_too() -> None:
    """The next turn of a conversation: prompt, answer, and something new."""
    core = make_core("chunked", cache_order=task_aware)
    simulation = make_simulation(core)
    first = Arrival(0.0, 10, 6, 8)
    simulation.run(events_of([first]))
    said = simulation.outcomes[RequestKey(FRONTEND, RequestId(0))].token_ids
    turns = [2000] * 10 + said + [7, 8, 9]
    second = submit(1, Arrival(0.0, len(turns), 3, 8), prompt=turns)
    simulation.run([TimedEvent(simulation.now_s, FromFrontend(FRONTEND, second))])
    outcome = simulation.outcomes[RequestKey(FRONTEND, RequestId(1))]
    # The KV of the last token, EOS, was computed one step too many; that is no waste.
    assert outcome.num_cached_tokens >= 15


def test_running_requests_share_a_prompt() -> None:
    """The pool is too small for two copies."""
    core = make_core("chunked", budget=64, cache_order=task_aware)
    simulation = make_simulation(core)
    long = [Arrival(0.1 * i, 40, 20, 20, family=0) for i in range(4)]
    messages = [submit(3 * i, arrival) for i, arrival in enumerate(long)]
    simulation.run(
        [
            TimedEvent(arrival.time_s, FromFrontend(FRONTEND, message))
            for arrival, message in zip(long, messages, strict=True)
        ]
    )
    cached = [simulation.outcomes[RequestKey(FRONTEND, RequestId(3 * i))] for i in range(4)]
    assert [outcome.num_cached_tokens for outcome in cached] == [0, 39, 39, 39]


def test_a_prompt_is_shared_before_its_grammar_is_ready() -> None:
    """That may take long; best-effort requests wait for a prefix only while it is computed."""
    core = make_core("unified", cache_order=task_aware)
    core.on_message(WorkersReady(NUM_SLOTS), 0.0)
    worker = SimulatedWorker(num_slots=NUM_SLOTS, max_num_seqs=MAX_SEQS, max_model_len=MAX_LEN)

    def steps(number: int, **fields: Any) -> list[list[tuple[int, int, int]]]:
        """Send a request, and return (row, start, tokens) in the steps that follow."""
        arrival = Arrival(0.0, 41, 3, 3, request_class=RequestClass.BE)
        request = submit(number, arrival, prompt=[7] * 40 + [number], **fields)
        core.on_message(FromFrontend(FRONTEND, request), 0.0)
        taken = []
        for _ in range(5):
            now_s = float(core._pipeline.num_finished)
            step = core.plan(now_s)
            assert isinstance(step, PlannedStep)
            plan = core.commit(step, now_s)
            result = worker.execute(plan, exec_s=0.01, idle_s=0.0)
            rows = [
                msgspec.structs.replace(row, token_ids=[] if row.row == 0 else row.token_ids)
                for row in row_results(plan, result)
            ]
            core.on_result(pack_results(plan, rows, exec_s=0.01), now_s)
            core.check_integrity()
            taken.append([(row.row, row.start_position, row.num_tokens) for row in plan_rows(plan)])
        return taken

    again = (0, 40, 1)
    first = steps(1, constraint=RegexConstraint(pattern="a"))
    assert first == [[(0, 0, 16)], [(0, 16, 16)], [(0, 32, 9)], [again], [again]]
    assert steps(2)[0] == [again, (1, 40, 1)]


def test_workers_are_told_who_is_real_time() -> None:
    """Its constraint goes before others'."""
    core = make_core("unified")
    core.on_message(WorkersReady(NUM_SLOTS), 0.0)
    for number, of in enumerate(RequestClass):
        request = submit(number, Arrival(0.0, 4, 3, 3, request_class=of))
        core.on_message(FromFrontend(FRONTEND, request), 0.0)
    step = core.plan(0.0)
    assert isinstance(step, PlannedStep)
    sequences = core.commit(step, 0.0).sequences
    classes = [request.request_class for request, _ in step.scheduled]
    assert len(set(classes)) == 2
    assert [s.is_real_time for s in sequences] == [of is RequestClass.RT for of in classes]


def test_what_waiting_requests_want_outlives_what_none_wants() -> None:
    """Two finished prompts; one is wanted again by a request that waits for memory."""
    core = make_core("chunked", budget=64, cache_order=task_aware)
    simulation = make_simulation(core)
    wanted, other = Arrival(0.0, 30, 2, 4, family=0), Arrival(0.0, 30, 2, 4, family=1)
    for number, arrival in ((0, wanted), (1, other)):
        simulation.run(
            [TimedEvent(simulation.now_s, FromFrontend(FRONTEND, submit(number, arrival)))]
        )
    big = Arrival(0.0, 40, 20, 24)  # two of them leave no room for both
    arrivals = [(2, big), (5, big), (3, wanted)]
    simulation.run(
        [
            TimedEvent(simulation.now_s + 0.001 * order, FromFrontend(FRONTEND, submit(n, arrival)))
            for order, (n, arrival) in enumerate(arrivals)
        ]
    )
    again = simulation.outcomes[RequestKey(FRONTEND, RequestId(3))]
    assert again.num_cached_tokens == 29


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("be_order", ["auto", "arrival", "sharing"])
def test_best_effort_starts_in_the_order_that_is_asked_for(policy: str, be_order: str) -> None:
    """Of two that wait, the later is cached: with `sharing`, two's default, it starts first."""
    options: dict[str, Any] = {"policy": policy, "be_order": be_order}
    if be_order == "sharing" and policy in (*CLASS_BLIND_POLICIES, "accelgen"):
        with pytest.raises(ConfigError, match=rf"--be-order sharing needs .* '{policy}'"):
            ServeConfig(**options)
        return
    config = ServeConfig(**options, max_num_seqs=1, max_num_batched_tokens=64)
    core = Scheduler(make_scheduler_config(config, max_model_len=MAX_LEN))
    simulation = make_simulation(core)
    cached, other = (
        Arrival(0.0, 30, 4, 4, family=family, request_class=RequestClass.BE) for family in (0, None)
    )
    simulation.run([TimedEvent(0.0, FromFrontend(FRONTEND, submit(0, cached)))])
    now_s = simulation.now_s
    simulation.run(
        [
            TimedEvent(now_s, FromFrontend(FRONTEND, submit(number, arrival)))
            for number, arrival in ((4, other), (1, other), (3, cached))
        ]
    )
    later, earlier = (
        simulation.outcomes[RequestKey(FRONTEND, RequestId(number))].token_times_s[0]
        for number in (1, 3)
    )
    by_default = policy in ("echo", "unified")
    by_sharing = be_order == "sharing" or (be_order == "auto" and by_default)
    assert (earlier < later) == by_sharing


def test_dead_workers_take_the_cache_with_them() -> None:
    core = make_core("chunked", cache_order=task_aware)
    simulation = make_simulation(core)
    arrival = Arrival(0.0, 20, 4, 8, family=1)
    simulation.run(events_of([arrival]))
    assert core.kv is not None and core.kv.num_cached > 0
    core.on_message(WorkersGone(), simulation.now_s)
    core.on_message(WorkersReady(120), simulation.now_s)
    assert core.kv.num_cached == 0
    core.on_message(FrontendGone(FRONTEND), simulation.now_s)
    core.check_integrity()


# Admission of requests that share KV, through the core: more of them fit, and never too many.

arrivals_of_families = st.lists(
    st.builds(
        Arrival,
        time_s=st.floats(0, 0.4),
        num_prompt=st.integers(1, 40),
        num_output=st.integers(1, 24),
        max_tokens=st.integers(1, 24),
        abort_after_s=st.none() | st.none() | st.floats(0, 0.2),
        family=st.integers(0, 2),
        request_class=st.sampled_from(RequestClass),
    ),
    min_size=1,
    max_size=30,
)


@pytest.mark.parametrize("policy", long_but([("chunked",), ("fcfs",)], [("fcfs",)]))
@settings(max_examples=choose(10, 100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(arrivals=arrivals_of_families, budget=st.integers(MAX_SEQS, 64))
def test_a_request_that_reserves_the_worst_case_loses_nothing(
    policy: str, arrivals: list[Arrival], budget: int
) -> None:
    """Shared tokens are reserved once: enough, whichever of those that share them ends first."""
    core = make_core(policy, budget, cache_order=task_aware)
    make_simulation(core).run(events_of(arrivals))
    assert core.num_preemptions == 0


@pytest.mark.parametrize("admission", ["conservative", "risk", "past-future", "ema", "aggressive"])
@pytest.mark.parametrize("policy", ["chunked", "priority"])
def test_a_crowd_with_one_prompt_runs_at_once(policy: str, admission: str) -> None:
    """40 tokens that all share and at most 10 more of each: 6 need 100 of 120 slots, not 300."""
    lengths = OutputLengths(max_output_tokens=MAX_LEN)
    config = ServeConfig(admission=admission)
    rule = make_admission(
        config,
        lengths,
        make_accepted_risk(config),
        0,
        is_class_aware=POLICIES[policy]().is_class_aware,
    )
    core = make_core(policy, 64, admission=rule, lengths=lengths, cache_order=task_aware)
    simulation = make_simulation(core)
    arrival = Arrival(0.0, 41, 10, 10, family=0)

    def crowd(first: int, count: int, at_s: float) -> list[TimedEvent]:
        # Numbers that differ by a multiple of three have the very same prompt.
        messages = [submit(3 * number, arrival) for number in range(first, first + count)]
        return [TimedEvent(at_s, FromFrontend(FrontendId(0), message)) for message in messages]

    simulation.run(crowd(0, 1, 0.0))
    simulation.run(crowd(1, MAX_SEQS, simulation.now_s), until_s=simulation.now_s + 0.03)
    assert len(core.running) == MAX_SEQS
    assert core.num_used_slots < NUM_SLOTS
    simulation.run([])
    assert core.num_preemptions == 0


# A real-time newcomer whose prefix is just being taken from a best-effort request.

RT, BE = RequestClass.RT, RequestClass.BE
VICTIM_LEN, VICTIM_SLOTS = 700, 900
DOCUMENT = list(range(1, 301))


class Scene:
    """One step after the other; remembers the step of each request's first token."""

    def __init__(self) -> None:
        self.core = Scheduler(
            SchedulerConfig(
                max_model_len=VICTIM_LEN,
                max_num_seqs=16,
                max_num_batched_tokens=256,
                queue_limits=dict.fromkeys(RequestClass, QueueLimits(100, 1 << 30)),
                policy=POLICIES["priority"](),
                kv=KVOptions(cache_order=task_aware, preemption=Preemption.CHECKPOINT),
                admission=RecklessAdmission(),
                lengths=OutputLengths(max_output_tokens=VICTIM_LEN),
            )
        )
        self.worker = SimulatedWorker(
            num_slots=VICTIM_SLOTS, max_num_seqs=16, max_model_len=VICTIM_LEN, num_host_slots=1000
        )
        self.sent: deque[StepPlan] = deque()
        self.step = 0
        self.first_token: dict[int, int] = {}
        self.core.on_message(WorkersReady(VICTIM_SLOTS, 1000), 0.0)

    def add(self, number: int, request_class: RequestClass, prompt: list[int], out: int) -> None:
        arrival = Arrival(0.0, len(prompt), out, out, request_class=request_class)
        event = FromFrontend(FrontendId(0), submit(number, arrival, prompt=prompt))
        self.core.on_message(event, float(self.step))

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step += 1
            now_s = float(self.step)
            while isinstance(step := self.core.plan(now_s), PlannedStep):
                self.sent.append(self.core.commit(step, now_s))
            if self.sent:
                result = self.worker.execute(self.sent.popleft(), exec_s=0.01, idle_s=0.0)
                for outgoing in self.core.on_result(result, now_s):
                    for delta in outgoing.message.each():
                        if delta.token_ids:
                            self.first_token.setdefault(int(delta.request_id), self.step)
        self.core.check_integrity()


def test_it_starts_at_once_on_memory_of_another() -> None:
    """Decodes take the paused request's prompt token by token: waiting for its end is too long."""
    scene = Scene()
    scene.add(20, BE, [3000] * 200, 90)
    scene.run(3)
    scene.add(0, BE, [*DOCUMENT, 7], 90)
    scene.run(10)
    for number in range(1, 5):
        scene.add(number, RT, [1000 + number] * 60, 70)
    scene.run(2)
    kv = scene.core._kv
    assert kv is not None
    while kv.num_available > 0:
        scene.run(1)
    scene.run(15)
    arrived = scene.step
    scene.add(10, RT, [*DOCUMENT, *[9] * 10], 5)
    scene.run(60)
    assert scene.first_token[10] - arrived <= 3


# The map of the KV pool says at any moment what the core's own figures say.

NUM_HOST_SLOTS = 60

some_arrivals = st.lists(
    st.builds(
        Arrival,
        time_s=st.floats(0, 0.2),
        num_prompt=st.integers(1, 40),
        num_output=st.integers(1, 24),
        max_tokens=st.integers(1, 24),
        abort_after_s=st.none() | st.floats(0, 0.2),
        family=st.none() | st.integers(0, 1),
        request_class=st.sampled_from(RequestClass),
    ),
    min_size=1,
    max_size=20,
)
some_options = st.builds(
    KVOptions,
    cache_order=st.sampled_from([None, task_aware]),
    block_size=st.sampled_from([1, 4, 16]),
    preemption=st.sampled_from(Preemption),
)


def _simulation(core: Scheduler) -> Simulation:
    worker = SimulatedWorker(
        num_slots=NUM_SLOTS,
        max_num_seqs=MAX_SEQS,
        max_model_len=MAX_LEN,
        num_host_slots=NUM_HOST_SLOTS,
    )
    return Simulation(
        core, worker, step_time, WorkersReady(NUM_SLOTS, num_host_slots=NUM_HOST_SLOTS)
    )


def _checked_map(core: Scheduler) -> KVPool:
    """Return the map, which agrees with itself and with the core's figures."""
    pool = core.kv_map()
    assert pool is not None and pool.slots is not None
    kinds = np.repeat(*unpack_kinds(pool.slots)).tolist()
    assert len(kinds) == pool.num_slots == NUM_SLOTS
    assert pool.num_slots_of_kind == [kinds.count(kind) for kind in SlotKind]
    assert core.kv is not None and kinds.count(SlotKind.CACHED) == core.kv.num_cached
    num_used = NUM_SLOTS - kinds.count(SlotKind.FREE) - kinds.count(SlotKind.CACHED)
    assert num_used == core.num_used_slots
    assert num_used == sum(slots.num_slots for slots in pool.classes.values())
    return pool


@more_when_long
@settings(max_examples=choose(15, 100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    arrivals=some_arrivals,
    options=some_options,
    policy=st.sampled_from(["priority", "chunked"]),
    budget=st.integers(MAX_SEQS, 64),
)
def test_at_any_moment(
    arrivals: list[Arrival], options: KVOptions, policy: str, budget: int
) -> None:
    core = make_core(policy, budget, admission=RecklessAdmission(), kv=options)
    simulation = _simulation(core)
    for until_s in (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, float("inf")):
        simulation.run(events_of(arrivals) if until_s == 0.02 else [], until_s=until_s)
        pool = _checked_map(core)
        assert pool.block_size == options.block_size
        assert pool.num_host_slots == NUM_HOST_SLOTS
    assert pool.num_used_host_slots == core.num_used_slots == pool.mean_run_length == 0
