"""Queues by priority: order, ages, and that classes do not mix."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.core_scenes import NUM_SLOTS, Arrival, make_core, make_simulation, submit
from test_admission import make_request

from lightserve.router.events import FromFrontend
from lightserve.router.intake import request_of
from lightserve.router.lanes import PriorityLanes
from lightserve.router.policies.registry import POLICIES
from lightserve.router.queues import WaitingQueue
from lightserve.router.request import Parameters, Request
from lightserve.sim.simulation import TimedEvent
from lightserve.types import SLO, FrontendId, RequestClass, RequestKey


def arriving(number: int, priority: int, request_class: RequestClass = RequestClass.RT) -> Request:
    request = make_request(number, prompt=5, request_class=request_class)
    request.arrival_number = number
    request.priority = priority
    return request


@given(st.lists(st.tuples(st.sampled_from(["append", "admit", "remove"]), st.integers(0, 50))))
def test_lanes_against_a_sorted_list(steps: list[tuple[str, int]]) -> None:
    """Overtaken is who was there, and before, when somebody was admitted."""
    lanes = PriorityLanes()
    model: list[Request] = []
    ages: dict[int, int] = {}
    for number, (what, value) in enumerate(steps):
        if what == "append":
            request = arriving(number, value % 4 - 2)
            lanes.append(request)
            model.append(request)
            model.sort(key=lambda r: (r.priority, r.arrival_number))
            ages[number] = 0
        elif model:
            index = value % len(model)
            request = model.pop(index)
            assert request in lanes
            if what == "admit":
                lanes.admit(request)
                for before in model[:index]:
                    ages[before.arrival_number] += 1
            else:
                lanes.remove(request)
            assert request not in lanes
        assert list(lanes) == list(lanes.noted()) == model
        assert len(lanes) == len(model)
        assert [r.num_overtaken for r in model] == [ages[r.arrival_number] for r in model]


def test_priority_orders_what_never_ran() -> None:
    """Requests that were put back stand before all of their class, whatever their priority."""
    queue = WaitingQueue()
    requests = [
        arriving(number, priority, request_class)
        for request_class in RequestClass
        for number, priority in enumerate((0, 5, -5, 0, 5))
    ]
    random.Random(3).shuffle(requests)
    requests.sort(key=lambda request: request.arrival_number)
    put_back = [arriving(9, 7, request_class) for request_class in RequestClass]
    for request in requests:
        queue.append(request)
    queue.requeue(put_back)
    numbers = [9, 2, 0, 3, 1, 4]
    assert [request.arrival_number for request in queue.real_time()] == numbers
    best_effort = queue.best_effort(queue.turn(), None, 0.0)
    assert [request.arrival_number for request in best_effort] == numbers
    both = [request.arrival_number for request in queue]
    assert both == [9, 9, 2, 2, 0, 0, 3, 3, 1, 1, 4, 4]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("request_class", RequestClass)
def test_under_every_policy_lower_numbers_start_first(
    policy: str, request_class: RequestClass
) -> None:
    """Six requests arrive together; the first is alone then, and starts."""
    simulation = make_simulation(make_core(policy, budget=NUM_SLOTS // 6))
    arrival = Arrival(0.0, 15, 4, 4, request_class=request_class)
    priorities = [9, 4, 0, -2, 3, -1]
    messages = [submit(number, arrival, priority=p) for number, p in enumerate(priorities)]
    frontend_id = FrontendId(0)
    simulation.run([TimedEvent(0.0, FromFrontend(frontend_id, m)) for m in messages])
    first_s = {
        priorities[message.request_id]: simulation.outcomes[
            RequestKey(frontend_id, message.request_id)
        ].token_times_s[0]
        for message in messages
    }
    order = [9, -2, -1, 0, 3, 4]
    times = [first_s[priority] for priority in order]
    assert times == sorted(times)
    assert len(set(times)) >= 4


def test_the_router_keeps_what_a_message_says() -> None:
    slo = SLO(ttft_ms=5.0, mtpot_ms=7.0)
    message = submit(3, Arrival(0.0, 8, 4, 4), priority=-7, slo=slo)
    request = request_of(
        *(FrontendId(0), message, Parameters()),
        now_s=1.0,
        arrival_number=0,
        admission_limit=None,
    )
    assert (request.priority, request.slo) == (-7, slo)
