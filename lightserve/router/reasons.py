"""Why requests do not advance in a step (architecture 7, step 8; mechanisms T17).

Every request that the planner considered and left out has one reason, the first that was found;
those that it never looked at are one record per class: how many, and what stopped the scan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightserve.router.request import Request
from lightserve.router.request_table import Decodes, RequestTable, Rows
from lightserve.router.shares import Allotment
from lightserve.types import RequestClass

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
