"""Aggressive admission: only what is held now counts, up to a watermark.

The second baseline of the Past-Future paper (section 2.3; vLLM's and SGLang's way): no look at
the future, so running requests are preempted when it comes.
"""

from __future__ import annotations

from collections.abc import Collection

from lightserve.router.admission.base import ALWAYS, PoolView
from lightserve.router.admission.sharing import SharedPrefixes
from lightserve.router.request import Request
from lightserve.types import StepId


class AggressiveRound:
    """Counts what is held and what newcomers bring; what several hold counts once."""

    def __init__(self, live: Collection[Request], limit: float) -> None:
        self._shared = SharedPrefixes(live)
        num_known = sum(request.num_known_tokens for request in live)
        self._num_held = num_known - self._shared.num_counted_twice
        self._limit = limit

    def admit(self, request: Request) -> bool:
        """Admit if all known tokens together stay below the watermark, or it is alone."""
        num_new = request.num_known_tokens - self._shared.num_held_of(request)
        if self._num_held > 0 and self._num_held + num_new > self._limit:
            return False
        self._shared.add(request)
        self._num_held += num_new
        return True

    def steps_refused(self, request: Request) -> int:
        """What is held only grows until somebody leaves."""
        del request
        return ALWAYS


class AggressiveAdmission:
    """`watermark` is a share of the pool."""

    forecast_peak: int | None = None

    def __init__(self, *, watermark: float) -> None:
        self._watermark = watermark

    def begin(self, live: Collection[Request], pool: PoolView, step_id: StepId) -> AggressiveRound:
        """Start a round; nothing in it is random."""
        del step_id
        return AggressiveRound(live, pool.num_slots * self._watermark)
