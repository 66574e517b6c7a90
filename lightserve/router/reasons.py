"""Why requests do not advance in a step (architecture 7, step 8; mechanisms T17).

Every request that the planner considered and left out has one reason, the first that was found;
those that it never looked at are one record per class: how many, and what stopped the scan.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from lightserve.router.request import Request
from lightserve.types import RequestClass


class Reason(StrEnum):
    """What keeps a request out of a step."""

    TIME = "time"
    """The step would take longer than its limit."""
    TOKENS = "tokens"
    """The token budget of the step is used up."""
    ROWS = "rows"
    """No row is free, or as many best-effort requests run as may."""
    KV_NOW = "kv_now"
    """Memory: not enough slots for this step, or they were taken from it."""
    KV_FUTURE = "kv_future"
    """Memory: admission expects the pool to run out."""
    ORDER = "order"
    """It is others' turn: somebody before it waits, or a better one took its place."""
    BLOCKED = "blocked"
    """It has nothing to compute: its frontend is to catch up with its output first, or its last
    token is in flight, or another request is just computing its prefix."""


@dataclass(slots=True)
class Skips:
    """What a planned step leaves out; made anew for every attempt."""

    reasons: dict[Request, Reason] = field(default_factory=dict)
    stopped_by: dict[RequestClass, Reason] = field(default_factory=dict)
    """What ended the scan of those of a class that wait."""

    def note(self, request: Request, reason: Reason) -> None:
        """Say why a request is left out; the first reason stays."""
        self.reasons.setdefault(request, reason)

    def stop(self, request_class: RequestClass, reason: Reason) -> None:
        """Say why nobody else of a class who waits was looked at; the first reason stays."""
        self.stopped_by.setdefault(request_class, reason)
