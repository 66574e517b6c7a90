"""What is accepted, and what happens: how cautious forecasts have to be, learnt from evictions.

The accepted risk is that of a request: the chance that memory is taken from it at some time of its
life. A forecast has no such number. It is asked again in every step while a request waits, until
it says yes; overflows come in waves; and a history is not the truth. So the quantile of the peak
that a forecast reckons with is no setting. It starts at the accepted risk and moves with what is
seen, as in adaptive conformal inference (Gibbs and Candès, 2021, section 2):

    level <- level + STEP (evicted - accepted)          for each request, evicted = 0 or 1

so that over many requests the share that is evicted is the accepted one, whatever the forecast is
wrong by: the sum of all moves is bounded by the range of the level. The level is in standard
deviations of a normal distribution, not a probability: the same move then means the same for small
risks and large ones, and there is a level for every caution (as in the quantile tracking of
Angelopoulos, Candès and Tibshirani, 2023, section 2.1).

It only falls while requests of the class wait for memory to come: without these less caution buys
nothing, and a quiet night would leave none for the morning.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import NormalDist

from lightserve.types import RequestClass

STEP = 0.1
"""By how much an eviction raises the level."""
LEAST_LEVEL, MOST_LEVEL = -1.0, 6.0
"""The level that accepting anything, and nothing, stands for; it stays in between."""


class AcceptedRisk:
    """The level of each class. Pure; O(1) per call."""

    def __init__(self, accepted: Mapping[RequestClass, float]) -> None:
        """`accepted` is the share of each class that may be evicted, 0 to 1."""
        self._accepted = dict(accepted)
        self._levels = {of: _level(share) for of, share in accepted.items()}

    def level(self, request_class: RequestClass) -> float:
        """Return the quantile of the peak to reckon with, in standard deviations."""
        return self._levels[request_class]

    def note_evicted(self, request_class: RequestClass) -> None:
        """Learn that memory was taken from a request for the first time in its life."""
        self._move(request_class, STEP)

    def note_ended(self, request_class: RequestClass, *, others_wait: bool) -> None:
        """Learn that a request that had started is no more, evicted or not.

        `others_wait`: some of its class wait for memory to come.
        """
        if others_wait:
            self._move(request_class, -STEP * self._accepted[request_class])

    def _move(self, request_class: RequestClass, by: float) -> None:
        level = self._levels[request_class] + by
        self._levels[request_class] = min(MOST_LEVEL, max(LEAST_LEVEL, level))


def _level(share: float) -> float:
    if not 0.0 < share < 1.0:
        return LEAST_LEVEL if share > 0.0 else MOST_LEVEL
    return min(MOST_LEVEL, max(LEAST_LEVEL, NormalDist().inv_cdf(1.0 - share)))
