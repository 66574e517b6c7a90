"""The router's queues: waiting requests in order, running ones by row."""

from __future__ import annotations

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
    """First come, first served, with O(1) removal from anywhere."""

    def __init__(self) -> None:
        self._requests: OrderedDict[RequestKey, Request] = OrderedDict()
        self._backlogs = dict.fromkeys(RequestClass, Backlog(0, 0))

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Iterate from the head."""
        return iter(self._requests.values())

    def backlog(self, request_class: RequestClass) -> Backlog:
        """Return how much of a class waits."""
        return self._backlogs[request_class]

    def append(self, request: Request) -> None:
        """Add a request at the tail."""
        self._requests[request.key] = request
        self._count(request, 1)

    def requeue(self, requests: Sequence[Request]) -> None:
        """Put requests back before all others, in the given order."""
        for request in reversed(requests):
            self.append(request)
            self._requests.move_to_end(request.key, last=False)

    def admit(self, request: Request) -> None:
        """Take a request out to run it; those before it have been overtaken."""
        for waiting in self._requests.values():
            if waiting is request:
                break
            waiting.num_overtaken += 1
        self.remove(request)

    def remove(self, request: Request) -> None:
        """Take a request out. Raises KeyError if it is not waiting."""
        del self._requests[request.key]
        self._count(request, -1)

    def _count(self, request: Request, sign: int) -> None:
        """Add or take off a request; while it waits, its known tokens do not change."""
        before = self._backlogs[request.request_class]
        self._backlogs[request.request_class] = Backlog(
            before.num_requests + sign, before.num_tokens + sign * request.num_known_tokens
        )


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
