"""No best-effort request waits for ever: every sixteenth to start is the oldest that waits.

Whatever the order in which the others start (by shared prefixes, by what fits), of any OLDEST_EVERY
best-effort requests that start one after the other at least one was the oldest of those that could:
first by priority, then by arrival, those that were paused among them. Where it does not fit, the
others wait with it. So one that has n before it starts within OLDEST_EVERY * (n + 1) starts, and n
never grows, as newcomers are younger. (Those before it that are paused and start again count again:
each time they have computed something, and what they have to compute is finite.)

Not in this order are jobs that are urgent by their completion time, and requests of one priority
wait for those of a smaller number for as long as these come.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lightserve.router.request import Request

OLDEST_EVERY = 16


class Turn:
    """Whose turn it is, in a step that is being planned."""

    def __init__(self, in_order: Iterable[Request] = (), num_since: int = 0) -> None:
        """Begin where the step before ended.

        Args:
            in_order: best-effort requests that wait, the oldest first; read as far as needed.
            num_since: how many others have started since the oldest did.
        """
        self._rest: Iterator[Request] = (r for r in in_order if r.num_schedulable_tokens > 0)
        self._oldest: Request | None = None
        self._is_known = False
        self._num_since = num_since
        self._started: set[Request] = set()

    @property
    def is_of_oldest(self) -> bool:
        """Whether no other may start."""
        return self._num_since >= OLDEST_EVERY - 1

    @property
    def oldest(self) -> Request | None:
        """The oldest of those that wait and could start; None: there is none."""
        if not self._is_known:
            self._oldest = next((r for r in self._rest if r not in self._started), None)
            self._is_known = True
        return self._oldest

    @property
    def next_if_oldest(self) -> Request | None:
        """The oldest, if no other may start."""
        return self.oldest if self.is_of_oldest else None

    def allows(self, request: Request) -> bool:
        """Whether a request may start now."""
        return not self.is_of_oldest or self.oldest in (None, request)

    def note(self, request: Request) -> None:
        """Take in that a request starts in this step."""
        self._started.add(request)
        if request is self.oldest:
            self._num_since, self._is_known = 0, False
        else:
            self._num_since += 1
