"""A batch store in PostgreSQL, of any number of servers.

Transactions run one after the other, as in SQLite, by a lock of the store that PostgreSQL ends with
them. What servers do with lines all the time holds that lock together with others. A process that
is stopped inside a transaction loses it after IDLE_S, so that others go on.

Tables lie in a schema of their own, which is made where it is missing. Commits wait for the disk of
the server (or as many replicas as its `synchronous_commit` says).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import psycopg
from psycopg.adapt import Buffer, Loader

from lightserve.batches.database import (
    BUSY_TIMEOUT_MS,
    SCHEMA_VERSION,
    Database,
    check_version,
    postgres_statements,
)
from lightserve.errors import StartupError, StoreError

SCHEMA = "lightserve"
LOCK = 0x6C737276
"""The number of the advisory lock; PostgreSQL has them for each database."""
CONNECT_S = 5
IDLE_S = 5
STATEMENT_S = 60
_SETTINGS = f"""
SET search_path TO {SCHEMA};
SET lock_timeout TO '{BUSY_TIMEOUT_MS}ms';
SET idle_in_transaction_session_timeout TO '{IDLE_S}s';
SET statement_timeout TO '{STATEMENT_S}s';
SELECT set_config('synchronous_commit', 'on', false)
    WHERE current_setting('synchronous_commit') = 'off';
"""


HINTS = "lightserve_work"
"""A channel of LISTEN and NOTIFY."""
HINT_WAIT_S = 1.0
"""Seconds of one wait for hints, and before the next try after an error."""


class _Integer(Loader):
    """Reads sums of whole numbers, the only values of PostgreSQL's `numeric` here."""

    def load(self, data: Buffer) -> int:
        return int(bytes(data))


class PostgresDatabase(Database):
    """See the module."""

    skip_locked: ClassVar[str] = " FOR UPDATE SKIP LOCKED"

    def __init__(self, location: str) -> None:
        """Open what `prepare` has made; the schema is checked again."""
        with _errors():
            self._connection = _connect(location)
        version = self.value("SELECT version FROM store")
        if version != SCHEMA_VERSION:
            self.close()
            raise StoreError(f"its schema is version {version}, not {SCHEMA_VERSION}")

    def close(self) -> None:
        """See `Database`."""
        with _errors():
            self._connection.close()

    def check(self) -> None:
        """See `Database`."""
        self.rows("SELECT 1")

    @contextlib.contextmanager
    def transaction(self, *, is_shared: bool = False) -> Iterator[None]:
        """See `Database`."""
        lock = "pg_advisory_xact_lock_shared" if is_shared else "pg_advisory_xact_lock"
        with _errors(), self._connection.transaction():
            self._connection.execute(f"SELECT {lock}({LOCK})")
            yield

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[None]:
        """See `Database`."""
        with _errors(), self._connection.transaction():
            self._connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
            yield

    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """See `Database`."""
        with _errors():
            return self._connection.execute(_translated(sql), values).fetchall()

    def write(self, sql: str, *values: Any) -> int:
        """See `Database`."""
        with _errors():
            return self._connection.execute(_translated(sql), values).rowcount

    def notify(self) -> None:
        """See `Database`."""
        self.rows(f"SELECT pg_notify('{HINTS}', '')")

    def write_many(self, sql: str, rows: Iterator[tuple[Any, ...]]) -> None:
        """See `Database`."""
        with _errors(), self._connection.cursor() as cursor:
            cursor.executemany(_translated(sql), rows)


class Listener:
    """Calls `on_hint`, in a thread of its own, when a server says `notify`.

    While the database is away there are no hints, and none are made up for.
    """

    def __init__(self, location: str, on_hint: Callable[[], object]) -> None:
        self._location = location
        self._on_hint = on_hint
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="hints", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening: no call comes after this."""
        self._is_closed.set()
        self._thread.join(2 * HINT_WAIT_S)

    def _listen(self) -> None:
        while not self._is_closed.is_set():
            with contextlib.suppress(psycopg.Error), _connect(self._location) as connection:
                connection.execute(f"LISTEN {HINTS}")
                while not self._is_closed.is_set():
                    for _ in connection.notifies(timeout=HINT_WAIT_S, stop_after=1):
                        if not self._is_closed.is_set():
                            self._on_hint()
            self._is_closed.wait(HINT_WAIT_S)


def prepare(location: str) -> None:
    """Bring the schema of a store up to date; a new one is made.

    Raises:
        StartupError: the database cannot be reached or written, or the schema is a newer one.
    """
    try:
        with _errors(), contextlib.closing(_connect(location)) as connection:
            _prepare(connection)
    except StoreError as error:
        raise StartupError(f"--batch-store {location}: {error}") from error


def _prepare(connection: psycopg.Connection[Any]) -> None:
    with connection.transaction():
        connection.execute(f"SELECT pg_advisory_xact_lock({LOCK})")
        version = 0
        if _value(connection, f"SELECT to_regclass('{SCHEMA}.store')") is not None:
            version = _value(connection, "SELECT version FROM store")
        elif _value(connection, f"SELECT to_regnamespace('{SCHEMA}')") is None:
            connection.execute(f"CREATE SCHEMA {SCHEMA}")
        check_version(version)
        if version == 0:
            connection.execute("CREATE TABLE store (version BIGINT NOT NULL)")
            connection.execute("INSERT INTO store VALUES (0)")
        for statements in postgres_statements(version):
            connection.execute(statements.encode())
        connection.execute(f"UPDATE store SET version = {SCHEMA_VERSION}")


def _value(connection: psycopg.Connection[Any], sql: str) -> Any:
    row = connection.execute(sql.encode()).fetchone()
    assert row is not None
    return row[0]


def _connect(location: str) -> psycopg.Connection[Any]:
    """Connect; a server that has gone away without a word is noticed within half a minute."""
    connection = psycopg.connect(
        location,
        autocommit=True,
        connect_timeout=CONNECT_S,
        application_name="lightserve",
        keepalives_idle=5,
        keepalives_interval=2,
        keepalives_count=3,
        tcp_user_timeout=10_000,
    )
    connection.adapters.register_loader("numeric", _Integer)
    try:
        connection.execute(_SETTINGS)
    except psycopg.Error:
        connection.close()
        raise
    return connection


@functools.lru_cache(maxsize=256)
def _translated(sql: str) -> bytes:
    """Return a statement with PostgreSQL's places for values."""
    return sql.replace("%", "%%").replace("?", "%s").encode()


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Turn what PostgreSQL raises into StoreError, of one line."""
    try:
        yield
    except psycopg.errors.DiskFull as error:
        raise StoreError("no space is left", is_full=True) from error
    except psycopg.Error as error:
        raise StoreError(" ".join(str(error).split()) or type(error).__name__) from error
