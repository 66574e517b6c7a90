"""The router's queue: waiting requests in order."""

from __future__ import annotations

import bisect
import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from lightserve.router.be_pool import BEPool
from lightserve.router.deadline_queue import DeadlineQueue
from lightserve.router.kv.prefix_tree import PrefixTree
from lightserve.router.lanes import PriorityLanes
from lightserve.router.request import Request
from lightserve.router.rows import RowTable as RowTable  # noqa: PLC0414
from lightserve.router.slo import CompletionLedger
from lightserve.router.turns import Turn
from lightserve.types import BE, RT, RequestClass, RequestKey


class Backlog(NamedTuple):
    """How much waits."""

    num_requests: int
    num_tokens: int
    """That have to be computed before the first new one."""
    num_output_tokens: int = 0
    """Most that may come yet."""


class WaitingQueue:
    """Who waits, by class: those put back first, then by priority, then first come, first served.

    Real-time requests that have deadlines come by these, not by arrival.

    Removal from anywhere is O(log n). Best-effort requests that never ran are in a pool that
    knows which of them share prefixes (`be_pool`).
    """

    def __init__(self) -> None:
        self._requeued: dict[RequestClass, OrderedDict[RequestKey, Request]] = {
            request_class: OrderedDict() for request_class in RequestClass
        }
        self._real_time = PriorityLanes()
        """Those that never ran, under policies that do not look at deadlines."""
        self._due = DeadlineQueue()
        """Under those that do."""
        self._late: OrderedDict[RequestKey, Request] = OrderedDict()
        """Real-time ones that never ran, and whose first token is late."""
        self._best_effort = BEPool()
        self.num_since_oldest = 0
        """Best-effort requests that have started since the oldest of them did."""
        self._jobs: list[_Job] = []
        """Best-effort requests with a completion time, those that are to end first before others;
        they wait where all of their class do as well."""
        self._backlogs = dict.fromkeys(RequestClass, Backlog(0, 0))

    def __len__(self) -> int:
        return sum(backlog.num_requests for backlog in self._backlogs.values())

    def __iter__(self) -> Iterator[Request]:
        """Iterate from the head; those that never ran, of all classes, by priority and arrival."""
        turn = self.turn()
        oldest = turn.oldest if turn.is_of_oldest else None
        yield from self._requeued[RT].values()
        if oldest is not None:
            yield oldest
        yield from (r for r in self._requeued[BE].values() if r is not oldest)
        yield from self._late.values()
        fresh = self._real_time.noted(), self._best_effort.noted(), sorted(self._due, key=_place)
        yield from (r for r in heapq.merge(*fresh, key=_place) if r is not oldest)

    def real_time(self) -> Iterator[Request]:
        """Iterate over real-time requests in the order in which they should start."""
        yield from self._requeued[RT].values()
        yield from self._due
        yield from self._real_time.noted()
        yield from self._late.values()

    def late(self) -> Iterable[Request]:
        """Return the real-time requests that never ran and are late, in order."""
        return self._late.values()

    def sink_late(self, now_s: float) -> None:
        """Put real-time requests that are late behind all others of their class.

        Those of the first priority are late in the order in which they wait, so that the head is
        all there is to look at; those of others are found late when they come to the head.
        """
        while (head := next(iter(self._due), None)) is not None:
            assert head.deadlines is not None
            if head.deadlines.residual(now_s) > 0:
                return
            self._due.remove(head)
            self._late[head.key] = head

    def best_effort(
        self, turn: Turn, resident: PrefixTree | None, context_len: float
    ) -> Iterator[Request]:
        """Iterate over the best-effort requests that are worth asking (see `BEPool.candidates`).

        The first is the oldest where it is its turn.
        """
        oldest = turn.oldest if turn.is_of_oldest else None
        if oldest is not None:
            yield oldest
        yield from (r for r in self._requeued[BE].values() if r is not oldest)
        next(self._best_effort.noted(), None)  # notes how often the first was overtaken
        candidates = self._best_effort.candidates(resident, context_len=context_len)
        yield from (r for r in candidates if r is not oldest)

    def turn(self) -> Turn:
        """Return whose turn it is among best-effort requests."""
        return Turn(self._oldest_first(), self.num_since_oldest)

    def _oldest_first(self) -> Iterator[Request]:
        requeued = sorted(self._requeued[BE].values(), key=_place)
        yield from heapq.merge(requeued, self._best_effort, key=_place)

    def jobs(self) -> Iterator[Request]:
        """Iterate over the best-effort requests with a completion time, the earliest first."""
        return (job.request for job in self._jobs)

    def paused(self, request_class: RequestClass) -> Iterator[Request]:
        """Iterate over those of a class that keep KV, from the head."""
        return (r for r in self._requeued[request_class].values() if r.is_paused)

    def backlog(self, request_class: RequestClass) -> Backlog:
        """Return how much of a class waits."""
        return self._backlogs[request_class]

    def append(self, request: Request) -> None:
        """Add a request behind those of its class and priority."""
        self._fresh(request).append(request)
        self._count(request, 1)

    def requeue(self, requests: Sequence[Request]) -> None:
        """Put requests back before all others of their class, in the given order."""
        for request in reversed(requests):
            requeued = self._requeued[request.request_class]
            requeued[request.key] = request
            requeued.move_to_end(request.key, last=False)
            self._count(request, 1)

    def admit(self, request: Request) -> None:
        """Take a request out to run it; those of its class that were before it are overtaken."""
        if request.request_class is BE:
            is_oldest = request is self.turn().oldest
            self.num_since_oldest = 0 if is_oldest else self.num_since_oldest + 1
        if request in (fresh := self._fresh(request)):
            fresh.admit(request)
            self._count(request, -1)
            for requeued in self._requeued[request.request_class].values():
                requeued.num_overtaken += 1
        else:
            for requeued in self._requeued[request.request_class].values():
                if requeued is request:
                    break
                requeued.num_overtaken += 1
            self.remove(request)

    def remove(self, request: Request) -> None:
        """Take a request out. Raises KeyError if it is not waiting."""
        put_back = self._requeued[request.request_class].pop(request.key, None)
        if put_back is None and self._late.pop(request.key, None) is None:
            self._fresh(request).remove(request)
        self._count(request, -1)

    def _fresh(self, request: Request) -> PriorityLanes | DeadlineQueue | BEPool:
        """Return where a request waits that never ran."""
        if request.request_class is BE:
            return self._best_effort
        return self._real_time if request.deadlines is None else self._due

    def _count(self, request: Request, sign: int) -> None:
        """Add or take off a request; while it waits, its known tokens do not change."""
        ledger = request.deadlines
        if isinstance(ledger, CompletionLedger) and request.request_class is BE:
            job = _Job(ledger.end_s, request.arrival_number, request)
            place = bisect.bisect_left(self._jobs, job)
            self._jobs[place : place + int(sign < 0)] = [job] if sign > 0 else []
        before = self._backlogs[request.request_class]
        num_left = request.max_tokens - len(request.output_token_ids)
        self._backlogs[request.request_class] = Backlog(
            before.num_requests + sign,
            before.num_tokens + sign * request.num_known_tokens,
            before.num_output_tokens + sign * num_left,
        )


class _Job(NamedTuple):
    end_s: float
    arrival_number: int
    request: Request


def _place(request: Request) -> tuple[int, int]:
    return request.priority, request.arrival_number
