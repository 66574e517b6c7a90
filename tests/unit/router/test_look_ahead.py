"""Best-effort requests may be passed over, but not for ever."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from support.policy_scenes import Queue, filled, make_limits, running_of
from test_admission import make_request

from lightserve.router.policies.baselines import ChunkedPolicy
from lightserve.router.policies.step_budget import LOOK_AHEAD, StepLimits
from lightserve.router.queue import OLDEST_EVERY, Turn, WaitingQueue
from lightserve.router.request import Request
from lightserve.types import RequestClass

LIMITS = make_limits(10_000, num_free_rows=1000)


class SmallOnly:
    """Admits prompts of at most ten tokens."""

    forecast_peak = None

    def admit(self, request: Request) -> bool:
        return request.num_prompt_tokens <= 10


def small(number: int) -> Request:
    return make_request(number, prompt=5, request_class=RequestClass.BE)


def large(number: int, request_class: RequestClass = RequestClass.BE) -> Request:
    return make_request(number, prompt=50, request_class=request_class)


def started(queue: Sequence[Request], limits: StepLimits = LIMITS) -> list[Request]:
    return list(filled(ChunkedPolicy(), running_of([]), Queue(queue), limits, SmallOnly()).started)


def admitted(queue: list[Request]) -> list[int]:
    return [request.key.request_id for request in started(queue)]


def test_passes_over_best_effort_only() -> None:
    assert admitted([large(0), small(1), large(2), small(3)]) == [1, 3]
    assert admitted([small(0), large(1, RequestClass.RT), small(2)]) == [0]


def test_looks_only_so_far() -> None:
    passed = [large(i) for i in range(LOOK_AHEAD)]
    assert admitted([*passed, small(100)]) == [100]
    assert admitted([*passed, large(99), small(100)]) == []


def test_one_step_never_passes_the_turn_of_the_oldest() -> None:
    queue = [large(0), *(small(i) for i in range(1, 200))]
    for since in (0, 3, OLDEST_EVERY - 1):
        limits = make_limits(10_000, num_free_rows=1000, turn=Turn(queue, since))
        assert len(started(queue, limits)) == OLDEST_EVERY - 1 - since


def test_an_oldest_that_starts_gives_the_turn_to_the_next() -> None:
    """In order of arrival none is ever held up."""
    queue = [small(i) for i in range(200)]
    limits = make_limits(10_000, num_free_rows=1000, turn=Turn(queue, OLDEST_EVERY - 1))
    assert started(queue, limits) == queue


def test_a_large_one_holds_up_the_others_at_last() -> None:
    """A stream of small requests behind it: it is admitted once there is room."""
    queue = WaitingQueue()
    head = large(0)
    queue.append(head)
    stream = deque(small(i) for i in range(1, 1000))
    num_admitted = 0
    for _ in range(100):
        for _ in range(5):
            queue.append(stream.popleft())
        limits = make_limits(10_000, num_free_rows=1000, turn=queue.turn())
        for request in started(list(queue), limits):
            queue.admit(request)
            num_admitted += 1
    assert head.num_overtaken == num_admitted == OLDEST_EVERY - 1


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_none_waits_for_ever(data: st.DataObject) -> None:
    """Whichever is chosen, with newcomers all the while and some that are put back.

    One that has n before it starts within OLDEST_EVERY * (n + 1) starts.
    """
    queue = WaitingQueue()
    number = 0
    due: dict[Request, int] = {}
    put_back: set[Request] = set()
    num_starts = 0
    for _ in range(80):
        for _ in range(data.draw(st.integers(0, 3))):
            request = small(number)
            number += 1
            queue.append(request)
            due[request] = num_starts + OLDEST_EVERY * (len(due) + 1)
        turn = queue.turn()
        waiting = list(queue.best_effort(turn, None, 0.0))
        allowed = [request for request in waiting if turn.allows(request)]
        assert bool(allowed) == bool(waiting)
        if not allowed:
            continue
        request = allowed[data.draw(st.integers(0, len(allowed) - 1))]
        queue.admit(request)
        num_starts += 1
        if request in due:
            assert num_starts <= due.pop(request)
        if request not in put_back and data.draw(st.booleans()):
            put_back.add(request)
            request.num_requeues += 1
            queue.requeue([request])
            due = {other: last + OLDEST_EVERY for other, last in due.items()}
