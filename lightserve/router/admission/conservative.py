"""Conservative admission: everybody gets room for `max_tokens`, so memory never runs out.

The first baseline of the Past-Future paper (section 2.3); it wastes what requests do not
generate, unless `overcommit` promises more than there is, and then memory can run out.
"""

from __future__ import annotations

from collections.abc import Collection

from lightserve.router.admission.base import ALWAYS, PoolView
from lightserve.router.request import Request
from lightserve.types import StepId


class ConservativeRound:
    """Counts the tokens that could still be needed at the worst moment."""

    def __init__(self, num_reserved: int, num_slots: int) -> None:
        self._num_reserved = num_reserved
        self._num_slots = num_slots

    def admit(self, request: Request) -> bool:
        """Admit if all reservations together fit into the pool, or it is alone."""
        if self._num_reserved > 0 and self._num_reserved + _worst_case(request) > self._num_slots:
            return False
        self._num_reserved += _worst_case(request)
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
        reserved = sum(map(_worst_case, live))
        return ConservativeRound(reserved, int(pool.num_slots * self._overcommit))


def _worst_case(request: Request) -> int:
    """Slots it can come to hold; the last output token's KV is never written."""
    return request.num_prompt_tokens + request.admission_limit - 1
