"""When Python looks for garbage in the router: often and briefly, never at length (T14).

What the router keeps, tens of thousands of waiting requests and the nodes of their prompts, is
freed by reference counts: nothing of it stays part of a cycle. A full collection would look
through all of it, tens of milliseconds in which no plan leaves. So whatever has lived for a second
is set aside (`gc.freeze`), where no collection looks; should cycles ever have died there, they are
found once the router has had nothing to do for a while.
"""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 10_000
"""Allocations between two looks at the young: a step makes thousands, most gone by its end."""
IDLE_TICKS = 30
"""Without work, before everything is looked through."""


class Collector:
    """One per process, as what it sets is the process's; call `tick` about once a second."""

    def __init__(self) -> None:
        gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
        self._num_idle_ticks = 0
        gc.collect()
        gc.freeze()

    def tick(self, *, is_busy: bool) -> None:
        """Set aside what has become old, or, idle for long enough, look through everything."""
        self._num_idle_ticks = 0 if is_busy else self._num_idle_ticks + 1
        if is_busy:
            gc.collect(1)
            gc.freeze()
        elif self._num_idle_ticks == IDLE_TICKS:
            gc.unfreeze()
            gc.collect()
            gc.freeze()
