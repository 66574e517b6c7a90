"""Running requests by row of the workers' tables."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from lightserve.router.request import Request
from lightserve.types import RowId


class RowTable:
    """Rows of the workers' tables: which are free, and who runs in the others."""

    def __init__(self, num_rows: int) -> None:
        self._free = list(range(num_rows))
        self._requests: dict[RowId, Request] = {}
        self._left: set[RowId] = set()

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
        self._left.add(request.row)
        request.row = None

    def take_left(self) -> tuple[RowId, ...]:
        """Return the rows that were taken back since the last call."""
        left, self._left = tuple(sorted(self._left)), set()
        return left
