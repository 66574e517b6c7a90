"""An event loop for tests with short time limits, on machines that stand still now and then."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any

TICK_S = 0.02
TIMEOUT_S = 300.0


class _Short(selectors.DefaultSelector):
    """Never waits long at a time."""

    def select(self, timeout: float | None = None) -> Any:
        return super().select(None if timeout is None else min(timeout, TICK_S))


class PatientLoop(asyncio.SelectorEventLoop):
    """Its clock goes on by at most `TICK_S` between two looks at it.

    So the time in which this process was not running does not count, and no timer goes off before
    the loop has turned as often as it does in that time on a machine that is not busy.
    """

    def __init__(self) -> None:
        self._now_s = self._last_s = time.monotonic()
        super().__init__(_Short())

    def time(self) -> float:
        """Return seconds that have been seen passing."""
        now_s = time.monotonic()
        self._now_s += min(now_s - self._last_s, TICK_S)
        self._last_s = now_s
        return self._now_s


def run_patiently(scenario: Coroutine[Any, Any, None]) -> None:
    """Run a scenario in a patient loop; it has `TIMEOUT_S` of that."""
    with asyncio.Runner(loop_factory=PatientLoop) as runner:
        runner.run(asyncio.wait_for(scenario, TIMEOUT_S))
