"""How much of a step's time is lent to best-effort requests."""

from __future__ import annotations

from collections.abc import Sequence

from lightserve.router.policies.base import StepLimits
from lightserve.router.request import Request

IDLE_LIMIT_S = 0.1
"""Limit of a step without deadlines: an arrival waits for the rest of it."""
EASY_SHARE, FULL_SHARE = 0.3, 0.6
"""Shares of the KV pool in real-time hands from which on best-effort requests get less time, and
at which they get none."""


def time_for_best_effort(real_time: Sequence[Request], limits: StepLimits) -> float:
    """Return the seconds that a step with best-effort requests may take.

    Longer steps keep real-time requests, and their KV, for longer: at the same rate of arrival
    memory grows with the time per token. So the more of it they hold, the less time is lent.
    """
    share = sum(request.num_held_tokens for request in real_time) / limits.num_slots
    return IDLE_LIMIT_S * min(1.0, max(0.0, (FULL_SHARE - share) / (FULL_SHARE - EASY_SHARE)))
