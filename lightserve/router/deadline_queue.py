"""Real-time requests that never ran, in the order in which their first tokens are due (B8).

Within a priority the earliest deadline goes first: with targets of their own, requests that came
late may be due early. A deadline stands as long as its request waits, so that each is compared
when it comes and when it goes, and never in between.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import NamedTuple

from lightserve.router.request import Request
from lightserve.types import RequestKey


class _Place(NamedTuple):
    priority: int
    due_s: float
    arrival_number: int


class DeadlineQueue:
    """Few thousands at the most (queues are bounded): a sorted list is as good as a tree."""

    def __init__(self) -> None:
        self._places: list[_Place] = []
        self._requests: dict[_Place, Request] = {}
        self._place_of: dict[RequestKey, _Place] = {}

    def __contains__(self, request: Request) -> bool:
        return request.key in self._place_of

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Request]:
        """Iterate in order."""
        return map(self._requests.__getitem__, self._places)

    def append(self, request: Request) -> None:
        """Add a request that has deadlines."""
        assert request.deadlines is not None
        due_s = request.deadlines.deadline_of_next_token
        place = _Place(request.priority, due_s, request.arrival_number)
        bisect.insort(self._places, place)
        self._requests[place] = request
        self._place_of[request.key] = place

    def remove(self, request: Request) -> None:
        """Take a request out. Raises KeyError if it is not here."""
        place = self._place_of.pop(request.key)
        del self._requests[place]
        del self._places[bisect.bisect_left(self._places, place)]

    admit = remove
    """Nobody is overtaken who is due later."""
