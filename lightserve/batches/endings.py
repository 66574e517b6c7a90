"""How lines and batches end: the parts of a transaction that is under way."""

from __future__ import annotations

import json
import secrets

from lightserve.batches.database import Database
from lightserve.batches.records import Status
from lightserve.batches.responses import Responses

EXPIRED = (
    "batch_expired",
    "This request could not be executed before the completion window expired.",
)
CRASHED = ("process_lost", "The server lost a process each time that it began with this request.")
"""Codes and messages of errors of lines that have no answer."""


class Endings:
    """See the module. A batch is named by its number; `now_s` is Unix time."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._responses = Responses(database)

    def num_left(self, batch: int) -> int:
        """Return how many lines of a batch have no result."""
        left = "SELECT num_lines - num_done - num_failed FROM batches WHERE number = ?"
        return int(self._db.value(left, batch))

    def fail(self, batch: int, error: tuple[str, str], *, least_crashes: int | None = None) -> None:
        """Give lines without a result an error, code and message, that is no answer, as theirs.

        `least_crashes`: only those in flight that have been there so often when a process died.
        """
        where = "batch = ? AND state IN ('queued', 'leased')"
        if least_crashes is not None:
            where = f"batch = ? AND state = 'leased' AND crashes >= {least_crashes}"
        batch_id = self._db.value("SELECT id FROM batches WHERE number = ?", batch)
        prefix = f"batch_req_{batch_id.removeprefix('batch_')}_"
        lines = self._db.rows(f"SELECT number, custom_id FROM lines WHERE {where}", batch)
        code, message = error
        self._db.write_many(
            "UPDATE lines SET state = 'error', owner = NULL, result = ?"
            " WHERE batch = ? AND number = ?",
            (
                (_error_line(f"{prefix}{number}", custom_id, code, message), batch, number)
                for number, custom_id in lines
            ),
        )
        self._db.write(
            "UPDATE batches SET num_failed = num_failed + ? WHERE number = ?", len(lines), batch
        )

    def cancel(self, batch: int, now_s: float) -> None:
        """Cancel what has no result, and end the batch."""
        self._db.write(
            "UPDATE lines SET state = 'cancelled', owner = NULL WHERE batch = ?"
            " AND state IN ('queued', 'leased')",
            batch,
        )
        self.end(batch, "cancelled", now_s)

    def end(self, batch: int, status: Status, now_s: float) -> None:
        """End a batch: its results become files."""
        batch_id, key_name, ttl_s, response = self._db.rows(
            "SELECT id, key_name, output_ttl_s, response FROM batches WHERE number = ?", batch
        )[0]
        if response is not None:
            result = self._db.value("SELECT result FROM lines WHERE batch = ?", batch)
            self._responses.finish(response, result)
            self._db.write("DELETE FROM lines WHERE batch = ?", batch)
            self._db.write("DELETE FROM batches WHERE number = ?", batch)
            return
        ids: dict[str, str | None] = {"done": None, "error": None}
        for state, name in (("done", "output"), ("error", "error")):
            num_bytes = self._db.value(
                "SELECT sum(length(result) + 1) FROM lines WHERE batch = ? AND state = ?",
                *(batch, state),
            )
            if num_bytes is None:
                continue
            ids[state] = file_id = f"file-{secrets.token_hex(12)}"
            self._db.write(
                "INSERT INTO files (id, key_name, purpose, filename, num_bytes, created_s,"
                " expires_s, touched_s, is_whole, batch, has_errors)"
                " VALUES (?, ?, 'batch_output', ?, ?, ?, ?, ?, TRUE, ?, ?)",
                *(file_id, key_name, f"{batch_id}_{name}.jsonl", num_bytes, int(now_s)),
                *(int(now_s) + ttl_s, int(now_s), batch, state == "error"),
            )
        self._db.write("DELETE FROM lines WHERE batch = ? AND state = 'cancelled'", batch)
        self._db.write(
            "UPDATE batches SET status = ?, ended_s = ?, output_file_id = ?, error_file_id = ?"
            " WHERE number = ?",
            *(status, int(now_s), ids["done"], ids["error"], batch),
        )


def _error_line(line_id: str, custom_id: str, code: str, message: str) -> bytes:
    error = {"code": code, "message": message}
    line = {"id": line_id, "custom_id": custom_id, "response": None, "error": error}
    return json.dumps(line).encode()
