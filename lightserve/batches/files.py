"""Files of a store: uploaded in chunks, or put together from the results of a batch.

What is in them is in rows, or in objects (see `contents`), of which only the row is here.
"""

from __future__ import annotations

import itertools
import math
import secrets
from typing import Any, NamedTuple

from lightserve.batches.database import Database
from lightserve.batches.records import CHUNK_BYTES, DEFAULT_TTL_S, FileRecord, Purpose
from lightserve.errors import InvalidRequest

STALE_UPLOAD_S = 3600
"""An upload of which nothing has come for so long is dropped: its frontend has died."""
PAGE_LINES = 256
PAGE_BYTES = 256 * 1024
"""The most of a result file that one read returns: whole lines, or a part of a longer one."""
LONG_PAGE_BYTES = 4 * 1024 * 1024
"""The part of a line longer than a page that one read returns: databases read the whole line each
time."""

SLICE_ROWS, SLICE_BYTES = 1000, 4 * 1024 * 1024
"""The most that is deleted, or given an error, in one transaction: others wait for its end."""

_COLUMNS = "number, id, purpose, filename, num_bytes, created_s, expires_s, batch, has_errors, kept"
_IN_USE = "SELECT 1 FROM batches WHERE input_file = files.number AND status = 'in_progress'"


class Cursor(NamedTuple):
    """The start of a piece of a file."""

    part: int = 0
    """Number of the chunk, or of the line."""
    position: int = 0
    """Bytes before it."""
    offset: int = 0
    """Bytes of the line before it, where the line is read in parts."""


START = Cursor()


class Doomed(NamedTuple):
    """A file that clients do not see any more, whose objects go before its row does."""

    number: int
    id: str
    num_bytes: int


def no_file(file_id: str) -> InvalidRequest:
    """Return the refusal of an id that is no file of the key's."""
    return InvalidRequest(
        f"there is no file {file_id[:64]!r}", param="file_id", code="file_not_found", status=404
    )


def check_quota(database: Database, key_name: str, quota: int, *, param: str | None) -> None:
    """Check in a transaction that a key may have stored what it has: names, rows and results of
    batches in progress count as well. Raises InvalidRequest."""
    used = database.value(
        "SELECT coalesce((SELECT num_bytes FROM stored WHERE key_name = ?), 0) + coalesce("
        "(SELECT sum(row_bytes + output_bytes + error_bytes) FROM batches"
        " WHERE key_name = ? AND status IN ('preparing', 'in_progress')), 0)",
        *(key_name, key_name),
    )
    if used > quota:
        raise InvalidRequest(
            f"files, batches and responses of one key must have at most {quota} bytes in all"
            f" (--batch-max-stored-bytes), got {used}",
            param=param,
            code="storage_quota_exceeded",
            status=413,
        )


def clear(database: Database, table: str, owner: int, state: str = "") -> None:
    """Delete the lines of a batch that are in a state, or the chunks of a file, which nothing
    speaks of once the transaction is over: some of them now, the others by `Files.sweep`."""
    first = _clear_some(database, table, owner, state, 0)
    if first is not None:
        database.write(
            "INSERT INTO leftovers (name, owner, state, first) VALUES (?, ?, ?, ?)",
            *(table, owner, state, first),
        )


def _clear_some(database: Database, table: str, owner: int, state: str, first: int) -> int | None:
    """Delete a slice of rows from a number on; return where the next begins, None: all are gone."""
    size, which = "length(data)", "file = ?"
    values: tuple[object, ...] = (owner,)
    if table == "lines":
        size, which, values = (
            "coalesce(length(result), 0)",
            "batch = ? AND state = ?",
            (owner, state),
        )
    rows = database.rows(
        f"SELECT number, {size} FROM {table} WHERE {which} AND number >= ? ORDER BY number LIMIT ?",
        *(*values, first, SLICE_ROWS),
    )
    sums = itertools.accumulate(num_bytes for _, num_bytes in rows)
    num_taken = max(1, sum(total <= SLICE_BYTES for total in sums))
    if rows:
        following: int = rows[:num_taken][-1][0] + 1
        database.write(
            f"DELETE FROM {table} WHERE {which} AND number >= ? AND number < ?",
            *(*values, first, following),
        )
    return following if len(rows) == SLICE_ROWS or num_taken < len(rows) else None


class Files:
    """See the module. Each method is one transaction; `now_s` is Unix time."""

    def __init__(self, database: Database) -> None:
        self._db = database

    # ------------------------------------------------------------------ uploads

    def begin(self, key_name: str, now_s: float, *, in_objects: bool = False) -> int:
        """Begin an upload; return its number, by which alone it is known until it is whole."""
        self._db.check_space()
        with self._db.transaction():
            number: int = self._db.value(
                "INSERT INTO files (id, key_name, purpose, filename, num_bytes, created_s,"
                " touched_s, is_whole, kept) VALUES (?, ?, 'batch', '', 0, ?, ?, FALSE, ?)"
                " RETURNING number",
                *(f"file-{secrets.token_hex(12)}", key_name, int(now_s), int(now_s)),
                "objects" if in_objects else "rows",
            )
            return number

    def append(
        self, number: int, chunk: int, data: bytes, now_s: float, *, quota: int
    ) -> str | None:
        """Add a chunk of CHUNK_BYTES, the last one perhaps of fewer.

        If the file is to be in objects, the chunk, of OBJECT_BYTES, is counted here and no more:
        return the file's id.

        Raises:
            InvalidRequest: the key has stored more than `quota` bytes in all (413), or the
                upload was dropped meanwhile (408).
        """
        self._db.check_space()
        with self._db.transaction(is_shared=True):
            changed = self._db.write(
                "UPDATE files SET num_bytes = num_bytes + ?, touched_s = ? WHERE number = ?"
                " AND kept != 'gone'",
                *(len(data), int(now_s), number),
            )
            if not changed:
                raise InvalidRequest(
                    "the file did not arrive in time", code="request_timeout", status=408
                )
            key_name, file_id, kept = self._db.rows(
                "SELECT key_name, id, kept FROM files WHERE number = ?", number
            )[0]
            check_quota(self._db, key_name, quota, param="file")
            if kept == "objects":
                return str(file_id)
            self._db.write("INSERT INTO chunks VALUES (?, ?, ?)", number, chunk, data)
            return None

    def finish(
        self, number: int, purpose: Purpose, filename: str, now_s: float, *, ttl_s: int | None
    ) -> FileRecord:
        """Make an upload a file: from its return on it is durable."""
        expires_s = int(now_s) + (DEFAULT_TTL_S if ttl_s is None else ttl_s)
        with self._db.transaction():
            self._db.write(
                "UPDATE files SET is_whole = TRUE, purpose = ?, filename = ?, created_s = ?,"
                " expires_s = ? WHERE number = ? AND kept != 'gone'",
                *(purpose, filename, int(now_s), expires_s, number),
            )
            row = self._db.row(
                f"SELECT {_COLUMNS} FROM files WHERE number = ? AND is_whole", number
            )
        if row is None:
            raise InvalidRequest(
                "the file did not arrive in time", code="request_timeout", status=408
            )
        return _record(row)

    def drop(self, number: int, now_s: float) -> Doomed | None:
        """Forget an upload that will not become whole; see `delete` for what is returned."""
        with self._db.transaction():
            return self._give_up(number, now_s)

    # ------------------------------------------------------------------ reading

    def get(self, key_name: str, file_id: str, now_s: float) -> FileRecord:
        """Return a file. Raises InvalidRequest (404): the key has none of this id."""
        row = self._db.row(
            f"SELECT {_COLUMNS} FROM files WHERE id = ? AND key_name = ? AND is_whole"
            " AND (expires_s IS NULL OR expires_s > ?)",
            *(file_id, key_name, now_s),
        )
        if row is None:
            raise no_file(file_id)
        return _record(row)

    def page(
        self,
        key_name: str,
        now_s: float,
        *,
        limit: int,
        after: str | int | None = None,
        purpose: str | None = None,
        is_ascending: bool = False,
    ) -> tuple[list[FileRecord], bool]:
        """Return files from the newest on, and whether there are more of them.

        `after`: the id of a file, or its number, which may be gone.

        Raises:
            InvalidRequest: `after` is none of them (404).
        """
        order, bound = ("ASC", 0) if is_ascending else ("DESC", 2**62)
        if isinstance(after, int):
            bound = after
        elif after is not None:
            bound = self.get(key_name, after, now_s).number
        purposes, of_purpose = ((), "") if purpose is None else ((purpose,), " AND purpose = ?")
        rows = self._db.rows(
            f"SELECT {_COLUMNS} FROM files WHERE key_name = ? AND is_whole"
            f" AND (expires_s IS NULL OR expires_s > ?){of_purpose}"
            f" AND number {'>' if is_ascending else '<'} ? ORDER BY number {order} LIMIT ?",
            *(key_name, now_s, *purposes, bound, limit + 1),
        )
        return [_record(row) for row in rows[:limit]], len(rows) > limit

    def read(self, file: FileRecord, cursor: Cursor = START) -> tuple[bytes, Cursor | None] | None:
        """Return a piece of a file and where the next one begins; None: this was the last.

        Nothing at all: what is in it has been moved to objects.

        Raises:
            InvalidRequest: it was deleted (404).
        """
        if file.batch is not None:
            return self._read_results(file, cursor)
        data = self._db.value(
            "SELECT data FROM chunks WHERE file = ? AND number = ?", file.number, cursor.part
        )
        if data is None:
            raise no_file(file.id)
        end = cursor.position + len(data)
        return data, None if end >= file.num_bytes else Cursor(cursor.part + 1, end)

    def _read_results(self, file: FileRecord, cursor: Cursor) -> tuple[bytes, Cursor | None] | None:
        state = "error" if file.has_errors else "done"
        with self._db.snapshot():
            kept = "SELECT kept FROM files WHERE number = ? AND is_whole"
            if (place := self._db.value(kept, file.number)) == "objects":
                return None
            if place is None:  # its rows may be gone in part
                raise no_file(file.id)
            rows = self._db.rows(
                "SELECT number, length(result) + 1 FROM lines WHERE batch = ? AND number >= ?"
                " AND state = ? ORDER BY number LIMIT ?",
                *(file.batch, cursor.part, state, PAGE_LINES),
            )
            if not rows:
                raise no_file(file.id)
            number, num_bytes = rows[0]
            if num_bytes > PAGE_BYTES:
                data = self._part_of(file, number, cursor.offset)
                offset = cursor.offset + len(data)
                following = Cursor(number + 1) if offset >= num_bytes else Cursor(number, 0, offset)
            else:
                sums = itertools.accumulate(size for _, size in rows)
                last = max(
                    n for (n, _), total in zip(rows, sums, strict=True) if total <= PAGE_BYTES
                )
                found = self._db.rows(
                    "SELECT result FROM lines WHERE batch = ? AND number BETWEEN ? AND ?"
                    " AND state = ? ORDER BY number",
                    *(file.batch, number, last, state),
                )
                data = b"".join(result + b"\n" for (result,) in found)
                following = Cursor(last + 1)
        end = cursor.position + len(data)
        return data, None if end >= file.num_bytes else following._replace(position=end)

    def _part_of(self, file: FileRecord, number: int, offset: int) -> bytes:
        """Return a part of a result that is longer than a page, with the end of its line."""
        data: bytes = self._db.value(
            "SELECT substr(result, ?, ?) FROM lines WHERE batch = ? AND number = ?",
            *(offset + 1, LONG_PAGE_BYTES, file.batch, number),
        )
        return data if len(data) == LONG_PAGE_BYTES else data + b"\n"

    def read_span(self, number: int, position: int, num_bytes: int) -> bytes:
        """Return a stretch of an uploaded file, and read no more of it; nothing: it is deleted."""
        end, pieces = position + num_bytes, []
        for chunk in range(position // CHUNK_BYTES, (end - 1) // CHUNK_BYTES + 1):
            begins = chunk * CHUNK_BYTES
            start, stop = max(position - begins, 0), min(end - begins, CHUNK_BYTES)
            piece = self._db.value(
                "SELECT substr(data, ?, ?) FROM chunks WHERE file = ? AND number = ?",
                *(start + 1, stop - start, number, chunk),
            )
            if piece is None:
                return b""
            pieces.append(piece)
        return b"".join(pieces)

    # ------------------------------------------------------------------ the end

    def delete(self, key_name: str, file_id: str, now_s: float) -> Doomed | None:
        """Delete a file; return it if objects of it are to be deleted now, and then its row.

        Raises:
            InvalidRequest: there is none (404), or a batch that goes on reads it (409).
        """
        with self._db.transaction():
            file = self.get(key_name, file_id, now_s)
            if self._db.value(f"SELECT ({_IN_USE}) FROM files WHERE number = ?", file.number):
                raise InvalidRequest(
                    "the file is the input of a batch that is in progress; cancel the batch first",
                    param="file_id",
                    code="file_in_use",
                    status=409,
                )
            return self._give_up(file.number, now_s)

    def purge(self, now_s: float) -> tuple[int, list[Doomed]]:
        """Delete files whose time is over, and uploads that were given up.

        Return how many, and of those in objects what `delete` returns.
        """
        doomed = []
        with self._db.transaction():
            rows = self._db.rows(
                "SELECT number, is_whole FROM files WHERE (is_whole AND expires_s <= ?"
                f" AND NOT EXISTS ({_IN_USE})) OR (NOT is_whole AND touched_s <= ?) LIMIT 16",
                *(math.floor(now_s), math.floor(now_s) - STALE_UPLOAD_S),
            )
            for number, is_whole in rows:
                found = self._give_up(number, now_s, is_stale=not is_whole)
                doomed += [] if found is None else [found]
        return len(rows), doomed

    def _give_up(self, number: int, now_s: float, *, is_stale: bool = False) -> Doomed | None:
        """Delete a file; one with objects becomes an upload that was given up.

        While objects are made of rows, more of them may come: they go when it is stale.
        """
        row = self._db.row("SELECT id, num_bytes, kept FROM files WHERE number = ?", number)
        if row is None:
            return None
        file_id, num_bytes, kept = row
        self._delete_rows(number)
        if kept == "rows":
            self.forget(number)
            return None
        self._db.write(
            "UPDATE files SET is_whole = FALSE, kept = 'gone', batch = NULL, touched_s = ?"
            " WHERE number = ?",
            *(int(now_s), number),
        )
        if kept == "moving" and not is_stale:
            return None
        return Doomed(number, file_id, num_bytes)

    def _delete_rows(self, number: int) -> None:
        batch, has_errors = self._db.rows(
            "SELECT batch, has_errors FROM files WHERE number = ?", number
        )[0]
        if batch is not None:
            state = "error" if has_errors else "done"
            clear(self._db, "lines", batch, state)
        clear(self._db, "chunks", number)

    def sweep(self, num_rows: int = 1) -> bool:
        """Delete so many rows, or a few more, that no other row refers to; return whether any were.

        The process of batches does it all the time. Clients that add rows do it as well, as many as
        they add: so what is left over does not grow, however fast a client makes and drops files
        and batches.
        """
        found = "SELECT number, name, owner, state, first FROM leftovers ORDER BY number LIMIT 1"
        for done in range(0, num_rows, SLICE_ROWS):
            if self._db.row(found) is None:
                return done > 0
            with self._db.transaction():
                for number, *rows in self._db.rows(found):
                    if (first := _clear_some(self._db, *rows)) is None:
                        self._db.write("DELETE FROM leftovers WHERE number = ?", number)
                    else:
                        update = "UPDATE leftovers SET first = ? WHERE number = ?"
                        self._db.write(update, first, number)
        return True

    def forget(self, number: int) -> None:
        """Delete the row of a file, of which nothing else is left."""
        self._db.write("DELETE FROM files WHERE number = ?", number)

    # ------------------------------------------------------------------ results become objects

    def begin_move(self) -> FileRecord | None:
        """Return a file of results that is in rows, of which objects may be made from now on."""
        with self._db.transaction():
            row = self._db.row(
                f"SELECT {_COLUMNS} FROM files WHERE batch IS NOT NULL AND kept != 'objects'"
                " AND is_whole ORDER BY number LIMIT 1"
            )
            if row is None:
                return None
            self._db.write("UPDATE files SET kept = 'moving' WHERE number = ?", row[0])
        return _record(row)

    def end_move(self, number: int) -> None:
        """Have a file be in its objects, all of which are there, unless it was deleted."""
        with self._db.transaction():
            if self._db.write(
                "UPDATE files SET kept = 'objects' WHERE number = ? AND kept = 'moving'"
                " AND is_whole",
                number,
            ):
                self._delete_rows(number)

    def in_objects(self) -> FileRecord | None:
        """Return the newest file that is in objects; None: there is none."""
        row = self._db.row(
            f"SELECT {_COLUMNS} FROM files WHERE kept = 'objects' AND is_whole"
            " ORDER BY number DESC LIMIT 1"
        )
        return None if row is None else _record(row)

    def place(self, number: int) -> str | None:
        """Return the id of an uploaded file that is in objects; None: it is in rows, or gone."""
        file_id: str | None = self._db.value(
            "SELECT id FROM files WHERE number = ? AND kept = 'objects'", number
        )
        return file_id


def _record(row: tuple[Any, ...]) -> FileRecord:
    number, file_id, purpose, filename, num_bytes, created_s, expires_s, batch, *rest = row
    has_errors, kept = rest
    return FileRecord(
        number=number,
        id=file_id,
        purpose=purpose,
        filename=filename,
        num_bytes=num_bytes,
        created_s=created_s,
        expires_s=expires_s,
        batch=batch,
        has_errors=bool(has_errors),
        is_in_objects=kept == "objects",
    )
