"""Files of a store: uploaded in chunks, or put together from the results of a batch."""

from __future__ import annotations

import secrets
from typing import Any

from lightserve.batches.database import Database
from lightserve.batches.records import CHUNK_BYTES, DEFAULT_TTL_S, FileRecord, Purpose
from lightserve.errors import InvalidRequest

STALE_UPLOAD_S = 3600
"""An upload of which nothing has come for so long is dropped: its frontend has died."""
PAGE_LINES = 256

_COLUMNS = "number, id, purpose, filename, num_bytes, created_s, expires_s, batch, has_errors"
_IN_USE = "SELECT 1 FROM batches WHERE input_file = files.number AND status = 'in_progress'"


def no_file(file_id: str) -> InvalidRequest:
    """Return the refusal of an id that is no file of the key's."""
    return InvalidRequest(
        f"there is no file {file_id[:64]!r}", param="file_id", code="file_not_found", status=404
    )


def check_quota(database: Database, key_name: str, quota: int, *, param: str | None) -> None:
    """Check in a transaction that a key may have stored what it has. Raises InvalidRequest."""
    used = database.value("SELECT num_bytes FROM stored WHERE key_name = ?", key_name)
    if used > quota:
        raise InvalidRequest(
            f"files and responses of one key must have at most {quota} bytes in all"
            f" (--batch-max-stored-bytes), got {used}",
            param=param,
            code="storage_quota_exceeded",
            status=413,
        )


class Files:
    """See the module. Each method is one transaction; `now_s` is Unix time."""

    def __init__(self, database: Database) -> None:
        self._db = database

    # ------------------------------------------------------------------ uploads

    def begin(self, key_name: str, now_s: float) -> int:
        """Begin an upload; return its number, by which alone it is known until it is whole."""
        self._db.check_space()
        with self._db.transaction():
            number: int = self._db.value(
                "INSERT INTO files (id, key_name, purpose, filename, num_bytes, created_s,"
                " touched_s, is_whole) VALUES (?, ?, 'batch', '', 0, ?, ?, FALSE) RETURNING number",
                *(f"file-{secrets.token_hex(12)}", key_name, int(now_s), int(now_s)),
            )
            return number

    def append(self, number: int, chunk: int, data: bytes, now_s: float, *, quota: int) -> None:
        """Add a chunk of CHUNK_BYTES, the last one perhaps of fewer.

        Raises:
            InvalidRequest: the key has stored more than `quota` bytes in all (413), or the
                upload was dropped meanwhile (408).
        """
        self._db.check_space()
        with self._db.transaction(is_shared=True):
            changed = self._db.write(
                "UPDATE files SET num_bytes = num_bytes + ?, touched_s = ? WHERE number = ?",
                *(len(data), int(now_s), number),
            )
            if not changed:
                raise InvalidRequest(
                    "the file did not arrive in time", code="request_timeout", status=408
                )
            self._db.write("INSERT INTO chunks VALUES (?, ?, ?)", number, chunk, data)
            key_name = self._db.value("SELECT key_name FROM files WHERE number = ?", number)
            check_quota(self._db, key_name, quota, param="file")

    def finish(
        self, number: int, purpose: Purpose, filename: str, now_s: float, *, ttl_s: int | None
    ) -> FileRecord:
        """Make an upload a file: from its return on it is durable."""
        expires_s = int(now_s) + (DEFAULT_TTL_S if ttl_s is None else ttl_s)
        with self._db.transaction():
            self._db.write(
                "UPDATE files SET is_whole = TRUE, purpose = ?, filename = ?, created_s = ?,"
                " expires_s = ? WHERE number = ?",
                *(purpose, filename, int(now_s), expires_s, number),
            )
            row = self._db.row(f"SELECT {_COLUMNS} FROM files WHERE number = ?", number)
        if row is None:
            raise InvalidRequest(
                "the file did not arrive in time", code="request_timeout", status=408
            )
        return _record(row)

    def drop(self, number: int) -> None:
        """Forget an upload that will not become whole."""
        with self._db.transaction():
            self._delete(number)

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
        after: str | None = None,
        purpose: str | None = None,
        is_ascending: bool = False,
    ) -> tuple[list[FileRecord], bool]:
        """Return files from the newest on, and whether there are more of them.

        Raises:
            InvalidRequest: `after` is none of them (404).
        """
        order, bound = ("ASC", 0) if is_ascending else ("DESC", 2**62)
        if after is not None:
            bound = self.get(key_name, after, now_s).number
        purposes, of_purpose = ((), "") if purpose is None else ((purpose,), " AND purpose = ?")
        rows = self._db.rows(
            f"SELECT {_COLUMNS} FROM files WHERE key_name = ? AND is_whole"
            f" AND (expires_s IS NULL OR expires_s > ?){of_purpose}"
            f" AND number {'>' if is_ascending else '<'} ? ORDER BY number {order} LIMIT ?",
            *(key_name, now_s, *purposes, bound, limit + 1),
        )
        return [_record(row) for row in rows[:limit]], len(rows) > limit

    def read(self, file: FileRecord, cursor: int) -> tuple[bytes, int | None]:
        """Return a piece of a file and where the next one begins; None: this was the last.

        `cursor` is 0 for the first one.
        """
        if file.batch is not None:
            return self._read_results(file, cursor)
        data = self._db.value(
            "SELECT data FROM chunks WHERE file = ? AND number = ?", file.number, cursor
        )
        if data is None:
            raise no_file(file.id)
        is_last = (cursor + 1) * CHUNK_BYTES >= file.num_bytes
        return data, None if is_last else cursor + 1

    def _read_results(self, file: FileRecord, cursor: int) -> tuple[bytes, int | None]:
        rows = self._db.rows(
            "SELECT number, result FROM lines WHERE batch = ? AND number >= ? AND state = ?"
            " ORDER BY number LIMIT ?",
            *(file.batch, cursor, "error" if file.has_errors else "done", PAGE_LINES),
        )
        data = b"".join(result + b"\n" for _, result in rows)
        return data, rows[-1][0] + 1 if len(rows) == PAGE_LINES else None

    def read_span(self, number: int, position: int, num_bytes: int) -> bytes:
        """Return a stretch of an uploaded file; no more of it is read."""
        end, pieces = position + num_bytes, []
        for chunk in range(position // CHUNK_BYTES, (end - 1) // CHUNK_BYTES + 1):
            begins = chunk * CHUNK_BYTES
            start, stop = max(position - begins, 0), min(end - begins, CHUNK_BYTES)
            piece = self._db.value(
                "SELECT substr(data, ?, ?) FROM chunks WHERE file = ? AND number = ?",
                *(start + 1, stop - start, number, chunk),
            )
            pieces.append(piece or b"")
        return b"".join(pieces)

    # ------------------------------------------------------------------ the end

    def delete(self, key_name: str, file_id: str, now_s: float) -> None:
        """Delete a file.

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
            self._delete(file.number)

    def purge(self, now_s: float) -> int:
        """Delete files whose time is over, and uploads that were given up; return how many."""
        with self._db.transaction():
            rows = self._db.rows(
                "SELECT number FROM files WHERE CASE WHEN is_whole THEN expires_s <= ?"
                f" AND NOT EXISTS ({_IN_USE}) ELSE touched_s <= ? END LIMIT 16",
                *(now_s, now_s - STALE_UPLOAD_S),
            )
            for (number,) in rows:
                self._delete(number)
        return len(rows)

    def _delete(self, number: int) -> None:
        row = self._db.row("SELECT batch, has_errors FROM files WHERE number = ?", number)
        if row is not None and row[0] is not None:
            state = "error" if row[1] else "done"
            self._db.write("DELETE FROM lines WHERE batch = ? AND state = ?", row[0], state)
        self._db.write("DELETE FROM chunks WHERE file = ?", number)
        self._db.write("DELETE FROM files WHERE number = ?", number)


def _record(row: tuple[Any, ...]) -> FileRecord:
    number, file_id, purpose, filename, num_bytes, created_s, expires_s, batch, has_errors = row
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
    )
