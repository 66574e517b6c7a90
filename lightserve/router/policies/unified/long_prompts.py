"""Long prompts one after the other (AccelGen's exclusive allocation; mechanisms A3, C9).

Two long prompts that take turns both end late: each waits for the other's chunks, and both hold
memory meanwhile. So a new one waits until the one in progress is through, however near its own
deadline is, unless it is urgent: it could not meet it any more after one more step. Short prompts
go on. Best-effort prompts need no rule: they follow one another anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lightserve.router.policies.base import LOOK_AHEAD
from lightserve.router.policies.unified.timed_step import TimedStep
from lightserve.router.reasons import Reason, Skips
from lightserve.router.request import Request
from lightserve.types import RT


def one_long_at_once(
    newcomers: Iterable[Request],
    in_progress: Iterable[Request],
    *,
    long_tokens: int,
    step: TimedStep,
    skips: Skips,
) -> Iterator[Request]:
    """Yield real-time newcomers, those left out that would be a second long prompt in progress.

    Args:
        newcomers: who waits, in order.
        in_progress: prompts that run and can be in time; a late one may never end.
        long_tokens: from so many tokens to compute on a prompt is long; 0: none is.
        step: what they would join.
        skips: is told of those left out; LOOK_AHEAD of them end the search.
    """
    num_held = 0
    is_taken = long_tokens > 0 and any(
        request.num_known_tokens - (request.num_cached_tokens or 0) >= long_tokens
        for request in in_progress
    )
    for request in newcomers:
        is_long = request.num_schedulable_tokens >= long_tokens
        if not is_taken or not is_long or step.is_urgent(request):
            yield request
            continue
        skips.note(request, Reason.ORDER)
        num_held += 1
        if num_held == LOOK_AHEAD:
            skips.stop(RT, Reason.ORDER)
            return
