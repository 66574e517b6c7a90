"""Conservative admission: everybody gets room for `max_tokens`, so memory never runs out.

The first baseline of the Past-Future paper (section 2.3); it wastes what requests do not
generate, unless `overcommit` promises more than there is, and then memory can run out.
"""

from __future__ import annotations

from collections.abc import Collection

from lightserve.router.admission.base import ALWAYS, PoolView
from lightserve.router.admission.sharing import SharedPrefixes
from lightserve.router.request import Request
from lightserve.types import StepId


class ConservativeRound:
    """Counts the tokens that could be needed at the worst moment; what several hold, once."""

    def __init__(self, live: Collection[Request], num_slots: int) -> None:
        self._shared = SharedPrefixes(live)
        self._num_reserved = sum(map(_worst_case, live)) - self._shared.num_counted_twice
        self._num_slots = num_slots

    def admit(self, request: Request) -> bool:
        """Admit if all reservations together fit into the pool, or it is alone."""
        num_new = _worst_case(request) - self._shared.num_held_of(request)
        if self._num_reserved > 0 and self._num_reserved + num_new > self._num_slots:
            return False
        self._shared.add(request)
        self._num_reserved += num_new
        return True

    def steps_refused(self, request: Request) -> int:
        """What is reserved stays so until somebody leaves."""
        del request
        return ALWAYS


class ConservativeAdmission:
    """Reserves prompt + max_tokens for every live request, out of `overcommit` times the pool."""

    forecast_peak: int | None = None

    def __init__(self, *, overcommit: float = 1.0) -> None:
        self._overcommit = overcommit

    def begin(
        self, live: Collection[Request], pool: PoolView, step_id: StepId
    ) -> ConservativeRound:
        """Start a round from the reservations of all requests that hold rows."""
        del step_id
        return ConservativeRound(live, int(pool.num_slots * self._overcommit))


def _worst_case(request: Request) -> int:
    """Slots it can come to hold; the last output token's KV is never written."""
    return request.num_prompt_tokens + request.admission_limit - 1
