"""Who keeps a seat, which is a row and the memory of a request, where keys share the engine.

Requests of a class are numbered: of each key the first has 0, the next 1, and so on; behind a key
the first of each of its clients come before the second of any. Who has a smaller number keeps
memory longer; among equals it is the one that was admitted earlier.

    key "alice"   a0  a1  a2  a3                  in order: a0 b0 a1 b1 a2 a3
    key "bob"     b0  b1

One without a running request is owed a seat while another key has more than its share: its first
request may start whatever is forecast, before all others of its class, and takes the seat of one
with a larger number. That one is paused and goes on later. It gives up its seat at most once in
SEAT_KEPT_S, and a real-time one only if no best-effort one can.

Pure. Where there is one key, nothing is numbered and nothing is owed.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np

from lightserve.router.accounts import Account
from lightserve.router.request import WAITING, FoundOf, Request, progress
from lightserve.router.request_table import RequestTable, Rows
from lightserve.types import RequestClass

SEAT_KEPT_S = 5.0
"""Time in which a request gives up its seat to another key at most once."""


class Seats:
    """The seats of a step that is being planned."""

    def __init__(
        self,
        running: Collection[Request] = (),
        heads: Mapping[RequestClass, Sequence[Request]] = {},
        now_s: float = 0.0,
    ) -> None:
        """Number what runs.

        Args:
            running: requests that run, in order of admission.
            heads: of each class the first request of each account that waits.
            now_s: the time.
        """
        self.owed: dict[Request, None] = {}
        """Requests that wait and are owed a seat."""
        self._kept: set[Request] = set()
        """Requests that run and have given up their seat of late."""
        self.is_shared = False
        """Whether requests of several accounts run or wait in a class."""
        self._number_of: dict[Request, int] = {}
        for request_class in RequestClass:
            waiting = heads.get(request_class, ())
            seated = [r for r in running if r.request_class is request_class]
            accounts = {request.account for request in seated}
            others = [request for request in waiting if request.account not in accounts]
            if len(accounts) + len(others) > 1:
                self.is_shared = True
                self._number(seated, others)
        if self.owed:
            self._kept = {r for r in running if now_s - r.gave_seat_s < SEAT_KEPT_S}

    def _number(self, seated: Sequence[Request], others: Sequence[Request]) -> None:
        """Number the requests of a class, and those without a seat that are owed one."""
        of_keys: defaultdict[Account | None, list[tuple[int, Request]]] = defaultdict(list)
        counts: defaultdict[Account | None, int] = defaultdict(int)
        for request in seated:
            of_keys[_key_of(request)].append((counts[request.account], request))
            counts[request.account] += 1
        largest = 0
        num_clients: dict[Account | None, int] = {}
        for key, numbered in of_keys.items():
            numbered.sort(key=lambda item: item[0])
            self._number_of |= {request: number for number, (_, request) in enumerate(numbered)}
            largest = max(largest, len(numbered) - 1)
            num_clients[key] = sum(number == 0 for number, _ in numbered)
        for request in others:
            number = num_clients.get(key := _key_of(request), 0)
            if number < largest:
                num_clients[key] = number + 1
                self._number_of[request] = number
                self.owed[request] = None

    def in_order(self, requests: Sequence[Request]) -> list[Request]:
        """Return requests of a class, those that keep their memory longest first.

        They are in order of admission; those that are owed a seat come behind their equals.
        """
        if not self._number_of:
            return list(requests)
        return sorted(requests, key=lambda request: self._number_of.get(request, 0))

    def rows_in_order(self, table: RequestTable) -> Rows:
        """Return the rows of all that run in this order."""
        rows = table.rows
        if not self._number_of:
            return rows
        numbers = [self._number_of.get(request, 0) for request in table.of(rows)]
        in_order: Rows = rows[np.argsort(numbers, kind="stable")]
        return in_order

    def keeps(self, request: Request, taker: Request | None) -> bool:
        """Return whether a request does not give up its seat now to one of its class that waits."""
        if request not in self._kept or taker is None or taker.state is not WAITING:
            return False
        return taker.request_class is request.request_class

    def given(self, paused: Iterable[Request], newcomers: Iterable[Request]) -> tuple[Request, ...]:
        """Return which requests are paused in a step for newcomers that are owed their seats."""
        classes = {request.request_class for request in newcomers if request in self.owed}
        return tuple(request for request in paused if request.request_class in classes)

    def owed_of(self, request_class: RequestClass) -> list[Request]:
        """Return the requests of a class that are owed a seat."""
        return [request for request in self.owed if request.request_class is request_class]


NO_SEATS = Seats()
"""Where requests are of one account, or accounts do not count."""


def in_turn(
    waiting: Mapping[Account | None, Iterable[Request]], found: FoundOf = progress
) -> Iterator[Request]:
    """Yield requests so that each time the account goes first that has had least.

    What was yielded before counts as had; of keys that have had as much the first one goes first.
    Those of one account keep their order.

    Args:
        waiting: by account; read as far as needed.
        found: says how much each has to compute.
    """
    if len(waiting) < 2:
        yield from itertools.chain.from_iterable(waiting.values())
        return
    keys: dict[Account | None, _Turns] = {}
    for account, requests in waiting.items():
        key = None if account is None else account.key
        if key not in keys:
            keys[key] = _Turns(0.0 if key is None else key.served, found)
        keys[key].add(0.0 if account is None else account.served, iter(requests))
    of_keys = [(turns.had, number, turns) for number, turns in enumerate(keys.values())]
    heapq.heapify(of_keys)
    while of_keys:
        _, number, turns = of_keys[0]
        if (request := turns.next()) is None:
            heapq.heappop(of_keys)
            continue
        heapq.heapreplace(of_keys, (turns.had, number, turns))
        yield request


class _Turns:
    """The accounts behind a key, while requests are put in order."""

    def __init__(self, had: float, found: FoundOf) -> None:
        self._found = found
        self.had = had
        """Tokens that the key has had, including requests put in order."""
        self._accounts: list[tuple[float, int, Iterator[Request]]] = []

    def add(self, had: float, requests: Iterator[Request]) -> None:
        """Add an account."""
        heapq.heappush(self._accounts, (had, len(self._accounts), requests))

    def next(self) -> Request | None:
        """Return the next request; None: there are no more."""
        while self._accounts:
            had, number, requests = self._accounts[0]
            if (request := next(requests, None)) is not None:
                num_left = self._found(request).num_left
                self.had += num_left
                had += num_left
                heapq.heapreplace(self._accounts, (had, number, requests))
                return request
            heapq.heappop(self._accounts)
        return None


def in_fair_order(requests: Iterable[Request], found: FoundOf = progress) -> list[Request]:
    """Return requests as they come `in_turn`."""
    waiting: dict[Account | None, list[Request]] = {}
    for request in requests:
        waiting.setdefault(request.account, []).append(request)
    return list(in_turn(waiting, found))


def has_had_less(request: Request, other: Request) -> bool:
    """Return whether a request is of another account, which has had less."""
    return request.account is not other.account and had_of(request) < had_of(other)


def had_of(request: Request) -> tuple[float, float]:
    """Return what a request's key and account have had."""
    return (0.0, 0.0) if request.account is None else request.account.rank


def _key_of(request: Request) -> Account | None:
    return None if request.account is None else request.account.key
