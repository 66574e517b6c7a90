"""A store for an asyncio process: one thread that has it open, and opens it again after a fault."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from lightserve.batches.database import Database
from lightserve.batches.files import Files
from lightserve.batches.forecast import Forecasts
from lightserve.batches.jobs import Jobs
from lightserve.batches.responses import Responses
from lightserve.errors import StoreError

T = TypeVar("T")

log = logging.getLogger(__name__)


class Store:
    """What is in a database."""

    def __init__(self, directory: Path, *, min_free_bytes: int = 0) -> None:
        self.database = Database(directory, min_free_bytes=min_free_bytes)
        self.files = Files(self.database)
        self.jobs = Jobs(self.database)
        self.forecasts = Forecasts(self.database)
        self.responses = Responses(self.database)


class StoreThread:
    """See the module. A call waits for those before it; the event loop does not."""

    def __init__(
        self,
        directory: Path,
        *,
        min_free_bytes: int = 0,
        observe: Callable[[float], None] | None = None,
    ) -> None:
        """`observe` is told how long each call took, in seconds, its wait included."""
        self._directory = directory
        self._min_free_bytes = min_free_bytes
        self._observe = observe
        self._store: Store | None = None
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="store")

    async def run(self, work: Callable[[Store], T]) -> T:
        """Return what `work` does with the store.

        Raises:
            StoreError: the store cannot be read or written now.
            InvalidRequest: as `work` does.
        """
        start_s = time.monotonic()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, work)
        finally:
            if self._observe is not None:
                self._observe(time.monotonic() - start_s)

    def _run(self, work: Callable[[Store], T]) -> T:
        if self._store is None:
            self._store = Store(self._directory, min_free_bytes=self._min_free_bytes)
        try:
            return work(self._store)
        except StoreError as error:
            # After an error of the disk, what the connection believes may not be what is there.
            log.error("the batch store: %s", error)
            store, self._store = self._store, None
            with contextlib.suppress(StoreError):
                store.database.close()
            raise

    def close(self) -> None:
        """Let running work end; drop what waits."""
        self._threads.shutdown(wait=False, cancel_futures=True)
