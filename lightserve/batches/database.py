"""A database that holds a batch store: what SQLite and PostgreSQL have in common.

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
