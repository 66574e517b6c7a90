"""A store for an asyncio process: one thread that has it open, and opens it again after a fault."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

from lightserve.batches import sqlite
from lightserve.batches.contents import Contents, Store
from lightserve.batches.database import Database
from lightserve.batches.files import Files
from lightserve.config import ServeConfig
from lightserve.config.fields import is_postgres
from lightserve.errors import StartupError, StoreError, StoreUnusable
from lightserve.extras import missing_extra
from lightserve.turn_threads import TurnThreads

if TYPE_CHECKING:
    from lightserve.batches.objects import Objects

log = logging.getLogger(__name__)

T = TypeVar("T")


IDLE_S = 1.0
"""After so long without use a connection is looked at before it is used: its server may have been
started again meanwhile, and a transaction that fails is not tried again."""
REST_S = 1.0
"""A store that cannot be opened is not tried again for so long: those who wait learn it at once."""


def location_of(config: ServeConfig) -> str:
    """Return where a server has its store; empty: it has none.

    A relative XDG_STATE_HOME does not count, as the XDG Base Directory Specification has it.

    Raises:
        StoreUnusable: it has one of its own, and no home for it.
    """
    if config.batch_store != "auto":
        return "" if config.batch_store == "none" else config.batch_store
    base = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not base.is_absolute():
        try:
            base = Path.home() / ".local" / "state"
        except RuntimeError:
            why = "there is no home directory, and XDG_STATE_HOME names no place"
            raise StoreUnusable("auto", why) from None
    return str(base / "lightserve" / f"batches-{config.port}")


def prepare(location: str, file_store: str = "") -> ExitStack:
    """Bring the schema of a store up to date, and take it for this server where it has only one.

    Closing what is returned lets others have it. `file_store`: as --file-store says.

    Raises:
        StartupError: it cannot be used.
    """
    held = ExitStack()
    if is_postgres(location):
        _postgres().prepare(location)
    else:
        held.enter_context(closing(sqlite.prepare(Path(location))))
    try:
        _check_objects(location, file_store)
    except StoreError as error:
        held.close()
        raise StartupError(f"--file-store {file_store}: {error}") from error
    except BaseException:
        held.close()
        raise
    return held


def _check_objects(location: str, file_store: str) -> None:
    """Check that objects can be written, and those are there that the store knows of.

    Raises:
        StartupError, StoreError: not so.
    """
    with closing(_open(location, 0)) as database:
        newest = Files(database).in_objects()
    if not file_store:
        if newest is not None:
            raise StoreUnusable(location, "it has files in objects: --file-store is missing")
        return
    objects = _objects(file_store)
    objects.check()
    if newest is not None and not objects.has(newest.id, newest.num_bytes):
        raise StoreError(f"the files of --batch-store {location} are not there")


def is_unused(location: str) -> bool:
    """Return whether nothing is kept in a store that was prepared.

    Raises:
        StoreUnusable: it cannot be read.
    """
    kept = ("files", "batches", "responses")
    try:
        with closing(_open(location, 0)) as database:
            return not any(database.value(f"SELECT EXISTS (SELECT 1 FROM {name})") for name in kept)
    except StoreError as error:
        raise StoreUnusable(location, error) from error


def listen(location: str, on_hint: Callable[[], object]) -> ExitStack:
    """Call `on_hint`, in another thread, when servers say that there is work; until this is closed.

    A store of one server has no hints.
    """
    listening = ExitStack()
    if is_postgres(location):
        listening.enter_context(closing(_postgres().Listener(location, on_hint)))
    return listening


def _postgres() -> ModuleType:
    """Load it. Raises StartupError: its packages are not there."""
    return _load("postgres", "psycopg", "--batch-store postgresql://…")


def _objects(url: str) -> Objects:
    """Return an object store. Raises StartupError: its packages are not there."""
    objects: Objects = _load("objects", "obstore", "--file-store").Objects(url)
    return objects


def _load(name: str, package: str, option: str) -> ModuleType:
    """Load a module, and packages that an extra of the same name has."""
    try:
        return importlib.import_module(f"lightserve.batches.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise StartupError(f"{option}: {missing_extra(package, name)}") from None


def _open(location: str, min_free_bytes: int) -> Database:
    if is_postgres(location):
        database: Database = _postgres().PostgresDatabase(location)
        return database
    return sqlite.SqliteDatabase(Path(location), min_free_bytes=min_free_bytes)


def store_at(location: str, *, min_free_bytes: int = 0) -> Store:
    """Open a store that was prepared; `location` as --batch-store says."""
    return Store(_open(location, min_free_bytes))


class StoreThread:
    """The thread of a store. Keys take turns in it; the event loop waits for no call."""

    def __init__(
        self,
        location: str,
        *,
        file_store: str = "",
        min_free_bytes: int = 0,
        observe: Callable[[float], None] | None = None,
    ) -> None:
        """`location`, `file_store`: as --batch-store and --file-store say.

        `observe` is told how long each call took, in seconds, its wait included.
        """
        self.contents = Contents(self.run, _objects(file_store) if file_store else None)
        self._location = location
        self._min_free_bytes = min_free_bytes
        self._observe = observe
        self._store: Store | None = None
        self._used_s = 0.0
        """Monotonic: when the store was used last."""
        self._rest_until_s = 0.0
        """Monotonic."""
        self._threads = TurnThreads(1, "store")

    async def run(self, work: Callable[[Store], T]) -> T:
        """Return what `work` does with the store.

        Raises:
            StoreError: the store cannot be read or written now.
            InvalidRequest: as `work` does.
        """
        start_s = time.monotonic()
        try:
            return await self._threads.run(lambda: self._run(work))
        finally:
            if self._observe is not None:
                self._observe(time.monotonic() - start_s)

    def _run(self, work: Callable[[Store], T]) -> T:
        store = self._opened()
        try:
            return work(store)
        except StoreError as error:
            # After an error of the disk, what the connection believes may not be what is there.
            log.error("the batch store: %s", error)
            self._store = None
            with contextlib.suppress(StoreError):
                store.database.close()
            raise

    def _opened(self) -> Store:
        if self._store is not None and time.monotonic() > self._used_s + IDLE_S:
            try:
                self._store.database.check()
            except StoreError:
                self._close()
        self._used_s = time.monotonic()
        if self._store is None:
            if time.monotonic() < self._rest_until_s:
                raise StoreError("it could not be opened a moment ago")
            try:
                self._store = store_at(self._location, min_free_bytes=self._min_free_bytes)
            except StoreError as error:
                log.error("the batch store: %s", error)
                self._rest_until_s = time.monotonic() + REST_S
                raise
        return self._store

    def close(self) -> None:
        """Let running work end; drop what waits."""
        self._threads.close(self._close)

    def _close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            with contextlib.suppress(StoreError):
                store.database.close()
