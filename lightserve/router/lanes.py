"""Requests of one class that never ran: lower priority numbers first, equal ones as they came.

One lane per priority in use (few, as the API bounds them), each in order of arrival: adding and
removing costs a dictionary's time, and a search among the lanes for the first of a priority and
after the last. Each request knows how many of those behind it were admitted before it, which
policies bound.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Iterator

from lightserve.router.request import Request
from lightserve.types import RequestKey


class _Lane:
    """Requests of one priority."""

    def __init__(self) -> None:
        self.requests: OrderedDict[RequestKey, Request] = OrderedDict()
        self.overtakings: list[int] = []
        """Per admission of somebody behind: those with smaller arrival numbers were overtaken."""

    def forget_overtakings(self) -> None:
        """Keep those alone that somebody who still waits has suffered."""
        head = next(iter(self.requests.values()))
        del self.overtakings[: bisect.bisect_right(self.overtakings, head.arrival_number)]


class PriorityLanes:
    """See the module."""

    def __init__(self) -> None:
        self._lanes: dict[int, _Lane] = {}
        self._priorities: list[int] = []
        """Those of the lanes, ascending; no lane is empty."""

    def __contains__(self, request: Request) -> bool:
        lane = self._lanes.get(request.priority)
        return lane is not None and request.key in lane.requests

    def __len__(self) -> int:
        return sum(len(lane.requests) for lane in self._lanes.values())

    def __iter__(self) -> Iterator[Request]:
        """Iterate in order."""
        for priority in self._priorities:
            yield from self._lanes[priority].requests.values()

    def noted(self) -> Iterator[Request]:
        """Iterate in order, noting on each how often it was overtaken."""
        for priority in self._priorities:
            lane = self._lanes[priority]
            for request in lane.requests.values():
                after = bisect.bisect_right(lane.overtakings, request.arrival_number)
                request.num_overtaken = len(lane.overtakings) - after
                yield request

    def append(self, request: Request) -> None:
        """Add a request behind those of its priority."""
        if request.priority not in self._lanes:
            self._lanes[request.priority] = _Lane()
            bisect.insort(self._priorities, request.priority)
        self._lanes[request.priority].requests[request.key] = request

    def remove(self, request: Request) -> None:
        """Take a request out. Raises KeyError if it is not here."""
        lane = self._lanes[request.priority]
        del lane.requests[request.key]
        if lane.requests:
            lane.forget_overtakings()
        else:
            del self._lanes[request.priority]
            self._priorities.remove(request.priority)

    def admit(self, request: Request) -> None:
        """Take a request out to run it: those before it are overtaken. Raises KeyError."""
        for priority in self._priorities[: bisect.bisect_left(self._priorities, request.priority)]:
            before = self._lanes[priority]
            youngest = next(reversed(before.requests.values()))
            bisect.insort(before.overtakings, youngest.arrival_number + 1)
        bisect.insort(self._lanes[request.priority].overtakings, request.arrival_number)
        self.remove(request)
