"""Who may start, by memory: the interface of an admission rule."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from lightserve.router.request import Request
from lightserve.types import StepId

ALWAYS = 1 << 40
"""Steps: until somebody leaves."""


@dataclass(frozen=True)
class PoolView:
    """What an admission rule is told of the KV pool."""

    num_slots: int
    headroom: int = 0
    """Slots that best-effort requests may not count on (`router.burst`); real-time ones may.

    Only class-aware policies leave any, so only `ClasswiseAdmission` reads it.
    """
    be_room: int | None = None
    """Tokens that best-effort newcomers may bring so that all could be saved on the host if
    real-time requests came to hold twice as much as they did of late; None: nothing is saved."""
    lease_version: int = 0
    """Another one whenever some request has come to hold other tokens of the prefix tree."""


class AdmissionRound(Protocol):
    """One plan's decisions; forgotten when the plan is not committed."""

    def admit(self, request: Request) -> bool:
        """Decide whether a waiting request may start now; an admitted one counts from here on."""

    def steps_refused(self, request: Request) -> int:
        """Return for how many decode steps a request refused just now is certain to be again.

        Steps of all live requests, if nobody leaves, no prompt or answer ends, and so nobody comes
        to share other KV; 0 is always right.
        """


class AdmissionRule(Protocol):
    """Decides by memory alone; pure, so that the simulator and the tests run the same code."""

    @property
    def forecast_peak(self) -> int | None:
        """Tokens that the batch was expected to need at its peak when somebody was last admitted.

        As the rule bounds them; None if nobody was, or the rule does not look ahead.
        """

    def begin(self, live: Collection[Request], pool: PoolView, step_id: StepId) -> AdmissionRound:
        """Start a round; `live` are all requests that hold rows, ended ones in flight included.

        The same round results from the same state: whatever is drawn at random depends on
        `step_id` alone.
        """
