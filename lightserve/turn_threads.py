"""Threads whose time clients share in turn, so that none waits for all that another has sent.

A frontend parses bodies, encodes prompts and asks its store in such threads. A client is an API
key, see `WHOSE`.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
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

    def __init__(self, num_threads: int, name: str) -> None:
        """`name` is how the threads' names begin."""
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._lines: dict[str, deque[_Waiting]] = {}
        """By client, the one whose turn is next first; none is empty."""

    async def run(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, which a thread does; raise its error.

        Work that is given up before it begins is forgotten at once: its place among all that waits
        stays until its turn, and keeps nothing alive.
        """
        waiting = _Waiting(work)
        with self._lock:
            self._lines.setdefault(WHOSE.get(), deque()).append(waiting)
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
            whose = next(iter(self._lines))
            line = self._lines.pop(whose)
            waiting = line.popleft()
            if line:
                self._lines[whose] = line  # behind all others
        work = waiting.work
        if work is None or not waiting.done.set_running_or_notify_cancel():
            return
        try:
            waiting.done.set_result(work())
        except BaseException as error:
            waiting.done.set_exception(error)

    def close(self, last: Callable[[], None] = lambda: None) -> None:
        """Let running work end, drop what waits, and do `last` in a thread."""
        with self._lock:
            dropped = [waiting for line in self._lines.values() for waiting in line]
            self._lines.clear()
        for waiting in dropped:
            waiting.done.cancel()
        self._threads.submit(last)
        self._threads.shutdown(wait=False)
