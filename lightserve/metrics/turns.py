"""How long a loop keeps what waits for it: the time of each turn, by two clocks.

A turn goes from the end of one wait for events to the beginning of the next. What the thread itself
computed in it (`cpu`) says what the code costs; what passed meanwhile (`wall`) also has what other
threads and other programs took. About two microseconds per turn.
"""

from __future__ import annotations

import selectors
import time

from lightserve.metrics.catalogue import LOOP_TURN_MAX, LOOP_TURN_TIME
from lightserve.metrics.recording import Recorder


class TurnClock:
    """Measures the turns of one loop; call `begin` after each wait and `end` before it."""

    def __init__(self, recorder: Recorder, process: str) -> None:
        """`process` is the name that other metrics have of it, such as router-0."""
        role = process.partition("-")[0]
        self._cpu = recorder.histogram(LOOP_TURN_TIME, role, "cpu")
        self._wall = recorder.histogram(LOOP_TURN_TIME, role, "wall")
        self._max_cpu = recorder.gauge(LOOP_TURN_MAX, process, "cpu")
        self._max_wall = recorder.gauge(LOOP_TURN_MAX, process, "wall")
        self._began: tuple[float, float] | None = None

    def begin(self) -> None:
        """Begin a turn."""
        self._began = (time.perf_counter(), time.thread_time())

    def end(self) -> None:
        """End the turn; without one that has begun, as before the first wait, do nothing."""
        if self._began is None:
            return
        cpu_s = time.thread_time() - self._began[1]
        wall_s = time.perf_counter() - self._began[0]
        self._cpu.observe(cpu_s)
        self._wall.observe(wall_s)
        self._max_cpu.value = max(self._max_cpu.value, cpu_s)
        self._max_wall.value = max(self._max_wall.value, wall_s)


class TurnSelector(selectors.DefaultSelector):
    """The selector of an asyncio loop, with a clock around its waits once it has one."""

    def __init__(self) -> None:
        super().__init__()
        self.clock: TurnClock | None = None
        """Turns count from the first wait after it was set: no start is a turn."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for events."""
        if (clock := self.clock) is None:
            return super().select(timeout)
        clock.end()
        events = super().select(timeout)
        clock.begin()
        return events
