"""Which real-time requests that are late start, and when.

Whoever runs gets a token in every step, so that a share of those who run is a share of time. While
requests whose first token was late are fewer than `--late-min-share` of all that run, one more
starts before those that can be in time. Otherwise they start last, and only while memory is left
for arrivals that can be in time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from lightserve.router.policies.base import StepLimits, Waiting
from lightserve.router.reasons import Reason, Skips
from lightserve.router.request import Request
from lightserve.router.request_table import RequestTable, Rows
from lightserve.types import RT

LATE_POOL_SHARE = 0.8
"""Beyond their share of time late requests start while real-time ones hold less of the pool."""


class Turn(NamedTuple):
    """What late requests may do before all others in a step."""

    has_prompts: bool
    """Those in progress go first."""
    has_newcomer: bool
    """One of those that wait does."""


def turn_of_late(table: RequestTable, real_time: Rows, min_share: float, step_number: int) -> Turn:
    """Return what is theirs, as long as fewer of them run than should at least.

    Among few, a single one would be more than the share: then only every so many steps.
    """
    num_late = int(np.count_nonzero(table.is_first_late[real_time]))
    most = min_share * len(real_time)
    is_turn = num_late < most and step_number % round(1 / min_share) == 0
    return Turn(is_turn, is_turn or num_late + 1 <= most)


def in_order(
    waiting: Waiting, num_held: int, limits: StepLimits, *, late_first: bool
) -> Iterable[Request]:
    """Return who waits and may start, in order: one late request first, or all last or not at all.

    `num_held` tokens are those of real-time requests that run.
    """
    if late_first and (late := next(iter(waiting.late()), None)) is not None:
        others = (r for r in waiting.of(RT) if r is not late)
        return itertools.chain([late], others)
    if num_held < LATE_POOL_SHARE * limits.num_slots:
        return waiting.of(RT)
    return _until_late(waiting, limits.skips)


def _until_late(waiting: Waiting, skips: Skips) -> Iterator[Request]:
    """Yield those who can be in time, or have started before; late ones, who come last, wait."""
    first_late = next(iter(waiting.late()), None)
    for request in waiting.of(RT):
        if request is first_late:
            skips.stop(RT, Reason.ORDER)
            return
        yield request
