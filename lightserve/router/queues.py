"""The router's queues: waiting requests in order, running ones by row."""

from __future__ import annotations

import bisect
import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lightserve.router.request import Request
from lightserve.types import RequestClass, RequestKey, RowId


class Backlog(NamedTuple):
    """How much waits."""

    num_requests: int
    num_tokens: int
    """That have to be computed before the first new one."""


class WaitingQueue:
    """Who waits, by class: those put back first, then first come, first served.

    Removal from anywhere is O(log n). Best-effort requests that never ran are in a pool that
    knows which of them share prefixes (`be_pool`).
    """

    def __init__(self) -> None:
        self._requeued: dict[RequestClass, OrderedDict[RequestKey, Request]] = {
            request_class: OrderedDict() for request_class in RequestClass
        }
        self._fresh: dict[RequestClass, OrderedDict[RequestKey, Request]] = {
            request_class: OrderedDict() for request_class in RequestClass
        }
        self._overtakers: dict[RequestClass, list[int]] = {
            request_class: [] for request_class in RequestClass
        }
        """Arrival numbers, ascending, of those admitted before the first fresh one, but later."""
        self._backlogs = dict.fromkeys(RequestClass, Backlog(0, 0))

    def __len__(self) -> int:
        return sum(backlog.num_requests for backlog in self._backlogs.values())

    def __iter__(self) -> Iterator[Request]:
        """Iterate from the head; requests of all classes that never ran in order of arrival."""
        for requeued in self._requeued.values():
            yield from requeued.values()
        yield from heapq.merge(*map(self._first_come, RequestClass), key=_arrival_number)

    def of(self, request_class: RequestClass) -> Iterator[Request]:
        """Iterate over one class in the order in which its requests should start."""
        yield from self._requeued[request_class].values()
        yield from self._first_come(request_class)

    def paused(self, request_class: RequestClass) -> Iterator[Request]:
        """Iterate over those of a class that keep KV, from the head."""
        return (r for r in self._requeued[request_class].values() if r.is_paused)

    def _first_come(self, request_class: RequestClass) -> Iterator[Request]:
        overtakers = self._overtakers[request_class]
        for request in self._fresh[request_class].values():
            after = bisect.bisect_right(overtakers, request.arrival_number)
            request.num_overtaken = len(overtakers) - after
            yield request

    def backlog(self, request_class: RequestClass) -> Backlog:
        """Return how much of a class waits."""
        return self._backlogs[request_class]

    def append(self, request: Request) -> None:
        """Add a request at the tail."""
        self._fresh[request.request_class][request.key] = request
        self._count(request, 1)

    def requeue(self, requests: Sequence[Request]) -> None:
        """Put requests back before all others of their class, in the given order."""
        for request in reversed(requests):
            requeued = self._requeued[request.request_class]
            requeued[request.key] = request
            requeued.move_to_end(request.key, last=False)
            self._count(request, 1)

    def admit(self, request: Request) -> None:
        """Take a request out to run it; those of its class that came before are overtaken."""
        if request.key in self._fresh[request.request_class]:
            bisect.insort(self._overtakers[request.request_class], request.arrival_number)
        self.remove(request)

    def remove(self, request: Request) -> None:
        """Take a request out. Raises KeyError if it is not waiting."""
        request_class = request.request_class
        if self._requeued[request_class].pop(request.key, None) is None:
            del self._fresh[request_class][request.key]
            self._forget_overtakers(request_class)
        self._count(request, -1)

    def _forget_overtakers(self, request_class: RequestClass) -> None:
        """Keep those alone that overtook somebody who still waits."""
        fresh, overtakers = self._fresh[request_class], self._overtakers[request_class]
        head = next(iter(fresh.values()), None)
        if head is None:
            overtakers.clear()
        else:
            del overtakers[: bisect.bisect_right(overtakers, head.arrival_number)]

    def _count(self, request: Request, sign: int) -> None:
        """Add or take off a request; while it waits, its known tokens do not change."""
        before = self._backlogs[request.request_class]
        self._backlogs[request.request_class] = Backlog(
            before.num_requests + sign, before.num_tokens + sign * request.num_known_tokens
        )


def _arrival_number(request: Request) -> int:
    return request.arrival_number


class RowTable:
    """Rows of the workers' tables: which are free, and who runs in the others."""

    def __init__(self, num_rows: int) -> None:
        self._free = list(range(num_rows))
        self._requests: dict[RowId, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Iterate over requests that hold a row, in order of admission."""
        return iter(self._requests.values())

    @property
    def num_free(self) -> int:
        """Rows that nobody holds."""
        return len(self._free)

    def acquire(self, request: Request) -> RowId:
        """Give the lowest free row to a request."""
        row = RowId(heapq.heappop(self._free))
        self._requests[row] = request
        request.row = row
        return row

    def release(self, request: Request) -> None:
        """Take a request's row back."""
        assert request.row is not None
        del self._requests[request.row]
        heapq.heappush(self._free, request.row)
        request.row = None
