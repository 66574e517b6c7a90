"""Why requests do not advance in a step (architecture 7, step 8; mechanisms T17).

Every request that the planner considered and left out has one reason, the first that was found;
those that it never looked at are one record per class: how many, and what stopped the scan.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from lightserve.router.request import Request
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

    reasons: dict[Request, Reason] = field(default_factory=dict)
    stopped_by: dict[RequestClass, Reason] = field(default_factory=dict)
    """What ended the scan of those of a class that wait."""
    limit_s: float | None = None
    """The time limit of the step, where the policy sets one."""
    best_effort_s: float | None = None
    """What best-effort requests add to its time, where a share is theirs and they want more."""

    def note(self, request: Request, reason: Reason) -> None:
        """Say why a request is left out; the first reason stays."""
        self.reasons.setdefault(request, reason)

    def take_back(self, request: Request, reason: Reason) -> None:
        """Forget a reason that was given before its turn."""
        if self.reasons.get(request) is reason:
            del self.reasons[request]

    def note_all(self, requests: Iterable[Request], reason: Reason) -> None:
        """Say the same of several, though some of them may have had nothing to compute."""
        self.reasons = dict.fromkeys(requests, reason) | self.reasons

    def stop(self, request_class: RequestClass, reason: Reason) -> None:
        """Say why nobody else of a class who waits was looked at; the first reason stays."""
        self.stopped_by.setdefault(request_class, reason)

    def stop_all(self, reason: Reason, classes: Iterable[RequestClass] = _CLASSES) -> None:
        """Say the same of several classes."""
        for request_class in classes:
            self.stop(request_class, reason)

    def lose(self, request: Request, reason: Reason) -> None:
        """Say that a running request stops for another: this stands over what was said before."""
        self.reasons[request] = reason

    def of_step(self, advancing: Collection[Request]) -> tuple[Skipped, ...]:
        """Return whom a step leaves out that moves `advancing`."""
        if not self.reasons.keys().isdisjoint(advancing):
            for request in advancing:
                self.reasons.pop(request, None)
        return tuple(self.reasons.items())
