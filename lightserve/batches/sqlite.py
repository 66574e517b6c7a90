"""A batch store in SQLite: one directory, one file, one server at a time.

What is in the database is committed with `synchronous=FULL`: it survives the loss of any process
and of power. Contents of files are rows as well, in chunks: so one commit says that a file is
whole, nothing is half there after a crash, and no second place has an order of writes to be kept.

Several processes have it open: frontends write files and batches, the batches process writes
results. Each write is one short transaction whose conditions are checked inside it, and SQLite lets
one in after the other. All have to run on one machine (SQLite's log needs shared memory).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw

from lightserve.batches.database import (
    BUSY_TIMEOUT_MS,
    SCHEMA_VERSION,
    Database,
    check_version,
    sqlite_statements,
)
from lightserve.errors import StoreError, StoreUnusable

log = logging.getLogger(__name__)

DATABASE = "store.sqlite3"
LOCK = "lock"
APPLICATION_ID = 0x6C737276
"""Says that a database is lightserve's."""


class SqliteDatabase(Database):
    """See the module."""

    skip_locked = ""

    def __init__(self, directory: Path, *, min_free_bytes: int = 0) -> None:
        """Open what `prepare` has made; the schema is checked again."""
        self._directory = directory
        self._min_free_bytes = min_free_bytes
        self._is_low = False
        with _errors():
            self._connection = apsw.Connection(
                str(directory / DATABASE), flags=apsw.SQLITE_OPEN_READWRITE
            )
            self._connection.set_busy_timeout(BUSY_TIMEOUT_MS)
            self._connection.execute("PRAGMA synchronous=FULL")
            version = self.value("PRAGMA user_version")
        if version != SCHEMA_VERSION:
            raise StoreError(f"its schema is version {version}, not {SCHEMA_VERSION}")

    def close(self) -> None:
        """See `Database`."""
        with _errors():
            self._connection.close()

    def is_low(self) -> bool:
        """See `Database`."""
        if not self._min_free_bytes:
            return False
        try:
            found = os.statvfs(self._directory)
        except OSError as error:
            raise StoreError(str(error.strerror)) from error
        wanted = self._min_free_bytes * (2 if self._is_low else 1)
        was_low, self._is_low = self._is_low, found.f_bavail * found.f_frsize < wanted
        if self._is_low and not was_low:
            log.warning("less than %d bytes are free: nothing is added", self._min_free_bytes)
        return self._is_low

    def check_space(self) -> None:
        """See `Database`."""
        if self.is_low():
            raise StoreError(
                f"less than {self._min_free_bytes} bytes are free (--batch-min-free-bytes)",
                is_full=True,
            )

    @contextlib.contextmanager
    def transaction(self, *, is_shared: bool = False) -> Iterator[None]:
        """See `Database`; none is shared: SQLite has one writer at a time."""
        with _errors():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[None]:
        """See `Database`."""
        with _errors():
            self._connection.execute("BEGIN")
            try:
                yield
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")

    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """See `Database`."""
        with _errors():
            return list(self._connection.execute(sql, values))

    def write(self, sql: str, *values: Any) -> int:
        """See `Database`."""
        with _errors():
            self._connection.execute(sql, values)
            return self._connection.changes()

    def write_many(self, sql: str, rows: Iterator[tuple[Any, ...]]) -> None:
        """See `Database`."""
        with _errors():
            self._connection.executemany(sql, rows)


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Turn what SQLite raises into StoreError."""
    try:
        yield
    except apsw.FullError as error:
        raise StoreError("no space is left", is_full=True) from error
    except apsw.Error as error:
        raise StoreError(str(error)) from error


class StoreLock:
    """Holds a store for one server; its processes end before it does."""

    def __init__(self, directory: Path) -> None:
        """Raises StoreUnusable: another server has it, or it cannot be written."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            make_directory(directory)
            if directory.stat().st_mode & 0o002:
                raise StoreUnusable(directory, "others may write to this directory (chmod o-w)")
            self._fd = os.open(directory / LOCK, flags, 0o600)
        except OSError as error:
            raise StoreUnusable(directory, error.strerror) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise StoreUnusable(directory, "another server uses it") from None

    def close(self) -> None:
        """Let other servers have it."""
        os.close(self._fd)


def prepare(directory: Path) -> StoreLock:
    """Take a store for this server and bring its schema up to date; a new one is made.

    Raises:
        StoreUnusable: it is another server's, no store, damaged, or of a newer schema.
    """
    lock = StoreLock(directory)
    try:
        _prepare(directory)
    except (StoreError, OSError) as error:
        lock.close()
        reason = error.strerror if isinstance(error, OSError) else error
        raise StoreUnusable(directory / DATABASE, reason) from error
    return lock


def _prepare(directory: Path) -> None:
    path = directory / DATABASE
    # SQLite's own files beside it get the same permissions.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    _sync(path.parent)
    with _errors():
        connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
        try:
            connection.set_busy_timeout(BUSY_TIMEOUT_MS)
            version = connection.pragma("user_version")
            if connection.pragma("schema_version") == 0:
                connection.pragma("journal_mode", "wal")
                connection.pragma("synchronous", "full")
                _upgrade(connection, 0)
                return
            if connection.pragma("application_id") != APPLICATION_ID:
                raise StoreError("this is a database, but no store of lightserve")
            check_version(version)
            ((found,),) = connection.execute("PRAGMA quick_check(1)")
            if found != "ok":
                raise StoreError(f"it is damaged: {' '.join(str(found).split())}")
            connection.pragma("synchronous", "full")
            if version < SCHEMA_VERSION:
                _keep(connection, path.with_name(f"{DATABASE}.schema-{version}"))
                _upgrade(connection, version)
        finally:
            connection.close()


def _keep(connection: apsw.Connection, path: Path) -> None:
    """Copy a store as it is, for the release that wrote it. Nothing stays where that fails."""
    path.unlink(missing_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    try:
        with contextlib.closing(
            apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
        ) as copy:
            copy.set_busy_timeout(BUSY_TIMEOUT_MS)
            with copy.backup("main", connection, "main") as backup:
                backup.step()
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    _sync(path.parent)
    log.info("%s: the store as it was, before its schema changes; delete it when you like", path)


def _upgrade(connection: apsw.Connection, version: int) -> None:
    """Bring a schema from this version to the last, all or nothing."""
    with connection:
        for statements in sqlite_statements(version):
            connection.execute(statements)
        connection.pragma("application_id", APPLICATION_ID)
        connection.pragma("user_version", SCHEMA_VERSION)


def make_directory(path: Path) -> None:
    """Make a directory for its owner alone, if it is not there: on return it is durable."""
    new = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    for each in new:
        _sync(each.parent)


def _sync(directory: Path) -> None:
    """Have the names in a directory survive a loss of power."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
