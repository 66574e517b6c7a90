"""Prefix caching in the core: shared KV is right KV, and nothing leaks."""

from __future__ import annotations

from typing import Any

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

from lightserve.messages.common import RegexConstraint
from lightserve.messages.frontend_router import ClassLoad
from lightserve.messages.router_worker import pack_results, plan_rows, row_results
from lightserve.router.events import (
    FromFrontend,
    FrontendGone,
    PlannedStep,
    WorkersGone,
    WorkersReady,
)
from lightserve.router.kv.prefix_node import least_recently_used, task_aware
from lightserve.router.policies.registry import POLICIES
from lightserve.sim.simulation import TimedEvent
from lightserve.sim.worker import SimulatedWorker
from lightserve.types import FrontendId, RequestClass, RequestId, RequestKey, SamplingParams

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


@pytest.mark.parametrize("order", [least_recently_used, task_aware])
@pytest.mark.parametrize("reckless", [False, True], ids=["conservative", "preempting"])
@pytest.mark.parametrize("policy", sorted(POLICIES))
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
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
    classes = [request.request_class for request, _ in step.allotments]
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


def test_dead_workers_take_the_cache_with_them() -> None:
    core = make_core("chunked", cache_order=task_aware)
    simulation = make_simulation(core)
    arrival = Arrival(0.0, 20, 4, 8, family=1)
    simulation.run(events_of([arrival]))
    assert core.num_cached_slots > 0
    core.on_message(WorkersGone(), simulation.now_s)
    core.on_message(WorkersReady(120), simulation.now_s)
    assert core.num_cached_slots == 0
    core.on_message(FrontendGone(FRONTEND), simulation.now_s)
    core.check_integrity()
