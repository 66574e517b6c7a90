"""Threads whose time clients share, so that none waits for all that another has sent.

A frontend parses bodies, decodes pictures, encodes prompts and asks its store in such threads. A
client is an API key, see `WHOSE`. Of those that wait the one that has had least time is next: one
that sends large pictures does not hold up the small ones of another. One that comes has had at
least as much as the one that began last (start-time fair queueing): what others left it to take
does not count against it. When there is no work, all is forgotten.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

WHOSE: ContextVar[str] = ContextVar("whose", default="")
"""The key that the current work is for; empty: without keys, and for lines of batches."""


@dataclass(eq=False)
class _Waiting:
    """Work that no thread has begun."""

    work: Callable[[], Any] | None
    """None: it was given up."""
    done: Future[Any] = field(default_factory=Future)


class TurnThreads:
    """See the module. The work of one client is begun in the order in which it came."""

    def __init__(
        self, num_threads: int, name: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`name` is how the threads' names begin; `clock` says the time in seconds."""
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._clock = clock
        self._lines: dict[str, deque[_Waiting]] = {}
        """By client, the one that has waited longest for its turn first; none is empty."""
        self._running: Counter[str] = Counter()
        """Work that is done for each client."""
        self._had_s: dict[str, float] = {}
        """Time of each client since there was no work, with that of others when it came."""
        self._begun_s = 0.0
        """Time that the client whose work began last had had by then; it never falls."""

    async def run(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, which a thread does; raise its error.

        Work that is given up before it begins is forgotten at once: its place among all that waits
        stays until its turn, and keeps nothing alive.
        """
        waiting = _Waiting(work)
        with self._lock:
            if (whose := WHOSE.get()) not in self._lines:
                self._had_s[whose] = max(self._had_s.get(whose, 0.0), self._begun_s)
            self._lines.setdefault(whose, deque()).append(waiting)
        try:
            self._threads.submit(self._take_turn)
            result: T = await asyncio.wrap_future(waiting.done)
            return result
        finally:
            waiting.work = None

    def _take_turn(self) -> None:
        """Do the first piece of work of the client whose turn it is."""
        with self._lock:
            if not self._lines:
                return  # it was dropped
            whose = min(self._lines, key=self._had_s.__getitem__)
            self._begun_s = self._had_s[whose]
            line = self._lines.pop(whose)
            waiting = line.popleft()
            if line:
                self._lines[whose] = line  # behind all others
            self._running[whose] += 1
        start_s = self._clock()
        if (work := waiting.work) is not None and waiting.done.set_running_or_notify_cancel():
            try:
                waiting.done.set_result(work())
            except BaseException as error:
                waiting.done.set_exception(error)
        with self._lock:
            self._had_s[whose] += self._clock() - start_s
            self._running[whose] -= 1
            if not self._running[whose]:
                del self._running[whose]
            if not self._running and not self._lines:
                self._had_s.clear()
                self._begun_s = 0.0

    def close(self, last: Callable[[], None] = lambda: None) -> None:
        """Let running work end, drop what waits, and do `last` in a thread."""
        with self._lock:
            dropped = [waiting for line in self._lines.values() for waiting in line]
            self._lines.clear()
        for waiting in dropped:
            waiting.done.cancel()
        self._threads.submit(last)
        self._threads.shutdown(wait=False)
