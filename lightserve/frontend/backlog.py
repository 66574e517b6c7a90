"""What waits for a thread: bounded in number and in size, refused beyond."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from lightserve.frontend.failures import overloaded

MAX_ITEMS = 4096
"""As many requests as may wait in the router by default: a burst that fits there gets there."""
MAX_SIZE = 64 * 1024 * 1024
"""Characters of texts or bytes of bodies, of all together."""


T = TypeVar("T")


class Backlog:
    """Counts who waits; one that is alone may be of any size, as that has limits of its own."""

    def __init__(self, *, max_items: int = MAX_ITEMS, max_size: int = MAX_SIZE) -> None:
        self._max_items, self._max_size = max_items, max_size
        self._num_items = self._size = 0

    @contextmanager
    def admitted(self, size: int) -> Iterator[None]:
        """Count one more of this size while the context is open. Raises RequestFailed (429)."""
        is_too_large = self._num_items > 0 and self._size + size > self._max_size
        if self._num_items >= self._max_items or is_too_large:
            raise overloaded()
        self._num_items += 1
        self._size += size
        try:
            yield
        finally:
            self._num_items -= 1
            self._size -= size

    async def in_thread(self, threads: ThreadPoolExecutor, work: Callable[[], T], size: int) -> T:
        """Do work of this size in one of the threads. Raises RequestFailed (429).

        Work that is given up before it begins is forgotten at once: its place among what the
        threads have yet to do stays until they come to it, and must keep nothing alive.
        """
        waiting = [work]

        def begin() -> T:
            return waiting.pop()()

        with self.admitted(size):
            try:
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(threads, begin)
            finally:
                waiting.clear()
