"""Whose lines are leased next: keys share, as far as the windows that were promised allow it.

Of keys that have lines waiting, the one goes first that has had the least: the virtual token
counter of Sheng et al., "Fairness in Serving Large Language Models", as the router has it for
requests. What is counted is what a line takes of an idle engine, when it is leased. Once a promise
would not be kept so, promised batches go before others, by the ends of their windows, until there
is time to spare again.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Work(NamedTuple):
    """The rest of a batch."""

    number: int
    expires_s: float
    seconds: float
    """Time of an idle engine."""
    num_lines: int = 1
    """Lines without a result."""
    is_promised: bool = True
    """Whether the batch is to be done in its window."""
    key_name: str = ""


def line_costs(works: Iterable[Work]) -> dict[str, float]:
    """Return what a line of each key takes of an idle engine, in seconds, at the mean."""
    sums: dict[str, tuple[float, int]] = {}
    for work in works:
        seconds, num_lines = sums.get(work.key_name, (0.0, 0))
        sums[work.key_name] = seconds + work.seconds, num_lines + work.num_lines
    return {key: max(1e-6, seconds / max(1, num)) for key, (seconds, num) in sums.items()}


def work_until(works: Iterable[Work], *, by_keys: bool) -> dict[int, float]:
    """Return how much of all the work is done once each batch is, by its number.

    `by_keys`: they share evenly. By the time that one has had so much of the engine every other one
    has had as much, or all that it wants; its batches come by the ends of their windows. Otherwise
    all batches do, those that were promised first.
    """
    if not by_keys:
        in_order = sorted(works, key=lambda w: (not w.is_promised, w.expires_s, w.number))
        done_s = itertools.accumulate(work.seconds for work in in_order)
        return dict(zip((work.number for work in in_order), done_s, strict=True))
    in_order = sorted(works, key=lambda work: (work.expires_s, work.number))
    totals: dict[str, float] = {}
    for work in in_order:
        totals[work.key_name] = totals.get(work.key_name, 0.0) + work.seconds
    had = dict.fromkeys(totals, 0.0)
    found = {}
    for work in in_order:
        own = had[work.key_name] = had[work.key_name] + work.seconds
        found[work.number] = sum(min(own, total) for total in totals.values())
    return found


class Turns:
    """Work that each key with waiting lines has had; a key that comes has saved up nothing."""

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
