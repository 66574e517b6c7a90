"""Random traffic through the real core: the simulated worker checks every slot it reads."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter, deque

import msgspec
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
    submit,
)
from support.grids import choose, every_value, more_when_long

from lightserve.decisions.records import Decision, Input, RecordedCore, decision_of, event_of
from lightserve.messages.frontend_router import ClassLoad, ErrorCode, Submit
from lightserve.messages.router_worker import StepPlan, StepResult
from lightserve.router.admission.base import AdmissionRule
from lightserve.router.admission.baselines import ConservativeAdmission
from lightserve.router.events import FromFrontend, FrontendGone, Outgoing, WorkersGone, WorkersReady
from lightserve.router.kv.cache import KVOptions, Preemption
from lightserve.router.kv.prefix_node import task_aware
from lightserve.router.policies import POLICIES
from lightserve.router.request import RequestState
from lightserve.router.scheduler import Scheduler
from lightserve.router.step import PlannedStep, Reason
from lightserve.sim.simulation import Outcome, TimedEvent
from lightserve.sim.worker import SimulatedWorker
from lightserve.types import (
    FrontendId,
    RequestClass,
    RequestId,
    RequestKey,
)

arrivals_strategy = st.lists(
    st.builds(
        Arrival,
        time_s=st.floats(0, 0.3),
        num_prompt=st.integers(1, 40),
        num_output=st.integers(1, 24),
        max_tokens=st.integers(1, 24),
        frontend_id=st.integers(0, 1),
        abort_after_s=st.none() | st.none() | st.floats(0, 0.2),
    ),
    min_size=1,
    max_size=25,
)


@pytest.mark.parametrize(
    ("admission", "policy"),
    every_value([RecklessAdmission(), ConservativeAdmission()], sorted(POLICIES)),
)
@settings(max_examples=choose(10, 60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(arrivals=arrivals_strategy, budget=st.integers(MAX_SEQS, 64))
def test_random_traffic(
    admission: AdmissionRule, policy: str, arrivals: list[Arrival], budget: int
) -> None:
    core = make_core(policy, budget, admission=admission)
    simulation = make_simulation(core)
    for until_s in (0.05, 0.1, 0.2, float("inf")):
        simulation.run(events_of(arrivals) if until_s == 0.05 else [], until_s=until_s)
        core.check_integrity()
    for number, arrival in enumerate(arrivals):
        key = RequestKey(FrontendId(arrival.frontend_id), RequestId(number))
        if key in simulation.outcomes:
            check_outcome(arrival, simulation.outcomes[key])
        else:
            assert arrival.abort_after_s is not None
    status = core.status(simulation.now_s)
    assert set(status.load.values()) == {ClassLoad(0, 0, 0)}


@settings(max_examples=20, deadline=None)
@given(arrivals=arrivals_strategy, gone_s=st.floats(0, 0.3))
def test_frontend_gone_frees_everything_of_it(arrivals: list[Arrival], gone_s: float) -> None:
    core = make_core("chunked")
    simulation = make_simulation(core)
    simulation.run(events_of(arrivals), until_s=gone_s)
    simulation.now_s = gone_s
    core.on_message(FrontendGone(FrontendId(0)), gone_s)
    core.check_integrity()
    late = [a for a in arrivals if a.frontend_id == 0 and a.time_s > gone_s]
    simulation.run([])
    core.check_integrity()
    unfinished = [
        key
        for key, outcome in simulation.outcomes.items()
        if outcome.finish_reason is None and key.frontend_id == 0
    ]
    assert all(arrivals[key.request_id] not in late for key in unfinished)
    assert core.status(simulation.now_s).num_used_slots == 0


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_preempted_requests_keep_their_text(policy: str) -> None:
    """Six requests that need 6 x 40 slots in a pool of 120: some start over, none loses a token."""
    core = make_core(policy, budget=64, admission=RecklessAdmission())
    simulation = make_simulation(core)
    arrivals = [Arrival(0.0, 10, 30, 30) for _ in range(6)]
    simulation.run(events_of(arrivals))
    for number, arrival in enumerate(arrivals):
        check_outcome(arrival, simulation.outcomes[RequestKey(FrontendId(0), RequestId(number))])
    assert core.num_preemptions > 0
    core.check_integrity()


def test_one_plan_ahead_keeps_the_worker_busy() -> None:
    """Once the cost model has seen a few steps, the worker waits for nothing."""
    core = make_core("chunked")
    simulation = make_simulation(core)
    arrivals = [Arrival(0.0, 8, 50, 50), Arrival(0.0, 8, 50, 50)]
    simulation.run(events_of(arrivals))
    status = core.status(simulation.now_s)
    assert status.num_steps >= 50
    assert status.worker_idle_s <= 0.001 * status.worker_busy_s


def test_plan_changes_nothing_and_leaves_late() -> None:
    """Asking twice gives the same; an arrival during a step is in the very next plan."""
    core = make_core("chunked")
    simulation = make_simulation(core)
    simulation.run(events_of([Arrival(0.0, 4, 20, 20)]), until_s=0.05)
    now_s = simulation.now_s
    assert core.plan(now_s) == core.plan(now_s)
    core.check_integrity()
    before = core.status(now_s).num_steps
    simulation.run(events_of([Arrival(now_s, 4, 1, 1, frontend_id=1)]))
    outcome = simulation.outcomes[RequestKey(FrontendId(1), RequestId(0))]
    # At worst: the rest of the running step, one step already queued behind it, and its own.
    assert outcome.token_times_s[0] - now_s <= 3 * (0.004 + 0.0005 * 5)
    assert core.status(simulation.now_s).num_steps > before


def test_overshoot_after_eos_is_dropped() -> None:
    """The row that runs ahead of an EOS is dead: no token of it is delivered, slots return."""
    core = make_core("chunked")
    simulation = make_simulation(core)
    arrival = Arrival(0.0, 4, 3, 20)
    simulation.run(events_of([arrival]))
    check_outcome(arrival, simulation.outcomes[RequestKey(FrontendId(0), RequestId(0))])
    core.check_integrity()
    assert core.status(simulation.now_s).num_used_slots == 0


def test_worker_loss_replays_or_fails() -> None:
    """RT that had sent nothing and all BE start over; RT that had sent something fails."""
    core = make_core("chunked", budget=16)
    simulation = make_simulation(core)
    arrivals = [
        Arrival(0.0, 4, 20, 20),
        Arrival(0.0, 4, 20, 20, request_class=RequestClass.BE),
        Arrival(0.049, 30, 5, 5),
    ]
    simulation.run(events_of(arrivals), until_s=0.05)
    sent = [len(outcome.token_ids) for outcome in simulation.outcomes.values()]
    assert sent[0] > 0 and sent[1] > 0 and sent[2] == 0
    [lost] = core.on_message(WorkersGone(), 0.05)
    assert [(d.request_id, d.error) for d in lost.message.each()] == [(0, ErrorCode.WORKER_LOST)]
    core.check_integrity()
    replay = make_simulation(core)
    replay.go_on_from(simulation)
    replay.run([TimedEvent(1.0, FrontendGone(FrontendId(7)))])
    for number in (1, 2):
        key = RequestKey(FrontendId(0), RequestId(number))
        check_outcome(arrivals[number], replay.outcomes[key])


def test_second_loss_ends_a_replayed_request() -> None:
    core = make_core("chunked")
    core.on_message(WorkersReady(NUM_SLOTS), 0.0)
    core.on_message(FromFrontend(FrontendId(0), submit(0, Arrival(0.0, 4, 9, 9))), 0.0)
    for now_s, expected in ((0.0, []), (1.0, [ErrorCode.WORKER_LOST])):
        planned = core.plan(now_s)
        core.commit(planned, now_s)  # type: ignore[arg-type]
        news = core.on_message(WorkersGone(), now_s)
        assert [d.error for out in news for d in out.message.each()] == expected
        core.on_message(WorkersReady(NUM_SLOTS), now_s)
        core.check_integrity()


@pytest.mark.parametrize(
    ("arrival", "error"),
    [
        (Arrival(0.0, 40, 1, MAX_LEN - 40), None),
        (Arrival(0.0, 40, 1, MAX_LEN - 39), ErrorCode.TOO_LARGE),
    ],
)
def test_too_large_is_refused(arrival: Arrival, error: ErrorCode | None) -> None:
    core = make_core("chunked")
    news = core.on_message(FromFrontend(FrontendId(0), submit(0, arrival)), 0.0)
    assert [d.error for out in news for d in out.message.each()] == ([error] if error else [])
    assert all(d.max_tokens == MAX_LEN for out in news for d in out.message.each())


def test_a_pool_that_is_too_small_says_how_much_it_holds() -> None:
    core = make_core("chunked")
    core.on_message(FromFrontend(FrontendId(0), submit(0, Arrival(0.0, 20, 1, 20))), 0.0)
    (news,) = core.on_message(WorkersReady(10), 0.0)
    (delta,) = news.message.each()
    assert (delta.error, delta.max_tokens) == (ErrorCode.TOO_LARGE, 11)


def test_full_queue_is_refused() -> None:
    core = make_core("chunked", max_waiting=2)
    arrival = Arrival(0.0, 4, 4, 4)
    news = [core.on_message(FromFrontend(FrontendId(0), submit(i, arrival)), 0.0) for i in range(3)]
    errors = [[d.error for out in outs for d in out.message.each()] for outs in news]
    assert errors == [[], [], [ErrorCode.QUEUE_FULL]]


# All requests end, under every policy, though all are admitted and memory runs out all the time.
#
# No policy and no order of requests may leave a state in which nothing is in flight, a request
# could move, and none does: nothing would ever happen again.

FRONTEND = FrontendId(0)
LAST_S = 40
ODD_SLOTS = 67  # the last block is a short one
STORES = {
    "checkpoint": KVOptions(cache_order=task_aware, block_size=4, preemption=Preemption.CHECKPOINT),
    "protected": KVOptions(
        cache_order=task_aware, preemption=Preemption.CHECKPOINT, rt_cache_min_tokens=60
    ),
    "recompute": KVOptions(preemption=Preemption.RECOMPUTE),
    "exclusive": KVOptions(block_size=16, is_exclusive=True, preemption=Preemption.RECOMPUTE),
}


class Scene:
    """Random requests over a core; the workers may die once."""

    def __init__(self, seed: int, policy: str, kv: KVOptions, num_slots: int) -> None:
        rng = random.Random(seed)
        self.num_slots = num_slots
        self.core: Scheduler = make_core(
            policy, rng.choice([6, 24, 64]), admission=RecklessAdmission(), kv=kv
        )
        self.arrivals = [
            Arrival(
                rng.randrange(LAST_S),
                rng.randint(1, 40),
                rng.randint(1, 24),
                24,
                request_class=rng.choice(list(RequestClass)),
                family=rng.choice([None, 0]),
            )
            for _ in range(16)
        ]
        self.outcomes = [Outcome(0.0) for _ in self.arrivals]
        self.death_s = rng.choice([10, 20, None])
        self.sent: deque[StepPlan] = deque()
        self.start_workers()

    def start_workers(self) -> None:
        self.worker = SimulatedWorker(
            num_slots=self.num_slots,
            max_num_seqs=MAX_SEQS,
            max_model_len=MAX_LEN,
            num_host_slots=20,
        )
        self.sent.clear()
        self.take_in(self.core.on_message(WorkersReady(self.num_slots, 20), 0.0))

    def take_in(self, news: list[Outgoing]) -> None:
        for outgoing in news:
            for delta in outgoing.message.each():
                outcome = self.outcomes[delta.request_id]
                outcome.token_ids.extend(delta.token_ids)
                outcome.finish_reason, outcome.error = delta.finish_reason, delta.error

    def run(self, num_rounds: int) -> None:
        for now_s in range(num_rounds):
            if now_s > LAST_S and not self.sent and all(map(has_ended, self.outcomes)):
                return
            for number, arrival in enumerate(self.arrivals):
                if arrival.time_s == now_s:
                    event = FromFrontend(FRONTEND, submit(number, arrival))
                    self.take_in(self.core.on_message(event, float(now_s)))
            if now_s == self.death_s:
                self.take_in(self.core.on_message(WorkersGone(), float(now_s)))
                self.start_workers()
            while isinstance(step := self.core.plan(float(now_s)), PlannedStep):
                self.sent.append(self.core.commit(step, float(now_s)))
            self.core.check_integrity()
            if self.sent:
                result = self.worker.execute(self.sent.popleft(), exec_s=0.01, idle_s=0.0)
                self.take_in(self.core.on_result(result, float(now_s)))


def has_ended(outcome: Outcome) -> bool:
    return outcome.finish_reason is not None or outcome.error is not None


@pytest.mark.parametrize(("policy", "store"), every_value(sorted(POLICIES), sorted(STORES)))
def test_all_requests_end(policy: str, store: str) -> None:
    for seed in range(choose(3, 9)):
        scene = Scene(seed, policy, STORES[store], ODD_SLOTS)
        scene.run(1000)
        for number, (arrival, outcome) in enumerate(
            zip(scene.arrivals, scene.outcomes, strict=True)
        ):
            if outcome.error is None:
                assert outcome.finish_reason is not None, f"seed {seed}: {number} never ends"
                check_outcome(arrival, outcome)
            else:
                assert outcome.error is ErrorCode.WORKER_LOST, RequestId(number)
        assert scene.core.num_used_slots == 0


def test_a_suspect_without_memory_lets_those_run_who_hold_it() -> None:
    """Two that were in flight when workers died: the first, cleared, keeps what the second needs
    for the rest of its prompt, and is senior to it."""
    scene = Scene(0, "chunked", KVOptions(preemption=Preemption.RECOMPUTE), ODD_SLOTS)
    scene.core = make_core("chunked", 16, admission=RecklessAdmission())
    sizes = [(33, 24), (40, 24)]
    scene.arrivals = [
        Arrival(0, *size, 24, request_class=RequestClass.BE, family=None) for size in sizes
    ]
    scene.outcomes = [Outcome(0.0) for _ in sizes]
    scene.death_s = 2
    scene.start_workers()
    scene.run(300)
    for arrival, outcome in zip(scene.arrivals, scene.outcomes, strict=True):
        check_outcome(arrival, outcome)


# A request that does not advance has a reason, or is counted among those not looked at. And on
# the same random schedules: replayed from its log, a core decides the same.

arrivals_of_policies = st.lists(
    st.builds(
        Arrival,
        time_s=st.floats(0, 0.2),
        num_prompt=st.integers(1, 40),
        num_output=st.integers(1, 24),
        max_tokens=st.just(24),
        abort_after_s=st.none() | st.none() | st.floats(0, 0.2),
        request_class=st.sampled_from(RequestClass),
        family=st.none() | st.integers(0, 1),
    ),
    min_size=4,
    max_size=25,
)


class AccountingCore(Scheduler):
    """Checks each step that it books: all live requests are in it, or are accounted for, once."""

    num_checked = 0

    def commit(self, planned: PlannedStep, now_s: float) -> StepPlan:
        self.num_checked += 1
        advancing = [request for request, _ in planned.scheduled]
        skipped = [request for request, _ in planned.left_out.each()]
        named = {*advancing, *skipped}
        assert len(named) == len(advancing) + len(skipped), "a request is named twice"
        live = set(self._requests.values())
        assert named <= live
        left = live - named
        assert all(request.state is RequestState.WAITING for request in left), "no reason"
        counts = Counter(request.request_class for request in left)
        for request_class, (num_requests, stopped_by) in planned.unseen.items():
            assert num_requests == counts[request_class]
            assert (num_requests == 0) == (stopped_by is None), "what stopped the scan?"
        for request, reason in planned.left_out.each():
            if reason is Reason.BLOCKED and request.request_class is RequestClass.RT:
                assert request.num_schedulable_tokens == 0  # no other's prefix holds it up
        for request in planned.paused:
            assert (request, Reason.KV_NOW) in planned.left_out.each() or (
                (request, Reason.ROWS) in planned.left_out.each()
            )
        return super().commit(planned, now_s)


class Lines:
    """A log in memory."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []

    def append(self, record: Input | Decision) -> None:
        self.lines.append(msgspec.json.encode(record))

    def replay(self, core: Scheduler) -> None:
        """Check that a fresh core decides what the lines say."""
        for line in self.lines:
            record = msgspec.json.decode(line, type=Input | Decision)
            if isinstance(record, Decision):
                step = core.plan(record.planned_at_s)
                assert isinstance(step, PlannedStep)
                plan = core.commit(step, record.committed_at_s)
                assert decision_of(step, plan, record.committed_at_s) == record
            elif isinstance(event := event_of(record), StepResult):
                core.on_result(event, record.now_s)
            else:
                core.on_message(event, record.now_s)


@more_when_long
@pytest.mark.parametrize("policy", sorted(POLICIES))
@settings(max_examples=choose(4, 15), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    arrivals=arrivals_of_policies,
    budget=st.integers(MAX_SEQS, 48),
    max_be_seqs=st.sampled_from([1, 3, 100]),
    shares=st.booleans(),
    is_reckless=st.booleans(),
    needs_acknowledgement=st.booleans(),
    gone_s=st.none() | st.floats(0.01, 0.2),
)
def test_every_request_is_accounted_for(
    *,
    policy: str,
    arrivals: list[Arrival],
    budget: int,
    max_be_seqs: int,
    shares: bool,
    is_reckless: bool,
    needs_acknowledgement: bool,
    gone_s: float | None,
) -> None:
    plain = make_core(
        policy,
        budget,
        admission=RecklessAdmission() if is_reckless else ConservativeAdmission(),
        kv=KVOptions(cache_order=task_aware if shares else None),
    )
    config = dataclasses.replace(plain._config, max_be_seqs=max_be_seqs)
    core, log = AccountingCore(config), Lines()
    recorded = RecordedCore(core, log)
    events = events_of(arrivals)
    if (
        needs_acknowledgement
    ):  # and no frontend acknowledges: requests run 16 tokens, then are blocked
        events[::2] = [_with_stop_strings(timed) for timed in events[::2]]
    simulation = make_simulation(recorded)
    if gone_s is not None:
        simulation.run([e for e in events if e.time_s <= gone_s], until_s=gone_s)
        recorded.on_message(WorkersGone(), gone_s)
        core.check_integrity()
        events = [event for event in events if event.time_s > gone_s]
        before, simulation = simulation, make_simulation(recorded)
        simulation.go_on_from(before)
        events.append(TimedEvent(gone_s, FrontendGone(FrontendId(7))))
    simulation.run(events)
    assert core.num_checked > 0
    log.replay(Scheduler(config))


def _with_stop_strings(timed: TimedEvent) -> TimedEvent:
    match timed.event:
        case FromFrontend(frontend_id, Submit() as message):
            submit = msgspec.structs.replace(message, needs_acknowledgement=True)
            return TimedEvent(timed.time_s, FromFrontend(frontend_id, submit))
    return timed
