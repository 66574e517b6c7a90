"""What happened to requests' KV, and why they waited, counted per class since boot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from lightserve.router.events import PlannedStep
from lightserve.router.reasons import Reason
from lightserve.types import RequestClass


@dataclass(slots=True)
class KVCounters:
    """Counters of one request class; tokens are those of its own requests."""

    num_pauses: int = 0
    """Times that a running request lost its row or memory to another."""
    num_evictions: int = 0
    """Times that a request, running or paused, lost KV to another."""
    taken_tokens: int = 0
    """Tokens whose slots went to another request, and which are on the host."""
    saved_tokens: int = 0
    """Those of them that had to be copied in the step that took them."""
    ahead_tokens: int = 0
    """Tokens that were copied to the host before anybody needed their slots."""
    loaded_tokens: int = 0
    """Tokens that came back from the host."""
    lost_tokens: int = 0
    """Tokens whose KV was given up, and has to be computed again unless it is found as cache."""


class SkipCounters:
    """Whom steps left out, and why (mechanisms T17)."""

    def __init__(self) -> None:
        self.skipped: Mapping[RequestClass, Counter[Reason]]
        """Times that a request was considered for a step and left out."""
        self.skipped = {request_class: Counter() for request_class in RequestClass}
        self.unseen: Mapping[RequestClass, Counter[Reason]]
        """Times that a request was not considered for a step, by what had stopped the scan."""
        self.unseen = {request_class: Counter() for request_class in RequestClass}

    def note(self, step: PlannedStep) -> None:
        """Count a step that is sent."""
        for request_class, counts in step.left_out.count().items():
            self.skipped[request_class].update(counts)
        for request_class, (num_requests, stopped_by) in step.unseen.items():
            if stopped_by is not None:
                self.unseen[request_class][stopped_by] += num_requests
