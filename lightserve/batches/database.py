"""A database that holds a batch store: what SQLite and PostgreSQL have in common, and its schema.

Statements are written once, with `?` for values, in what both understand. A write is one short
transaction whose conditions are checked inside it, and no other writes meanwhile. Only what servers
do with lines all the time may be shared (`is_shared`): such transactions run beside each other
where the database can, are kept apart by the rows that they lock, and take these in the order
lines, batches by number, bytes of keys by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from lightserve.errors import StoreError

BUSY_TIMEOUT_MS = 10_000
"""A write waits so long for those of other processes; each takes milliseconds."""


class Database(ABC):
    """An open database, of one thread. Every method raises StoreError where it cannot be done."""

    skip_locked: ClassVar[str]
    """Ends a query, in a transaction that is shared, whose rows are going to be written: they are
    locked, and those that another one has locked are left out."""

    @abstractmethod
    def close(self) -> None:
        """Close it; what is not committed is gone."""

    def check(self) -> None:  # noqa: B027 (what is a file of this machine is there)
        """Check that it can still be reached."""

    @abstractmethod
    def transaction(self, *, is_shared: bool = False) -> AbstractContextManager[None]:
        """Commit what is written inside, all or nothing; see the module."""

    @abstractmethod
    def snapshot(self) -> AbstractContextManager[None]:
        """Read several things as they are at one moment."""

    @abstractmethod
    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return all rows of a query."""

    @abstractmethod
    def write(self, sql: str, *values: Any) -> int:
        """Execute a statement; return how many rows it changed."""

    @abstractmethod
    def write_many(self, sql: str, rows: Iterator[tuple[Any, ...]]) -> None:
        """Execute a statement for each of the rows."""

    def notify(self) -> None:  # noqa: B027 (one server knows by itself, soon enough)
        """Tell all servers, once the transaction is committed, that there is work or less of it.

        It is a hint that may be lost: they look by themselves as well.
        """

    def row(self, sql: str, *values: Any) -> tuple[Any, ...] | None:
        """Return the first row of a query, None if there is none."""
        found = self.rows(sql, *values)
        return found[0] if found else None

    def value(self, sql: str, *values: Any) -> Any:
        """Return the first value of the first row, None if there is none."""
        found = self.row(sql, *values)
        return None if found is None else found[0]

    def is_low(self) -> bool:
        """Return whether too little space is free."""
        return False

    def check_space(self) -> None:  # noqa: B027 (not every database can tell)
        """Check that something may be added. Raises StoreError: too little space is free."""


# The schema, as SQLite and PostgreSQL make it.

LINE_BYTES = 512
"""Bytes counted for a line beside its custom_id: its row, and the error that may be its result."""
FILE_BYTES, RESPONSE_BYTES, BATCH_BYTES = 512, 512, 1024
"""Bytes counted for other rows, beside contents, names and metadata."""
_CHARGES = {
    "files": f"{{0}}.num_bytes + octet_length({{0}}.filename) + {FILE_BYTES}",
    "responses": f"{{0}}.num_bytes + {RESPONSE_BYTES}",
    "batches": f"coalesce(octet_length({{0}}.metadata), 0) + {BATCH_BYTES}",
}
"""Bytes counted for a row of each table."""
_CHANGING = {"files": "num_bytes, filename", "responses": "num_bytes", "batches": "metadata"}
"""Columns that these bytes depend on."""
_TABLES = """
-- `kept` is the place of the content: 'rows', rows of which objects are made ('moving'), 'objects',
-- or objects that are to be deleted ('gone').
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
    is_whole BOOLEAN NOT NULL,
    batch INTEGER,
    has_errors BOOLEAN NOT NULL DEFAULT FALSE,
    kept TEXT NOT NULL DEFAULT 'rows'
);
CREATE INDEX files_of_key ON files (key_name, number);
CREATE TABLE chunks (
    file INTEGER NOT NULL,
    number INTEGER NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (file, number)
);
-- Without `is_promised` the window is too short, and was accepted all the same. `response` is set
-- for a response in the background: the one line of its batch. `row_bytes`, `output_bytes` and
-- `error_bytes` are what a batch in progress has in rows of lines and results, which `stored` does
-- not count. `failing` says why its lines fail without being run.
CREATE TABLE batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    key_name TEXT NOT NULL,
    endpoint TEXT NOT NULL,
    input_file INTEGER NOT NULL,
    input_file_id TEXT NOT NULL,
    "window" TEXT NOT NULL,
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
    response INTEGER,
    num_bytes INTEGER NOT NULL DEFAULT 0,
    limit_tokens INTEGER,
    done_bytes INTEGER NOT NULL DEFAULT 0,
    prompt_tokens INTEGER NOT NULL DEFAULT 0,
    output_tokens INTEGER NOT NULL DEFAULT 0,
    is_promised BOOLEAN NOT NULL DEFAULT FALSE,
    row_bytes INTEGER NOT NULL DEFAULT 0,
    output_bytes INTEGER NOT NULL DEFAULT 0,
    error_bytes INTEGER NOT NULL DEFAULT 0,
    failing TEXT,
    UNIQUE (key_name, idempotency_key)
);
CREATE INDEX batches_of_key ON batches (key_name, number);
CREATE INDEX batches_active ON batches (expires_s) WHERE status = 'in_progress';
CREATE INDEX batches_open ON batches (key_name) WHERE status IN ('preparing', 'in_progress');
-- `crashes` counts the deaths of the process of batches with the line.
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
    result BLOB,
    crashes INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (batch, number)
);
CREATE INDEX lines_queued ON lines (batch, number) WHERE state = 'queued';
CREATE INDEX lines_leased ON lines (owner, epoch) WHERE state = 'leased';
CREATE TABLE owners (
    name TEXT PRIMARY KEY,
    epoch INTEGER NOT NULL,
    lease_until_s REAL NOT NULL DEFAULT 0
);
CREATE TABLE responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    key_name TEXT NOT NULL,
    previous_id TEXT,
    created_s INTEGER NOT NULL,
    expires_s INTEGER NOT NULL,
    num_bytes INTEGER NOT NULL,
    input BLOB NOT NULL,
    response BLOB NOT NULL,
    batch INTEGER,
    request BLOB
);
-- The bytes that each key has stored in all; triggers keep them.
CREATE TABLE stored (
    key_name TEXT PRIMARY KEY,
    num_bytes INTEGER NOT NULL
);
-- The pace of lines, and what tokens cost: see `forecast`.
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
-- Rows that are to be deleted.
CREATE TABLE leftovers (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL,
    owner INTEGER NOT NULL,
    state TEXT NOT NULL,
    first INTEGER NOT NULL
);
-- Indexes by which `purge` finds ended rows. It asks with whole seconds: PostgreSQL finds no
-- fraction in an index of whole numbers.
CREATE INDEX responses_by_end ON responses (expires_s);
CREATE INDEX batches_by_end ON batches (ended_s) WHERE ended_s IS NOT NULL;
CREATE INDEX files_by_end ON files (expires_s) WHERE is_whole;
CREATE INDEX files_by_touch ON files (touched_s) WHERE NOT is_whole;
"""
_SQLITE_TRIGGERS = "".join(
    f"""
CREATE TRIGGER {table}_added AFTER INSERT ON {table} BEGIN
    INSERT OR IGNORE INTO stored VALUES (NEW.key_name, 0);
    UPDATE stored SET num_bytes = num_bytes + {charge.format("NEW")}
    WHERE key_name = NEW.key_name;
END;
CREATE TRIGGER {table}_changed AFTER UPDATE OF {_CHANGING[table]} ON {table} BEGIN
    UPDATE stored SET num_bytes = num_bytes + {charge.format("NEW")} - ({charge.format("OLD")})
    WHERE key_name = NEW.key_name;
END;
CREATE TRIGGER {table}_deleted AFTER DELETE ON {table} BEGIN
    UPDATE stored SET num_bytes = num_bytes - ({charge.format("OLD")})
    WHERE key_name = OLD.key_name;
END;
"""
    for table, charge in _CHARGES.items()
)
_POSTGRES_TRIGGERS = "".join(
    f"""
CREATE FUNCTION note_{table}() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO stored VALUES (
        coalesce(NEW.key_name, OLD.key_name),
        CASE WHEN TG_OP = 'DELETE' THEN 0 ELSE {charge.format("NEW")} END
        - CASE WHEN TG_OP = 'INSERT' THEN 0 ELSE {charge.format("OLD")} END
    ) ON CONFLICT (key_name) DO UPDATE SET num_bytes = stored.num_bytes + excluded.num_bytes;
    RETURN NULL;
END;
$$;
CREATE TRIGGER {table}_stored AFTER INSERT OR DELETE OR UPDATE OF {_CHANGING[table]} ON {table}
    FOR EACH ROW EXECUTE FUNCTION note_{table}();
"""
    for table, charge in _CHARGES.items()
)
_POSTGRES_WORDS = (
    ("INTEGER PRIMARY KEY AUTOINCREMENT", "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY"),
    ("INTEGER", "BIGINT"),
    ("REAL", "DOUBLE PRECISION"),
    ("BLOB", "BYTEA"),
)
OLDEST_VERSION = 10
"""The version of the first release. Older ones are refused."""
UPGRADES: tuple[str, ...] = ()
"""Statements in SQLite's words that make each later version of the one before."""
SCHEMA_VERSION = OLDEST_VERSION + len(UPGRADES)


def check_version(version: int) -> None:
    """Check that a store's schema can be used, or brought up to date. Raises StoreError."""
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"its schema is version {version}, this lightserve knows {SCHEMA_VERSION}:"
            " it was written by a newer one"
        )
    if 0 < version < OLDEST_VERSION:
        raise StoreError(
            f"its schema is version {version}, of before the first release, which has"
            f" {OLDEST_VERSION}"
        )


def sqlite_statements(version: int) -> tuple[str, ...]:
    """Return what brings a schema of this version, 0 for none, to the last."""
    if version == 0:
        return (_TABLES + _SQLITE_TRIGGERS, *UPGRADES)
    return UPGRADES[version - OLDEST_VERSION :]


def postgres_statements(version: int) -> list[str]:
    """Return the same for PostgreSQL."""
    statements = [_TABLES, *UPGRADES] if version == 0 else list(sqlite_statements(version))
    for word, other in _POSTGRES_WORDS:
        statements = [text.replace(word, other) for text in statements]
    if version == 0:
        statements[0] += _POSTGRES_TRIGGERS
    return statements
