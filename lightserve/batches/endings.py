"""Ends of lines and batches: parts of a transaction that is under way."""

from __future__ import annotations

import json
import secrets

from lightserve.batches.database import Database
from lightserve.batches.files import SLICE_ROWS, clear
from lightserve.batches.records import Status
from lightserve.batches.responses import Responses

EXPIRED = (
    "batch_expired",
    "This request could not be executed before the completion window expired.",
)
CRASHED = ("process_lost", "The server lost a process each time that it began with this request.")
OVER_QUOTA = (
    "storage_quota_exceeded",
    "This request was not executed: files, batches and responses of this API key take up all the"
    " bytes that it may have stored (--batch-max-stored-bytes).",
)
"""Codes and messages of errors of lines that have no answer."""
_FAILING = (
    "SELECT number, failing, expires_s FROM batches WHERE status = 'in_progress' AND"
    " (failing IS NOT NULL OR expires_s <= ? OR key_name IN (SELECT stored.key_name FROM stored"
    " JOIN (SELECT key_name, sum(row_bytes + output_bytes + error_bytes) AS num_bytes FROM batches"
    " WHERE status IN ('preparing', 'in_progress') GROUP BY key_name) AS under_way"
    " ON under_way.key_name = stored.key_name WHERE stored.num_bytes + under_way.num_bytes > ?))"
    " ORDER BY number LIMIT 1"
)


class Endings:
    """See the module. A batch is named by its number; `now_s` is Unix time."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._responses = Responses(database)

    def num_left(self, batch: int) -> int:
        """Return how many lines of a batch have no result."""
        left = "SELECT num_lines - num_done - num_failed FROM batches WHERE number = ?"
        return int(self._db.value(left, batch))

    def fail_some(self, now_s: float, quota: int) -> int:
        """Fail lines of a batch whose window is over, or whose key has stored more than `quota`
        bytes, in a transaction of its own; with the last of them the batch ends.

        None is run from the first such transaction on, whenever the others come. Return the number
        of such batches: 1, or 0.
        """
        if self._db.row(_FAILING, now_s, quota) is None:
            return 0
        with self._db.transaction():
            row = self._db.row(_FAILING, now_s, quota)
            if row is None:
                return 0
            batch, failing, expires_s = row
            if failing is None:
                failing = (EXPIRED if expires_s <= now_s else OVER_QUOTA)[0]
                self._db.write("UPDATE batches SET failing = ? WHERE number = ?", failing, batch)
                self._give_back(batch)
            is_expired = failing == EXPIRED[0]
            self.fail(batch, EXPIRED if is_expired else OVER_QUOTA)
            if self.num_left(batch) == 0:
                self.end(batch, "expired" if is_expired else "completed", now_s)
        return 1

    def fail(self, batch: int, error: tuple[str, str], *, least_crashes: int | None = None) -> None:
        """Give SLICE_ROWS queued lines an error, code and message, that is no answer, as theirs.

        `least_crashes`: those in flight instead that have been there so often when a process died.
        """
        where = "batch = ? AND state = 'queued'"
        if least_crashes is not None:
            where = f"batch = ? AND state = 'leased' AND crashes >= {least_crashes}"
        batch_id = self._db.value("SELECT id FROM batches WHERE number = ?", batch)
        prefix = f"batch_req_{batch_id.removeprefix('batch_')}_"
        lines = self._db.rows(
            f"SELECT number, custom_id FROM lines WHERE {where} ORDER BY number LIMIT ?",
            *(batch, SLICE_ROWS),
        )
        results = [
            (_error_line(f"{prefix}{number}", custom_id, *error), batch, number)
            for number, custom_id in lines
        ]
        self._db.write_many(
            "UPDATE lines SET state = 'error', owner = NULL, result = ?"
            " WHERE batch = ? AND number = ?",
            iter(results),
        )
        self._db.write(
            "UPDATE batches SET num_failed = num_failed + ?, error_bytes = error_bytes + ?"
            " WHERE number = ?",
            *(len(results), sum(len(result) + 1 for result, _, _ in results), batch),
        )

    def cancel(self, batch: int, now_s: float) -> None:
        """Cancel what has no result, and end the batch."""
        self._give_back(batch)
        self.end(batch, "cancelled", now_s)

    def _give_back(self, batch: int) -> None:
        """Have no line of a batch be leased; the plus has SQLite look among those that are."""
        self._db.write(
            "UPDATE lines SET state = 'queued', owner = NULL WHERE +batch = ? AND state = 'leased'",
            batch,
        )

    def end(self, batch: int, status: Status, now_s: float) -> None:
        """End a batch: its results become files."""
        batch_id, key_name, ttl_s, response, *sizes = self._db.rows(
            "SELECT id, key_name, output_ttl_s, response, output_bytes, error_bytes FROM batches"
            " WHERE number = ?",
            batch,
        )[0]
        if response is not None:
            result = self._db.value("SELECT result FROM lines WHERE batch = ?", batch)
            self._responses.finish(response, result)
            self._db.write("DELETE FROM lines WHERE batch = ?", batch)
            self._db.write("DELETE FROM batches WHERE number = ?", batch)
            return
        ids: dict[str, str | None] = {"done": None, "error": None}
        for state, num_bytes in zip(ids, sizes, strict=True):
            if not num_bytes:
                continue
            name = "output" if state == "done" else "error"
            ids[state] = file_id = f"file-{secrets.token_hex(12)}"
            self._db.write(
                "INSERT INTO files (id, key_name, purpose, filename, num_bytes, created_s,"
                " expires_s, touched_s, is_whole, batch, has_errors)"
                " VALUES (?, ?, 'batch_output', ?, ?, ?, ?, ?, TRUE, ?, ?)",
                *(file_id, key_name, f"{batch_id}_{name}.jsonl", num_bytes, int(now_s)),
                *(int(now_s) + ttl_s, int(now_s), batch, state == "error"),
            )
        clear(self._db, "lines", batch, "queued")
        self._db.write(
            "UPDATE batches SET status = ?, ended_s = ?, output_file_id = ?, error_file_id = ?"
            " WHERE number = ?",
            *(status, int(now_s), ids["done"], ids["error"], batch),
        )


def _error_line(line_id: str, custom_id: str, code: str, message: str) -> bytes:
    error = {"code": code, "message": message}
    line = {"id": line_id, "custom_id": custom_id, "response": None, "error": error}
    return json.dumps(line).encode()
