"""Real-time requests wait by priority, then by when their first token is due."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_priority_lanes import arriving

from lightserve.router.deadline_queue import DeadlineQueue
from lightserve.router.queues import WaitingQueue
from lightserve.router.request import Request
from lightserve.router.slo import TokenDeadlines
from lightserve.types import SLO, RequestClass


def due(
    number: int, ttft_ms: float | None, *, priority: int = 0, arrival_s: float = 0.0
) -> Request:
    request = arriving(number, priority)
    request.deadlines = TokenDeadlines(SLO(ttft_ms=ttft_ms), arrival_s)
    return request


def _order(request: Request) -> tuple[int, float, int]:
    assert request.deadlines is not None
    due_s = request.deadlines.deadline_of_next_token
    return request.priority, due_s, request.arrival_number


ttfts = st.sampled_from([None, 100.0, 200.0, 200.0, 1000.0])


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 50), ttfts)))
def test_against_a_sorted_list(steps: list[tuple[bool, int, float | None]]) -> None:
    queue, model = DeadlineQueue(), list[Request]()
    for number, (is_arrival, value, ttft_ms) in enumerate(steps):
        if is_arrival:
            request = due(number, ttft_ms, priority=value % 3 - 1, arrival_s=0.01 * number)
            queue.append(request)
            model = sorted([*model, request], key=_order)
        elif model:
            request = model.pop(value % len(model))
            assert request in queue
            queue.remove(request)
            assert request not in queue
        assert list(queue) == model
        assert len(queue) == len(model)


def test_removing_who_is_not_there() -> None:
    with pytest.raises(KeyError):
        DeadlineQueue().remove(due(0, 100.0))


def test_an_urgent_one_that_came_later_goes_first_and_late_ones_last() -> None:
    waiting = WaitingQueue()
    patient, urgent, best_effort = due(0, 500.0), due(1, 100.0), arriving(2, 0, RequestClass.BE)
    for request in (patient, urgent, best_effort):
        waiting.append(request)
    assert list(waiting.real_time()) == [urgent, patient]
    assert list(waiting) == [patient, urgent, best_effort], "by arrival for who asks for all"
    assert not list(waiting.late())
    waiting.sink_late(0.2)
    assert list(waiting.real_time()) == [patient, urgent]
    assert list(waiting.late()) == [urgent]
    for request in (urgent, patient):
        waiting.admit(request)
    assert list(waiting) == [best_effort]
    assert len(waiting) == 1
