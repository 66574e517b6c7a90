"""Who gets what of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightserve.cost.model import StepShape, chunk_pairs
from lightserve.router.kv.cache import KVStore
from lightserve.router.kv.prefix_node import PrefixNode
from lightserve.router.request import RUNNING, Request
from lightserve.router.request_table import Decodes, RequestTable, Rows
from lightserve.types import RequestClass


class Allotment(NamedTuple):
    """One request's share of a step: its next `num_tokens` tokens."""

    request: Request
    num_tokens: int


class Loading(NamedTuple):
    """One request's share of the copies beside a step: so much more of its KV comes back.

    It is paused and stays so; it runs in a later step.
    """

    request: Request
    num_tokens: int


Share = Decodes | Allotment | Loading
"""A part of what a policy chooses."""


def each_allotment(parts: Iterable[Decodes | Allotment]) -> Iterator[Allotment]:
    """Iterate over the requests of parts, one by one."""
    for part in parts:
        if isinstance(part, Decodes):
            yield from (Allotment(request, 1) for request in part.requests)
        else:
            yield part


def decodes_and_chunks(
    table: RequestTable, parts: Iterable[Decodes | Allotment]
) -> tuple[Decodes, tuple[Allotment, ...]]:
    """Return all decodes of a step together, and the rest of it, both in order."""
    rows: list[Rows] = []
    chunks: list[Allotment] = []
    for part in parts:
        if isinstance(part, Decodes):
            rows.append(part.rows)
        elif part.num_tokens == 1 and part.request.is_decoding:
            rows.append(np.array([part.request.row], dtype=np.int64))
        else:
            chunks.append(part)
    all_rows = np.concatenate([np.empty(0, dtype=np.int64), *rows]) if len(rows) != 1 else rows[0]
    return Decodes(table, all_rows).kept(), tuple(chunks)


def shape_of(parts: Iterable[Decodes | Allotment]) -> StepShape:
    """Return a step's shape, before its requests have moved."""
    num_new = decode_context = chunk_context = pairs = num_decodes = num_chunks = 0
    for part in parts:
        if isinstance(part, Decodes):
            num_new += len(part.rows)
            num_decodes += len(part.rows)
            decode_context += part.num_context_tokens
            continue
        request, num_tokens = part
        start = request.next_position
        num_new += num_tokens
        if num_tokens == 1:
            decode_context += start
            num_decodes += 1
        else:
            pairs += chunk_pairs(start, num_tokens)
            chunk_context += start
            num_chunks += 1
    return StepShape(num_new, decode_context, pairs, num_decodes, num_chunks, chunk_context)


# Why requests do not advance in a step (architecture 7, step 8; mechanisms T17).
#
# Every request that the planner considered and left out has one reason, the first that was found;
# those that it never looked at are one record per class: how many, and what stopped the scan.

_CLASSES = tuple(RequestClass)


class Reason(StrEnum):
    """What keeps a request out of a step."""

    TIME = "time"
    """The step would take longer than its limit."""
    TOKENS = "tokens"
    """The token budget of the step is used up."""
    BYTES = "bytes"
    """The plan already holds as much of newcomers' tokens and parameters as it may."""
    ROWS = "rows"
    """No row is free, or as many best-effort requests run as may, or as many requests begin in this
    step as may."""
    KV_NOW = "kv_now"
    """Memory: not enough slots for this step, or they were taken from it."""
    KV_FUTURE = "kv_future"
    """Memory: admission expects the pool to run out."""
    ORDER = "order"
    """It is others' turn: somebody before it waits, or a better one took its place."""
    LOADING = "loading"
    """Its KV is on its way back from the host, or waits for the link."""
    BLOCKED = "blocked"
    """It has nothing to compute: its frontend is to catch up with its output first, or its last
    token is in flight, or another request is just computing its prefix."""


Skipped = tuple[Request, Reason]
"""A request that was considered and left out."""

_REASONS = tuple(Reason)
_CODES = {reason: code for code, reason in enumerate(_REASONS, start=1)}
"""In columns of reasons; 0: none."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Requests that a step leaves out, and why."""

    waiting: Mapping[Request, Reason]
    requests: Sequence[Request] = ()
    """Some that run."""
    codes: Sequence[int] = ()
    """Their reasons, see `count`."""

    def each(self) -> tuple[Skipped, ...]:
        """Return them one by one."""
        running = zip(self.requests, self.codes, strict=True)
        return (*((r, _REASONS[code - 1]) for r, code in running), *self.waiting.items())

    def count(self) -> dict[RequestClass, Counter[Reason]]:
        """Return how many of each class have which reason."""
        counts: dict[RequestClass, Counter[Reason]] = {of: Counter() for of in _CLASSES}
        for request, reason in self.each():
            counts[request.request_class][reason] += 1
        return counts


NOTHING_LEFT_OUT = LeftOut({})


class Unseen(NamedTuple):
    """Those of a class who wait and were not looked at."""

    num_requests: int
    stopped_by: Reason | None
    """What ended the scan; None: there are none."""


@dataclass(slots=True)
class Skips:
    """What a planned step leaves out; made anew for every plan, for all attempts at it.

    Whom a later attempt chooses after all has its reason taken back by `of_step`.
    """

    table: RequestTable | None = None
    """Of the requests that run."""
    reasons: dict[Request, Reason] = field(default_factory=dict)
    """Of those that have no row."""
    stopped_by: dict[RequestClass, Reason] = field(default_factory=dict)
    """What ended the scan of those of a class that wait."""
    limit_s: float | None = None
    """The time limit of the step, where the policy sets one."""
    best_effort_s: float | None = None
    """What best-effort requests add to its time, where a share is theirs and they want more."""
    _codes: npt.NDArray[np.int8] = field(init=False)
    """Reasons of those that have a row, by row."""

    def __post_init__(self) -> None:
        num_rows = 0 if self.table is None else self.table.num_rows
        self._codes = np.zeros(num_rows, dtype=np.int8)

    def note(self, request: Request, reason: Reason) -> None:
        """Say why a request is left out; the first reason stays."""
        if request.row is None or self.table is None:
            self.reasons.setdefault(request, reason)
        elif self._codes[request.row] == 0:
            self._codes[request.row] = _CODES[reason]

    def note_rows(self, rows: Rows, reason: Reason) -> None:
        """Say the same of requests that run."""
        if len(rows):
            self._codes[rows[self._codes[rows] == 0]] = _CODES[reason]

    def reason_of(self, request: Request) -> Reason | None:
        """Return what was said of a request."""
        if request.row is None or self.table is None:
            return self.reasons.get(request)
        code = int(self._codes[request.row])
        return _REASONS[code - 1] if code else None

    def take_back(self, request: Request, reason: Reason) -> None:
        """Forget a reason that was given before its turn."""
        if self.reason_of(request) is reason:
            self._forget(request)

    def _forget(self, request: Request) -> None:
        if request.row is None or self.table is None:
            self.reasons.pop(request, None)
        else:
            self._codes[request.row] = 0

    def note_all(self, requests: Iterable[Request], reason: Reason) -> None:
        """Say the same of several, though some of them may have had nothing to compute."""
        for request in requests:
            self.note(request, reason)

    def stop(self, request_class: RequestClass, reason: Reason) -> None:
        """Say why nobody else of a class who waits was looked at; the first reason stays."""
        self.stopped_by.setdefault(request_class, reason)

    def stop_all(self, reason: Reason, classes: Iterable[RequestClass] = _CLASSES) -> None:
        """Say the same of several classes."""
        for request_class in classes:
            self.stop(request_class, reason)

    def lose(self, request: Request, reason: Reason) -> None:
        """Say that a running request stops for another: this stands over what was said before."""
        self._forget(request)
        self.note(request, reason)

    def of_step(self, decodes: Decodes, chunks: Iterable[Allotment]) -> LeftOut:
        """Return what a step leaves out that moves these."""
        for request, _ in chunks:
            self._forget(request)
        if self.table is None:
            return LeftOut(self.reasons)
        self._codes[decodes.rows] = 0
        rows = np.flatnonzero(self._codes)
        if not len(rows):
            return LeftOut(self.reasons)
        return LeftOut(self.reasons, self.table.of(rows), self._codes[rows].tolist())


# What of a step fits into memory and rows, and what must happen before it is sent.


class Take(NamedTuple):
    """The last tokens that a paused request holds, to be taken from it."""

    request: Request
    num_tokens: int


@dataclass(frozen=True)
class Fit:
    """What of a step fits, and what must happen before."""

    parts: tuple[Decodes | Allotment, ...]
    """What advances."""
    pauses: tuple[Request, ...] = ()
    """Running requests that give up their rows."""
    takes: tuple[Take, ...] = ()
    drops: tuple[Request, ...] = ()
    """Requests that lose all their KV."""
    refused: Mapping[Request, Reason] = field(default_factory=dict)
    """Whom the policy chose in vain."""
    stopped_for: Mapping[Request, Reason] = field(default_factory=dict)
    """Of those who run and stop: whether memory or their row is needed."""
    loads: tuple[Loading, ...] = ()
    """What comes back from the host beside the step, for requests that stay paused."""
    forecast_peak: int | None = None
    """See `AdmissionRound`."""

    def __bool__(self) -> bool:
        """Whether any request advances."""
        return bool(self.parts)

    @property
    def allotments(self) -> list[Allotment]:
        """`parts`, one by one: for tests."""
        return list(each_allotment(self.parts))

    @property
    def newcomers(self) -> list[Request]:
        """Requests among `parts` that have no row yet."""
        chunks = [part for part in self.parts if isinstance(part, Allotment)]
        return [request for request, _ in chunks if request.state is not RUNNING]

    @property
    def num_copied(self) -> int:
        """Tokens that the step copies at most, to the host and back."""
        num_loaded = sum(request.num_loaded_by_start for request in self.newcomers)
        return num_loaded + sum(count for _, count in self.takes)

    @property
    def stops(self) -> tuple[Request, ...]:
        """Those who run now, and stop: this must not be decided while their steps are in flight."""
        return tuple(dict.fromkeys([*self.pauses, *filter(runs, self.drops)]))


class Tails:
    """How much could be taken from whom, remembered while nothing but a plan of it changes."""

    def __init__(self, kv: KVStore) -> None:
        self._kv = kv
        self._pinned: Container[PrefixNode] = ()
        self._found: dict[Request, int] = {}

    def takeable(self, request: Request, pinned: Container[PrefixNode]) -> int:
        """See `KVStore.takeable`; another `pinned` is another object."""
        if pinned is not self._pinned:
            self._pinned, self._found = pinned, {}
        if (found := self._found.get(request)) is None:
            found = self._found[request] = self._kv.takeable(request, pinned)
        return found


def runs(request: Request) -> bool:
    """Whether a request has a row, and has not ended."""
    return request.state is RUNNING


def of_running(part: Share) -> bool:
    """Whether that is so of the requests of a part."""
    return isinstance(part, Decodes) or part.request.state is RUNNING
