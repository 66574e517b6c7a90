"""KV that comes back from the host in a step: what it waits for, and what is loaded beside it.

A request that resumes brings its KV along in the step in which it runs again, if there is time for
all of it. Otherwise it stays paused while its KV comes back bit by bit, beside the steps of others,
and runs in the step after the last bit; it may lose what it has got at any time, at no cost, as
all of it is still on the host. How much is loaded beside a step:

    where copies overlap (GPU)    what the link can do while the step computes, at no cost to it
    where they do not (CPU)       what there is time for in the step: they follow it, a sum

Where copies overlap they make no step longer, unless nothing else is in it, or its own deadline is
too near for bits: then it is waited for, as far as all deadlines are kept.
"""

from __future__ import annotations

import bisect
import math

from lightserve.router.policies.base import StepLimits
from lightserve.router.request import WAITING, Request


class StepLoads:
    """The loads of a step that is being filled."""

    def __init__(self, limits: StepLimits) -> None:
        self._overlaps = limits.overlaps_copies
        self._waited_seconds = limits.load_seconds
        self._beside_seconds = limits.ahead_seconds
        self._num_waited = 0
        self._num_beside = 0

    def seconds(self, num_more: int = 0) -> float:
        """Return what the step takes longer for its loads, and for those of one more request."""
        seconds = 0.0
        if num_waited := self._num_waited + num_more:  # as a rule there are none
            seconds = self._waited_seconds(num_waited)
        if self._num_beside and not self._overlaps:
            seconds += self._beside_seconds(self._num_beside)
        return seconds

    def wait_for(self, request: Request) -> None:
        """Load all that a request lacks before the step: it runs in it."""
        self._num_waited += num_loaded_by(request)

    def can_go_beside(self, request: Request, step_s: float) -> bool:
        """Whether a request that has to load could do so beside the step instead of running in it.

        Another has to be in it, and there has to be an idea of what copies take. `step_s` is
        what it takes without its loads; 0: it is empty.
        """
        return step_s > 0.0 and self._beside_seconds(num_loaded_by(request)) > 0.0

    def is_free_for(self, request: Request, step_s: float, due_s: float) -> bool:
        """Whether loading a request beside steps costs nothing, to itself or to others.

        Its next token is due in `due_s`, perhaps inf; steps are taken to be as long as this one.
        """
        if not self._overlaps:
            return False
        load_s = self._beside_seconds(num_loaded_by(request))
        return (math.ceil(load_s / step_s) + 1) * step_s <= due_s

    def tokens_beside(self, request: Request, step_s: float, limit_s: float) -> int:
        """Return how much of a request there is time to load beside the step.

        Args:
            request: it can go beside the step.
            step_s: what the step takes without its loads.
            limit_s: what it may take with them.
        """
        free_s = step_s
        if not self._overlaps:
            free_s = limit_s - step_s - self._waited_seconds(self._num_waited)
        counts = range(1, num_loaded_by(request) + 1)
        return bisect.bisect_right(
            counts, free_s, key=lambda count: self._beside_seconds(self._num_beside + count)
        )

    def add_beside(self, num_tokens: int) -> None:
        """Load so many tokens beside the step."""
        self._num_beside += num_tokens


def num_loaded_by(request: Request) -> int:
    """Return the tokens that a request brings back when it starts."""
    return request.num_loaded_by_start if request.state is WAITING else 0
