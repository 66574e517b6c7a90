"""The router's queues: waiting requests in order, running ones by row."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from lightserve.router.request import Request
from lightserve.types import RequestKey, RowId


class WaitingQueue:
    """First come, first served, with O(1) removal from anywhere."""

    def __init__(self) -> None:
        self._requests: OrderedDict[RequestKey, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Iterate from the head."""
        return iter(self._requests.values())

    def append(self, request: Request) -> None:
        """Add a request at the tail."""
        self._requests[request.key] = request

    def requeue(self, requests: Sequence[Request]) -> None:
        """Put requests back before all others, in the given order."""
        for request in reversed(requests):
            self._requests[request.key] = request
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

    def peek(self, count: int) -> list[RowId]:
        """Return the rows that the next `count` calls of `acquire` will give."""
        return [RowId(row) for row in heapq.nsmallest(count, self._free)]

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
