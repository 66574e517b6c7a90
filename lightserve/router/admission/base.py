"""Which waiting requests may start, by memory: the interface of an admission rule."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from lightserve.router.request import FoundOf, Request, progress


@dataclass(frozen=True)
class PoolView:
    """The KV pool as an admission rule sees it."""

    num_slots: int
    headroom: int = 0
    """Slots that best-effort requests may not count on (`router.arrivals`); real-time ones may.

    Only class-aware policies leave any, so only `ClasswiseAdmission` reads it.
    """
    be_room: Callable[[], int | None] = lambda: None
    """Returns the tokens that best-effort newcomers may bring so that all could be saved on the
    host if real-time requests came to hold twice as much as they did of late; None: nothing is
    saved."""
    found: FoundOf = progress
    """Tells what newcomers find in the prefix tree."""


class AdmissionRound(Protocol):
    """One plan's decisions; forgotten when the plan is not committed."""

    @property
    def forecast_peak(self) -> int | None:
        """Tokens that the batch is expected to need at its peak, as the rule bounds them.

        As of the last admission; None before the first one, or if the rule does not look ahead.
        """

    def admit(self, request: Request) -> bool:
        """Decide whether a waiting request may start now; an admitted one counts from here on."""


class AdmissionRule(Protocol):
    """Decides by memory alone; pure, so that the simulator and the tests run the same code."""

    def begin(self, live: Collection[Request], pool: PoolView) -> AdmissionRound:
        """Start a round; `live` are all requests that hold rows, ended ones in flight included.

        Answers depend on the state of the requests, the pool and the history alone, not on
        which rounds there were before.
        """
