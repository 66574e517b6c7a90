"""Queues bounded per class, in requests and tokens."""

from __future__ import annotations

import pytest
from support.core_scenes import Arrival, make_core, submit

from lightserve.messages.frontend_router import ClassLoad, ErrorCode, RequestDelta
from lightserve.router.events import FromFrontend
from lightserve.router.intake import QueueLimits
from lightserve.router.queues import Backlog
from lightserve.router.waits import MIN_RETRY_S
from lightserve.types import FrontendId, RequestClass

FRONTEND = FrontendId(0)


@pytest.mark.parametrize(
    ("backlog", "num_prompt_tokens", "has_room"),
    [
        (Backlog(0, 0), 10, True),
        (Backlog(0, 0), 1000, True),  # has the queue for itself
        (Backlog(3, 30), 10, True),
        (Backlog(3, 30), 71, False),
        (Backlog(3, 30), 70, True),
        (Backlog(4, 4), 1, False),
    ],
)
def test_room(backlog: Backlog, num_prompt_tokens: int, has_room: bool) -> None:
    assert QueueLimits(4, 100).has_room(backlog, num_prompt_tokens) is has_room


def test_one_class_does_not_fill_the_queue_of_the_other() -> None:
    core = make_core("chunked", max_waiting=2)

    def says(number: int, request_class: RequestClass) -> list[RequestDelta]:
        message = submit(number, Arrival(0.0, 8, 4, 4, request_class=request_class))
        news = core.on_message(FromFrontend(FRONTEND, message), 1.0)
        return [delta for outgoing in news for delta in outgoing.message.requests]

    for number in range(2):
        assert says(number, RequestClass.BE) == []
    (refusal,) = says(2, RequestClass.BE)
    assert refusal.error is ErrorCode.QUEUE_FULL and refusal.retry_after_s == MIN_RETRY_S
    assert says(3, RequestClass.RT) == []
    assert core.status(1.0).load == {
        RequestClass.BE: ClassLoad(2, 16, 0),
        RequestClass.RT: ClassLoad(1, 8, 0),
    }
