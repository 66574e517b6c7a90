"""Best-effort requests may be passed over, but not for ever."""

from __future__ import annotations

from collections import deque

import pytest
from test_admission import make_request

from lightserve.router.policies.base import LOOK_AHEAD, MAX_OVERTAKEN, admissible
from lightserve.router.queues import WaitingQueue
from lightserve.router.reasons import Skips
from lightserve.router.request import Request
from lightserve.types import RequestClass


class SmallOnly:
    """Admits prompts of at most ten tokens."""

    def admit(self, request: Request) -> bool:
        return request.num_prompt_tokens <= 10


def small(number: int) -> Request:
    return make_request(number, prompt=5, request_class=RequestClass.BE)


def large(number: int, request_class: RequestClass = RequestClass.BE) -> Request:
    return make_request(number, prompt=50, request_class=request_class)


def admitted(queue: list[Request]) -> list[int]:
    return [request.key.request_id for request in admissible(queue, SmallOnly(), Skips())]


def test_passes_over_best_effort_only() -> None:
    assert admitted([large(0), small(1), large(2), small(3)]) == [1, 3]
    assert admitted([small(0), large(1, RequestClass.RT), small(2)]) == [0]


def test_looks_only_so_far() -> None:
    passed = [large(i) for i in range(LOOK_AHEAD)]
    assert admitted([*passed, small(100)]) == [100]
    assert admitted([*passed, large(99), small(100)]) == []


@pytest.mark.parametrize("already", [0, MAX_OVERTAKEN - 3, MAX_OVERTAKEN - 1, MAX_OVERTAKEN])
def test_one_step_never_overtakes_too_often(already: int) -> None:
    head = large(0)
    head.num_overtaken = already
    assert len(admitted([head, *(small(i) for i in range(1, 200))])) == MAX_OVERTAKEN - already


def test_no_request_is_overtaken_more_than_64_times() -> None:
    """A stream of small requests behind a large one: at last it holds up the queue."""
    queue = WaitingQueue()
    head = large(0)
    queue.append(head)
    stream = deque(small(i) for i in range(1, 1000))
    num_admitted = 0
    for _ in range(100):
        for _ in range(5):
            queue.append(stream.popleft())
        for request in list(admissible(queue, SmallOnly(), Skips())):
            queue.admit(request)
            num_admitted += 1
    assert head.num_overtaken == num_admitted == MAX_OVERTAKEN
