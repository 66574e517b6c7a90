"""Queues by priority: order, ages, and that classes do not mix."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from test_admission import make_request

from lightserve.router.lanes import PriorityLanes
from lightserve.router.queues import WaitingQueue
from lightserve.router.request import Request
from lightserve.types import RequestClass


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
    best_effort = queue.best_effort(None, 0.0)
    assert [request.arrival_number for request in best_effort] == numbers
    both = [request.arrival_number for request in queue]
    assert both == [9, 9, 2, 2, 0, 0, 3, 3, 1, 1, 4, 4]
