"""How many restarts are too many."""

from __future__ import annotations

from collections import deque


class RestartBudget:
    """At most `max_restarts` within any `window_s`."""

    def __init__(self, max_restarts: int, window_s: float) -> None:
        self.max_restarts = max_restarts
        self.window_s = window_s
        self._times_s: deque[float] = deque()

    def spend(self, now_s: float) -> bool:
        """Count a restart at `now_s`; False when it is one too many."""
        while self._times_s and self._times_s[0] <= now_s - self.window_s:
            self._times_s.popleft()
        self._times_s.append(now_s)
        return len(self._times_s) <= self.max_restarts
