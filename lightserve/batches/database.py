"""The SQLite database of a batch store: one directory, one file, its schema and its transactions.

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

from lightserve.errors import StartupError, StoreError

log = logging.getLogger(__name__)

DATABASE = "store.sqlite3"
LOCK = "lock"
APPLICATION_ID = 0x6C737276
"""Says that a database is lightserve's."""
BUSY_TIMEOUT_MS = 10_000
"""A write waits so long for those of other processes; each takes milliseconds."""

_FIRST = """
CREATE TABLE files (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    key_name TEXT NOT NULL,
    purpose TEXT NOT NULL,
    filename TEXT NOT NULL,
    num_bytes INTEGER NOT NULL,
    created_s INTEGER NOT NULL,
    expires_s INTEGER,
    touched_s INTEGER NOT NULL,
    is_whole INTEGER NOT NULL,
    batch INTEGER,
    has_errors INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX files_of_key ON files (key_name, number);
CREATE TABLE chunks (
    file INTEGER NOT NULL,
    number INTEGER NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (file, number)
);
CREATE TABLE batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    key_name TEXT NOT NULL,
    endpoint TEXT NOT NULL,
    input_file INTEGER NOT NULL,
    input_file_id TEXT NOT NULL,
    window TEXT NOT NULL,
    status TEXT NOT NULL,
    created_s INTEGER NOT NULL,
    expires_s INTEGER NOT NULL,
    ended_s INTEGER,
    metadata TEXT,
    output_ttl_s INTEGER NOT NULL,
    idempotency_key TEXT,
    request_digest TEXT NOT NULL,
    num_lines INTEGER NOT NULL,
    num_done INTEGER NOT NULL DEFAULT 0,
    num_failed INTEGER NOT NULL DEFAULT 0,
    output_file_id TEXT,
    error_file_id TEXT,
    UNIQUE (key_name, idempotency_key)
);
CREATE INDEX batches_of_key ON batches (key_name, number);
CREATE INDEX batches_active ON batches (expires_s) WHERE status = 'in_progress';
CREATE TABLE lines (
    batch INTEGER NOT NULL,
    number INTEGER NOT NULL,
    custom_id TEXT NOT NULL,
    position INTEGER NOT NULL,
    num_bytes INTEGER NOT NULL,
    state TEXT NOT NULL,
    attempt INTEGER NOT NULL DEFAULT 0,
    losses INTEGER NOT NULL DEFAULT 0,
    not_before_s REAL NOT NULL DEFAULT 0,
    owner TEXT,
    epoch INTEGER,
    lease_until_s REAL,
    result BLOB,
    PRIMARY KEY (batch, number)
);
CREATE INDEX lines_queued ON lines (batch, number) WHERE state = 'queued';
CREATE INDEX lines_leased ON lines (owner, epoch) WHERE state = 'leased';
CREATE TABLE owners (
    name TEXT PRIMARY KEY,
    epoch INTEGER NOT NULL
);
"""

_RESPONSES = """
CREATE TABLE responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    key_name TEXT NOT NULL,
    previous_id TEXT,
    created_s INTEGER NOT NULL,
    expires_s INTEGER NOT NULL,
    num_bytes INTEGER NOT NULL,
    input BLOB NOT NULL,
    response BLOB NOT NULL
);
CREATE INDEX responses_by_end ON responses (expires_s);
CREATE TABLE stored (
    key_name TEXT PRIMARY KEY,
    num_bytes INTEGER NOT NULL
);
INSERT INTO stored SELECT key_name, sum(num_bytes) FROM files GROUP BY key_name;
""" + "".join(
    f"""
CREATE TRIGGER {table}_added AFTER INSERT ON {table} BEGIN
    INSERT OR IGNORE INTO stored VALUES (NEW.key_name, 0);
    UPDATE stored SET num_bytes = num_bytes + NEW.num_bytes WHERE key_name = NEW.key_name;
END;
CREATE TRIGGER {table}_changed AFTER UPDATE OF num_bytes ON {table} BEGIN
    UPDATE stored SET num_bytes = num_bytes + NEW.num_bytes - OLD.num_bytes
    WHERE key_name = NEW.key_name;
END;
CREATE TRIGGER {table}_deleted AFTER DELETE ON {table} BEGIN
    UPDATE stored SET num_bytes = num_bytes - OLD.num_bytes WHERE key_name = OLD.key_name;
END;
"""
    for table in ("files", "responses")
)
"""Responses, and how many bytes each key has stored in all."""

_BACKGROUND = """
ALTER TABLE batches ADD COLUMN response INTEGER;
ALTER TABLE responses ADD COLUMN batch INTEGER;
ALTER TABLE responses ADD COLUMN request BLOB;
"""
"""Responses in the background: each is the one line, `request`, of a batch of its own."""

_FORECASTS = """
ALTER TABLE batches ADD COLUMN num_bytes INTEGER NOT NULL DEFAULT 0;
ALTER TABLE batches ADD COLUMN limit_tokens INTEGER;
ALTER TABLE batches ADD COLUMN done_bytes INTEGER NOT NULL DEFAULT 0;
ALTER TABLE batches ADD COLUMN prompt_tokens INTEGER NOT NULL DEFAULT 0;
ALTER TABLE batches ADD COLUMN output_tokens INTEGER NOT NULL DEFAULT 0;
UPDATE batches SET num_bytes =
    (SELECT ifnull(sum(num_bytes), 0) FROM lines WHERE batch = batches.number);
CREATE TABLE pace (
    minute INTEGER PRIMARY KEY,
    busy_s REAL NOT NULL,
    num_lines INTEGER NOT NULL,
    num_bytes INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL
);
CREATE TABLE costs (
    id INTEGER PRIMARY KEY,
    prompt_token_s REAL NOT NULL,
    output_token_s REAL NOT NULL
);
"""
"""How much batches are, and how fast lines get on: see `forecast`."""

_CRASHES = """
ALTER TABLE lines ADD COLUMN crashes INTEGER NOT NULL DEFAULT 0;
"""
"""How often the process of batches has died with a line."""

VERSIONS = (_FIRST, _RESPONSES, _BACKGROUND, _FORECASTS, _CRASHES)
"""What makes each version of the schema of the one before."""
SCHEMA_VERSION = len(VERSIONS)


class Database:
    """An open database. Every method raises StoreError where SQLite cannot do it."""

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
        """Close it; what is not committed is gone."""
        with _errors():
            self._connection.close()

    def is_low(self) -> bool:
        """Return whether too little space is free: once it is, until there is twice as much."""
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
        """Check that something may be added. Raises StoreError: too little space is free."""
        if self.is_low():
            raise StoreError(
                f"less than {self._min_free_bytes} bytes are free (--batch-min-free-bytes)",
                is_full=True,
            )

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit what is written inside, all or nothing; no other process writes meanwhile."""
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
        """Read several things as they are at one moment."""
        with _errors():
            self._connection.execute("BEGIN")
            try:
                yield
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")

    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return all rows of a query."""
        with _errors():
            return list(self._connection.execute(sql, values))

    def row(self, sql: str, *values: Any) -> tuple[Any, ...] | None:
        """Return the first row of a query, None if there is none."""
        found = self.rows(sql, *values)
        return found[0] if found else None

    def value(self, sql: str, *values: Any) -> Any:
        """Return the first value of the first row, None if there is none."""
        found = self.row(sql, *values)
        return None if found is None else found[0]

    def write(self, sql: str, *values: Any) -> int:
        """Execute a statement; return how many rows it changed."""
        with _errors():
            self._connection.execute(sql, values)
            return self._connection.changes()

    def write_many(self, sql: str, rows: Iterator[tuple[Any, ...]]) -> None:
        """Execute a statement for each of the rows."""
        with _errors():
            self._connection.executemany(sql, rows)

    @property
    def last_number(self) -> int:
        """Of the row that was inserted last."""
        return self._connection.last_insert_rowid()


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
        """Raises StartupError: another server has it, or it cannot be written."""
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StartupError(f"--batch-store {directory}: {error.strerror}") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise StartupError(f"--batch-store {directory}: another server uses it") from None

    def close(self) -> None:
        """Let other servers have it."""
        os.close(self._fd)


def prepare(directory: Path) -> StoreLock:
    """Take a store for this server and bring its schema up to date; a new one is made.

    Raises:
        StartupError: it is another server's, no store, damaged, or of a newer schema.
    """
    lock = StoreLock(directory)
    try:
        _prepare(directory)
    except (StoreError, OSError) as error:
        lock.close()
        reason = error.strerror if isinstance(error, OSError) else error
        raise StartupError(f"--batch-store {directory / DATABASE}: {reason}") from error
    return lock


def _prepare(directory: Path) -> None:
    path = directory / DATABASE
    # SQLite's own files beside it get the same permissions.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    with _errors():
        connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
        try:
            connection.set_busy_timeout(BUSY_TIMEOUT_MS)
            version = connection.pragma("user_version")
            if connection.pragma("schema_version") == 0:
                connection.pragma("journal_mode", "wal")
                connection.pragma("synchronous", "full")
                _upgrade(connection, 0)
                _sync_directory(directory)
                return
            if connection.pragma("application_id") != APPLICATION_ID:
                raise StoreError("this is a database, but no store of lightserve")
            if version > SCHEMA_VERSION:
                raise StoreError(
                    f"its schema is version {version}, this lightserve knows {SCHEMA_VERSION}:"
                    " it was written by a newer one"
                )
            ((found,),) = connection.execute("PRAGMA quick_check(1)")
            if found != "ok":
                raise StoreError(f"it is damaged: {' '.join(str(found).split())}")
            connection.pragma("synchronous", "full")
            _upgrade(connection, version)
        finally:
            connection.close()


def _upgrade(connection: apsw.Connection, version: int) -> None:
    """Bring a schema from this version to the last, all or nothing."""
    with connection:
        for statements in VERSIONS[version:]:
            connection.execute(statements)
        connection.pragma("application_id", APPLICATION_ID)
        connection.pragma("user_version", SCHEMA_VERSION)


def _sync_directory(directory: Path) -> None:
    """Have the names of new files survive a loss of power."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
