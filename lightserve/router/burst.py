"""Burst headroom: KV that best-effort requests leave free for real-time arrivals (Echo, E8).

The core calls `note_arrival` for every real-time request that it takes in; planning reads
`headroom`, which `ClasswiseAdmission` takes off the pool of best-effort newcomers.

Time is cut into intervals of the length that headroom is wanted for. Over the intervals of the
last quarter of an hour (Echo's window) the tokens that arrived in one have a mean and a standard
deviation; mean + 2 deviations stay free. An interval counts once it is over, and the answer is
rounded up to a hundredth of the pool: so it seldom changes, and what admission remembers about
refusals (`admission.risk`) lasts.
"""

from __future__ import annotations

import math
from collections import deque

from lightserve.router.output_lengths import OutputLengths
from lightserve.router.request import Request

WINDOW_S = 900.0
MIN_INTERVALS = 20
"""A window is at least this many intervals long: fewer have no deviation worth its name."""
NUM_DEVIATIONS = 2.0
POOL_STEPS = 100


def expected_kv_tokens(request: Request, lengths: OutputLengths) -> int:
    """Return the slots that a new request is going to need at its end, on average."""
    return request.num_prompt_tokens + math.ceil(min(request.max_tokens, lengths.average)) - 1


class BurstHeadroom:
    """Rolling statistics of the real-time tokens per interval; pure, O(1) per call (amortised)."""

    def __init__(self, interval_s: float) -> None:
        """`interval_s` 0 leaves no headroom."""
        self._interval_s = interval_s
        self.num_tokens = 0
        """The answer that was given last."""
        self._num_intervals = 0
        """Length of the window."""
        if interval_s > 0:
            self._num_intervals = max(MIN_INTERVALS, round(WINDOW_S / interval_s))
        self._first: int | None = None
        """The interval in which time began; intervals are counted from time 0."""
        self._current = 0
        self._arriving = 0
        """Tokens in the current interval."""
        self._past: deque[tuple[int, int]] = deque()
        """Intervals of the window in which anything arrived, and the tokens."""
        self._sum = 0
        self._sum_of_squares = 0

    def note_arrival(self, now_s: float, num_tokens: int) -> None:
        """Learn that a real-time request has come that will need so many tokens of KV."""
        if self._num_intervals > 0:
            self._advance(now_s)
            self._arriving += num_tokens

    def headroom(self, now_s: float, num_slots: int) -> int:
        """Return the slots of a pool of `num_slots` that best-effort newcomers must leave."""
        self.num_tokens = self._headroom(now_s, num_slots)
        return self.num_tokens

    def _headroom(self, now_s: float, num_slots: int) -> int:
        if self._num_intervals == 0:
            return 0
        self._advance(now_s)
        assert self._first is not None
        count = min(self._num_intervals, self._current - self._first)
        if count == 0 or self._sum == 0:
            return 0
        mean = self._sum / count
        variance = max(0.0, self._sum_of_squares / count - mean * mean)
        step = max(1, num_slots // POOL_STEPS)
        wanted = mean + NUM_DEVIATIONS * math.sqrt(variance)
        return min(num_slots, math.ceil(wanted / step) * step)

    def _advance(self, now_s: float) -> None:
        """Close the intervals that are over; those out of the window count no more."""
        interval = int(now_s // self._interval_s)
        if self._first is None:
            self._first = self._current = interval
        if interval <= self._current:
            return
        if self._arriving > 0:
            self._past.append((self._current, self._arriving))
            self._count(self._arriving, 1)
        self._current, self._arriving = interval, 0
        while self._past and self._past[0][0] < interval - self._num_intervals:
            self._count(self._past.popleft()[1], -1)

    def _count(self, num_tokens: int, sign: int) -> None:
        self._sum += sign * num_tokens
        self._sum_of_squares += sign * num_tokens * num_tokens
