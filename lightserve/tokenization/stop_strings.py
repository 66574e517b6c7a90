"""Finds stop strings in text that comes in pieces, and holds back what may become one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Stopped:
    """A stop string is complete."""

    text: str
    """What may still be shown: the text before it, or with it if it is to be included."""
    stop: str


class StopMatcher:
    """Watches one output. The stop string that is complete first ends it; of several that are
    complete with the same piece, the one that begins first (the longest of them) counts."""

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        """`stops` are not empty; `include` says whether the output shows the one that ended it."""
        self._stops = tuple(stops)
        self._include = include
        self._longest = max(map(len, stops))
        self._held = ""

    def push(self, text: str) -> str | Stopped:
        """Add text; return what certainly belongs to no stop string, or the end."""
        held = self._held + text
        found = [(held.find(stop), -len(stop), stop) for stop in self._stops if stop in held]
        if found:
            start, _, stop = min(found)
            return Stopped(held[: start + len(stop) if self._include else start], stop)
        keep = self._num_undecided(held)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def finish(self) -> str:
        """Return what was held back: the output ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _num_undecided(self, text: str) -> int:
        """Return the length of the longest end of a text that begins some stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
