"""A store for an asyncio process: one thread that has it open, and opens it again after a fault."""

from __future__ import annotations

import asyncio
import contextlib
import logging
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

    def __init__(self, directory: Path) -> None:
        self.database = Database(directory)
        self.files = Files(self.database)
        self.jobs = Jobs(self.database)
        self.forecasts = Forecasts(self.database)
        self.responses = Responses(self.database)


class StoreThread:
    """See the module. A call waits for those before it; the event loop does not."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._store: Store | None = None
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="store")

    async def run(self, work: Callable[[Store], T]) -> T:
        """Return what `work` does with the store.

        Raises:
            StoreError: the store cannot be read or written now.
            InvalidRequest: as `work` does.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, work)

    def _run(self, work: Callable[[Store], T]) -> T:
        if self._store is None:
            self._store = Store(self._directory)
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
