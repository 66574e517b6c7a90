"""Whose lines are leased next: keys share, as far as the windows that were promised allow it.

Of keys that have lines waiting, the one goes first that has had the least: the virtual token
counter of Sheng et al., "Fairness in Serving Large Language Models", as the router has it for
requests. What is counted is what a line takes of an idle engine, when it is leased. Once a promise
would not be kept so, promised batches go before others, by the ends of their windows, until there
is time to spare again.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from lightserve.batches.forecast import MARGIN, Pace


class Backlog(NamedTuple):
    """What is left of a batch."""

    key_name: str
    expires_s: float
    is_promised: bool
    seconds: float
    """Of an idle engine."""
    num_lines: int


def line_costs(backlogs: Iterable[Backlog]) -> dict[str, float]:
    """Return what a line of each key takes of an idle engine, in seconds, at the mean."""
    sums: dict[str, tuple[float, int]] = {}
    for backlog in backlogs:
        seconds, num_lines = sums.get(backlog.key_name, (0.0, 0))
        sums[backlog.key_name] = seconds + backlog.seconds, num_lines + backlog.num_lines
    return {key: max(1e-6, seconds / max(1, num)) for key, (seconds, num) in sums.items()}


def can_share(backlogs: Iterable[Backlog], pace: Pace, now_s: float) -> bool:
    """Return whether every promise is kept, with its margin, if keys share evenly.

    By the time that a key has had `work` of the engine, every other one has had as much, or all
    that it wants.
    """
    waiting = sorted(backlogs, key=lambda backlog: backlog.expires_s)
    totals: dict[str, float] = {}
    for backlog in waiting:
        totals[backlog.key_name] = totals.get(backlog.key_name, 0.0) + backlog.seconds
    work = dict.fromkeys(totals, 0.0)
    for backlog in waiting:
        work[backlog.key_name] += backlog.seconds
        if backlog.is_promised:
            until = sum(min(work[backlog.key_name], total) for total in totals.values())
            if now_s + until * MARGIN / pace.low_share > backlog.expires_s:
                return False
    return True


class Turns:
    """How much each key has had that has lines waiting; one that comes saves up nothing."""

    def __init__(self) -> None:
        self._had: dict[str, float] = {}

    def split(self, costs: Mapping[str, float], num_lines: int) -> dict[str, int]:
        """Return how many of so many lines are each key's, by what one takes; and count them."""
        least = min((had for key, had in self._had.items() if key in costs), default=0.0)
        self._had = {key: max(least, self._had.get(key, least)) for key in costs}
        turns = [(had, key) for key, had in self._had.items()]
        heapq.heapify(turns)
        portions: dict[str, int] = {}
        for _ in range(num_lines if turns else 0):
            had, key = turns[0]
            portions[key] = portions.get(key, 0) + 1
            self._had[key] = had + costs[key]
            heapq.heapreplace(turns, (self._had[key], key))
        return portions

    def give_back(self, key: str, cost: float, num_lines: int) -> None:
        """Count so many lines less: the key has no more."""
        self._had[key] -= cost * num_lines
