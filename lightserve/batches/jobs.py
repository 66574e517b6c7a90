"""Batches and their lines: who works on which, and what became of it.

    queued ──lease──► leased ──settle──► done, error
       ▲                │ │
       └──settle, begin─┘ └──expire──► error          queued and leased ──cancel──► cancelled

A line is leased to an owner in one of its epochs: an owner that begins anew has a new epoch, and
what an earlier one still says is dropped. A result counts only from the owner of the lease, in
the transaction that says so: whatever is killed, each line has one result. The last one ends the
batch in the same transaction. Output and error files are no copies: their rows are the lines'.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

from lightserve.batches.database import LINE_BYTES, Database
from lightserve.batches.endings import CRASHED, Endings
from lightserve.batches.files import Files, check_quota, clear
from lightserve.batches.forecast import Forecasts
from lightserve.batches.leasing import LOSS_DELAY_S, MAX_CRASHES, Leasing
from lightserve.batches.records import (
    MAX_ACTIVE_BATCHES,
    MAX_ACTIVE_RESPONSES,
    MAX_TTL_S,
    RESPONSE_WINDOW_S,
    RESPONSES,
    BatchRecord,
    LeasedLine,
    LeaseLost,
    LineSums,
    NewBatch,
    NewLine,
    NewResponse,
    Outcome,
    Status,
)
from lightserve.batches.responses import Responses
from lightserve.errors import InvalidRequest

_COLUMNS = (
    'number, id, endpoint, input_file_id, "window", status, created_s, expires_s, ended_s,'
    " metadata, num_lines, num_done, num_failed, output_file_id, error_file_id"
)
_NAMES = _COLUMNS.replace(",", "").replace('"', "").split()
_IS_SEEN = "response IS NULL AND status != 'preparing'"
"""By clients, as a batch."""
_IS_OPEN = "status IN ('preparing', 'in_progress')"
PREPARING_S = 3600
"""A batch that is not ready after so long is given up: its frontend has died."""
RETRY_AFTER_S = 60.0
"""When a key that has too much to be done may have less."""
PURGE_ROWS = 64
FORGET_OWNER_S = 86_400.0
"""An owner of which nothing was heard for so long is forgotten."""


class Held(NamedTuple):
    """The work of an owner."""

    batches: frozenset[int]
    """Numbers of all batches in progress."""
    lines: frozenset[tuple[int, int]]
    """Lines leased to the owner, by batch and number."""


class Jobs:
    """See the module; `now_s` is Unix time. Each method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._files = Files(database)
        self._responses = Responses(database)
        self._forecasts = Forecasts(database)
        self._endings = Endings(database)
        self._leasing = Leasing(database)

    # ------------------------------------------------------------------ clients

    def prepare(self, new: NewBatch, now_s: float) -> int:
        """Begin a batch; return its number. Clients and owners do not see it until `create`.

        Raises:
            InvalidRequest: there is no such file, or the key has too many batches in progress or
                too much stored.
        """
        with self._db.transaction():
            self._db.check_space()
            file = self._files.get(new.key_name, new.input_file_id, now_s)
            self.check_active(new.key_name)
            number: int = self._db.value(
                'INSERT INTO batches (id, key_name, endpoint, input_file, input_file_id, "window",'
                " status, created_s, expires_s, metadata, output_ttl_s, request_digest, num_lines)"
                " VALUES (?, ?, ?, ?, ?, ?, 'preparing', ?, ?, ?, ?, ?, 0) RETURNING number",
                *(f"batch_{secrets.token_hex(12)}", new.key_name, new.endpoint, file.number),
                *(file.id, new.window, int(now_s), int(now_s) + PREPARING_S, new.metadata),
                *(new.output_ttl_s, new.request_digest),
            )
            self._check_quota(new)
            return number

    def add_lines(self, new: NewBatch, number: int, lines: Sequence[NewLine], first: int) -> None:
        """Add lines that have been checked, the first of which has this number in the batch.

        Raises:
            InvalidRequest: the key has too many lines without a result (429) or too much stored
                (413), or the batch was given up meanwhile (408).
        """
        with self._db.transaction(is_shared=True):
            self._db.check_space()
            self._check_lines(new.key_name, first + len(lines), new.max_lines, but=number)
            self._check_preparing(number)
            self._db.write_many(
                "INSERT INTO lines (batch, number, custom_id, position, num_bytes, state)"
                " VALUES (?, ?, ?, ?, ?, 'queued')",
                (
                    (number, first + index, line.custom_id, line.position, line.num_bytes)
                    for index, line in enumerate(lines)
                ),
            )
            row_bytes = sum(LINE_BYTES + len(line.custom_id.encode()) for line in lines)
            self._db.write(
                "UPDATE batches SET num_lines = num_lines + ?, row_bytes = row_bytes + ?"
                " WHERE number = ?",
                *(len(lines), row_bytes, number),
            )
            self._check_quota(new)

    def _check_quota(self, new: NewBatch) -> None:
        if new.max_bytes:
            check_quota(self._db, new.key_name, new.max_bytes, param="input_file_id")

    def create(self, new: NewBatch, number: int, lines: LineSums, now_s: float) -> BatchRecord:
        """Have a batch be there, all of whose lines were added; or return the one that is there
        already.

        Raises:
            InvalidRequest: there is no such file, its idempotency key is another request's, the
                key has too many batches in progress, its window is too short, or it was given up
                meanwhile.
        """
        with self._db.transaction():
            if (known := self.find_repeated(new, now_s)) is not None:
                self._drop(number)
                return known
            self._db.check_space()
            self._files.get(new.key_name, new.input_file_id, now_s)
            self.check_active(new.key_name, but=number)
            self._check_lines(new.key_name, lines.num_lines, new.max_lines, but=number)
            self._check_preparing(number)
            self._db.write(
                "UPDATE batches SET status = 'in_progress', created_s = ?, expires_s = ?,"
                " idempotency_key = ?, num_lines = ?, num_bytes = ?, limit_tokens = ?,"
                " is_promised = ? WHERE number = ?",
                *(int(now_s), int(now_s) + new.window_s, new.idempotency_key, lines.num_lines),
                *(lines.num_bytes, lines.limit_tokens, self._is_promised(new, lines, now_s)),
                number,
            )
            self._db.notify()
            return self._record(number, now_s)

    def drop(self, number: int) -> None:
        """Give up a batch that is being prepared."""
        with self._db.transaction():
            self._drop(number)

    def _drop(self, number: int) -> None:
        gone = "DELETE FROM batches WHERE number = ? AND status = 'preparing'"
        if self._db.write(gone, number):
            clear(self._db, "lines", number, "queued")

    def _check_preparing(self, number: int) -> None:
        """Raise InvalidRequest (408) unless a batch is being prepared."""
        status = "SELECT status FROM batches WHERE number = ?"
        if self._db.value(status, number) != "preparing":
            raise InvalidRequest(
                "the batch was not ready in time", code="request_timeout", status=408
            )

    def _is_promised(self, new: NewBatch, lines: LineSums, now_s: float) -> bool:
        """Return whether a batch is to be done in its window.

        Raises:
            InvalidRequest: it cannot be, and it is not wanted so (409).
        """
        try:
            self._forecasts.check(new, lines, now_s)
        except InvalidRequest:
            if not new.accepts_late:
                raise
            return False
        return True

    def find_repeated(self, new: NewBatch, now_s: float) -> BatchRecord | None:
        """Return the batch that this request, sent again, has made; None: it is a new one.

        Raises:
            InvalidRequest: its idempotency key came with another request (409).
        """
        row = self._db.row(
            f"SELECT request_digest, {_COLUMNS} FROM batches WHERE key_name = ?"
            " AND idempotency_key = ?",
            *(new.key_name, new.idempotency_key),
        )
        if row is None:
            return None
        if row[0] != new.request_digest:
            raise InvalidRequest(
                "the Idempotency-Key came with another request before",
                param="Idempotency-Key",
                code="idempotency_key_reused",
                status=409,
            )
        return self._records([row[1:]], now_s)[0]

    def check_active(self, key_name: str, *, but: int = 0) -> None:
        """Check that a key may have one more batch beside others than `but`, those that are being
        prepared included. Raises InvalidRequest (429)."""
        self._check_count(key_name, "IS NULL", MAX_ACTIVE_BATCHES, "batches in progress", but)

    def _check_count(
        self, key_name: str, response: str, most: int, what: str, but: int = 0
    ) -> None:
        num_active = self._db.value(
            f"SELECT count(*) FROM batches WHERE key_name = ? AND {_IS_OPEN}"
            f" AND response {response} AND number != ?",
            *(key_name, but),
        )
        if num_active >= most:
            raise InvalidRequest(
                f"a key may have at most {most} {what}, got one more than {num_active}",
                code="too_many_batches",
                status=429,
                retry_after_s=RETRY_AFTER_S,
            )

    def _check_lines(self, key_name: str, num_new: int, most: int, *, but: int = 0) -> None:
        """Check a key's quota of lines, but for those of a batch. Raises InvalidRequest (429)."""
        if not most:
            return
        num_left = self._db.value(
            "SELECT coalesce(sum(num_lines - num_done - num_failed), 0) FROM batches"
            f" WHERE key_name = ? AND {_IS_OPEN} AND number != ?",
            *(key_name, but),
        )
        if num_left + num_new > most:
            raise InvalidRequest(
                f"this API key may have {most} lines of batches and responses in the background"
                f" without a result, got {num_new} beside {num_left}",
                code="batch_lines_exceeded",
                status=429,
                retry_after_s=RETRY_AFTER_S,
            )

    def get(self, key_name: str, batch_id: str, now_s: float) -> BatchRecord:
        """Return a batch. Raises InvalidRequest (404): the key has none of this id."""
        return self._records([self._row(key_name, batch_id)], now_s)[0]

    def _row(self, key_name: str, batch_id: str) -> tuple[Any, ...]:
        row = self._db.row(
            f"SELECT {_COLUMNS} FROM batches WHERE id = ? AND key_name = ? AND {_IS_SEEN}",
            *(batch_id, key_name),
        )
        if row is None:
            raise InvalidRequest(
                f"no batch found: this key has none with the id {batch_id[:64]!r}",
                param="batch_id",
                code="batch_not_found",
                status=404,
            )
        return row

    def page(
        self, key_name: str, now_s: float, *, limit: int, after: str | None = None
    ) -> tuple[list[BatchRecord], bool]:
        """Return batches from the newest on, and whether there are more.

        Raises:
            InvalidRequest: `after` is none of them (404).
        """
        bound = 2**62 if after is None else self._row(key_name, after)[0]
        rows = self._db.rows(
            f"SELECT {_COLUMNS} FROM batches WHERE key_name = ? AND number < ?"
            f" AND {_IS_SEEN} ORDER BY number DESC LIMIT ?",
            *(key_name, bound, limit + 1),
        )
        return self._records(rows[:limit], now_s), len(rows) > limit

    def cancel(self, key_name: str, batch_id: str, now_s: float) -> BatchRecord:
        """End a batch with what it has; results that are on their way come too late.

        Raises:
            InvalidRequest: there is none (404), or it is over (409).
        """
        with self._db.transaction():
            batch = self.get(key_name, batch_id, now_s)
            if batch.status == "cancelled":
                return batch
            if batch.status != "in_progress":
                raise InvalidRequest(
                    f"cannot cancel a batch that is {batch.status}",
                    param="batch_id",
                    code="batch_is_over",
                    status=409,
                )
            self._endings.cancel(batch.number, now_s)
            self._db.notify()
            return self._record(batch.number, now_s)

    # ------------------------------------------------------------------ responses

    def respond(self, new: NewResponse, now_s: float, *, ttl_s: int, quota: int) -> None:
        """Have a response come in the background: from its return on it is durable.

        Raises:
            InvalidRequest: the key has too many of them on their way (429), or has stored more
                than `quota` bytes in all (413).
        """
        window_s = min(RESPONSE_WINDOW_S, ttl_s)
        with self._db.transaction():
            what = "responses in the background"
            self._check_count(new.key_name, "IS NOT NULL", MAX_ACTIVE_RESPONSES, what)
            self._check_lines(new.key_name, 1, new.max_lines)
            response = self._responses.insert(new, now_s, ttl_s=ttl_s, quota=quota)
            batch = self._db.value(
                "INSERT INTO batches (id, key_name, endpoint, input_file, input_file_id,"
                ' "window", status, created_s, expires_s, output_ttl_s, request_digest, num_lines,'
                " num_bytes, row_bytes, response) VALUES (?, ?, ?, 0, '', '', 'in_progress', ?, ?,"
                " 0, '', 1, ?, ?, ?) RETURNING number",
                *(new.id, new.key_name, RESPONSES, int(now_s), int(now_s) + window_s),
                *(len(new.request), LINE_BYTES, response),
            )
            self._db.write("UPDATE responses SET batch = ? WHERE number = ?", batch, response)
            self._db.write(
                "INSERT INTO lines (batch, number, custom_id, position, num_bytes, state)"
                " VALUES (?, 0, '', 0, ?, 'queued')",
                *(batch, len(new.request)),
            )
            check_quota(self._db, new.key_name, quota, param="store")
            self._db.notify()

    def cancel_response(self, key_name: str, response_id: str, now_s: float) -> bytes:
        """Cancel a response in the background, if it is not over; return it.

        Raises:
            InvalidRequest: the key has none of this id (404), or it is not in the background (400).
        """
        with self._db.transaction():
            batch = self._responses.batch_of(key_name, response_id, now_s)
            if batch is not None:
                self._endings.cancel(batch, now_s)
        return self._responses.get(key_name, response_id, now_s)

    def delete_response(self, key_name: str, response_id: str, now_s: float) -> None:
        """Delete a response, and cancel it if it is not over; those that go on from it cannot be
        gone on from any more.

        Raises:
            InvalidRequest: the key has none of this id (404).
        """
        with self._db.transaction():
            batch = self._responses.batch(key_name, response_id)
            self._responses.remove(key_name, response_id, now_s)
            if batch is not None:
                self._endings.cancel(batch, now_s)

    # ------------------------------------------------------------------ work

    def begin(self, owner: str, now_s: float, *, has_crashed: bool = False) -> int:
        """Begin a new epoch of an owner, whose leases of earlier ones end; return it.

        `has_crashed`: what it still has leased may be why it died. A line that has been there
        MAX_CRASHES times is taken for the reason.
        """
        with self._db.transaction():
            if has_crashed:
                self._db.write(
                    "UPDATE lines SET crashes = crashes + 1 WHERE state = 'leased' AND owner = ?",
                    owner,
                )
                self._end_crashing(now_s)
            self._db.write(
                "UPDATE lines SET state = 'queued', owner = NULL WHERE state = 'leased'"
                " AND owner = ?",
                owner,
            )
            self._db.write(
                "DELETE FROM owners WHERE lease_until_s < ? AND name NOT IN"
                " (SELECT owner FROM lines WHERE state = 'leased')",
                now_s - FORGET_OWNER_S,
            )
            epoch = self._db.value(
                "INSERT INTO owners (name, epoch, lease_until_s) VALUES (?, 1, ?)"
                " ON CONFLICT (name) DO UPDATE SET epoch = owners.epoch + 1,"
                " lease_until_s = excluded.lease_until_s RETURNING epoch",
                *(owner, now_s),
            )
            return int(epoch)

    def _end_crashing(self, now_s: float) -> None:
        """Give the lines with which the process dies again and again an error as their result."""
        for (batch,) in self._db.rows(
            "SELECT DISTINCT batch FROM lines WHERE state = 'leased' AND crashes >= ?", MAX_CRASHES
        ):
            self._endings.fail(batch, CRASHED, least_crashes=MAX_CRASHES)
            if self._endings.num_left(batch) == 0:
                self._endings.end(batch, "completed", now_s)

    def lease(
        self,
        owner: str,
        epoch: int,
        now_s: float,
        *,
        lease_s: float,
        max_lines: int,
        max_bytes: int,
    ) -> list[LeasedLine]:
        """Lease lines, in the order of `Leasing`; at least one if there is one and room.

        All leases of the owner begin anew. Those of others are over whose time is. None is leased
        while too little space is free for results.
        """
        if self._db.is_low():
            return []
        with self._db.transaction(is_shared=True):
            self._renew(owner, epoch, now_s + lease_s)
            self._db.write(
                "UPDATE lines SET state = 'queued', owner = NULL WHERE (batch, number) IN"
                " (SELECT batch, number FROM lines WHERE state = 'leased' AND owner IN"
                " (SELECT name FROM owners WHERE lease_until_s < ? AND name != ?)"
                f"{self._db.skip_locked})",
                *(now_s, owner),
            )
            portion = self._leasing.choose(owner, now_s, max_lines=max_lines, max_bytes=max_bytes)
            self._db.write_many(
                "UPDATE lines SET state = 'leased', owner = ?, epoch = ?"
                " WHERE batch = ? AND number = ?",
                ((owner, epoch, line.batch, line.number) for line, _ in portion),
            )
        return self._leasing.texts(portion)

    def renew(self, owner: str, epoch: int, now_s: float, *, lease_s: float) -> None:
        """Have all leases of an owner begin anew. Raises LeaseLost."""
        with self._db.transaction(is_shared=True):
            self._renew(owner, epoch, now_s + lease_s)

    def _renew(self, owner: str, epoch: int, until_s: float) -> None:
        self._check_epoch(owner, epoch)
        self._db.write("UPDATE owners SET lease_until_s = ? WHERE name = ?", until_s, owner)

    def settle(self, owner: str, epoch: int, outcomes: Sequence[Outcome], now_s: float) -> int:
        """Take in what became of leased lines, all or nothing; return how many came too late."""
        num_late = 0
        sums: dict[int, list[int]] = {}
        with self._db.transaction(is_shared=True):
            self._check_epoch(owner, epoch)
            for outcome in sorted(outcomes, key=lambda each: (each.batch, each.number)):
                state = "queued"
                if outcome.result is not None:
                    state = "error" if outcome.is_error else "done"
                delay_s = LOSS_DELAY_S if outcome.is_lost else 0.0
                not_before_s = now_s + outcome.wait_s if outcome.wait_s else 0.0
                changed = self._db.write(
                    "UPDATE lines SET state = ?, result = ?, attempt = attempt + ?, owner = NULL,"
                    " not_before_s = CASE WHEN ? AND losses > 0 THEN ? + ? *"
                    " (1 << CAST(losses - 1 AS INTEGER)) ELSE ? END, losses = losses + ?"
                    " WHERE batch = ? AND number = ? AND state = 'leased' AND owner = ?"
                    " AND epoch = ?",
                    *(state, outcome.result, int(outcome.has_failed)),
                    *(outcome.is_lost, now_s, delay_s, not_before_s, int(outcome.is_lost)),
                    *(outcome.batch, outcome.number, owner, epoch),
                )
                num_late += not changed
                if changed and outcome.result is not None:
                    tokens = outcome.prompt_tokens, outcome.output_tokens
                    size, is_error = len(outcome.result) + 1, outcome.is_error
                    sizes = size * (not is_error), size * is_error
                    news = not is_error, is_error, outcome.num_bytes, *tokens, *sizes
                    before = sums.get(outcome.batch, (0,) * len(news))
                    sums[outcome.batch] = [a + b for a, b in zip(before, news, strict=True)]
            over: list[tuple[str, int]] = []
            for batch, found in sorted(sums.items()):
                key_name, num_left = self._db.rows(
                    "UPDATE batches SET num_done = num_done + ?, num_failed = num_failed + ?,"
                    " done_bytes = done_bytes + ?, prompt_tokens = prompt_tokens + ?,"
                    " output_tokens = output_tokens + ?, output_bytes = output_bytes + ?,"
                    " error_bytes = error_bytes + ? WHERE number = ?"
                    " RETURNING key_name, num_lines - num_done - num_failed",
                    *(*found, batch),
                )[0]
                if num_left == 0:
                    over.append((key_name, batch))
            for _, batch in sorted(over):
                self._endings.end(batch, "completed", now_s)
        return num_late

    def expire(self, now_s: float, *, quota: int = 2**62) -> int:
        """Go on with the end of a batch that is to be run no more; see `Endings.fail_some`."""
        return self._endings.fail_some(now_s, quota)

    def purge(self, now_s: float) -> int:
        """Forget some batches that were over so long ago that no file of theirs is left, or were
        never made; return how many."""
        with self._db.transaction():
            stale = self._db.row(
                "SELECT number FROM batches WHERE status = 'preparing' AND expires_s <= ?", now_s
            )
            if stale is not None:
                self._drop(stale[0])
            return (stale is not None) + self._db.write(
                "DELETE FROM batches WHERE number IN (SELECT number FROM batches"
                " WHERE ended_s <= ? LIMIT ?)",
                *(math.floor(now_s) - MAX_TTL_S, PURGE_ROWS),
            )

    def held(self, owner: str, epoch: int) -> Held:
        """Return what there is still to be worked on. Raises LeaseLost."""
        with self._db.snapshot():
            self._check_epoch(owner, epoch)
            batches = self._db.rows(
                "SELECT number FROM batches WHERE status = 'in_progress' AND failing IS NULL"
            )
            lines = self._db.rows(
                "SELECT batch, number FROM lines WHERE state = 'leased' AND owner = ?"
                " AND epoch = ?",
                *(owner, epoch),
            )
        return Held(
            frozenset(number for (number,) in batches),
            frozenset((batch, number) for batch, number in lines),
        )

    def oldest_s(self) -> int | None:
        """Return when the oldest of the batches in progress was made; None: there is none."""
        made_s: int | None = self._db.value(
            "SELECT min(created_s) FROM batches WHERE status = 'in_progress'"
        )
        return made_s

    def counts(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return how many lines of the batches in progress, and how many batches, are in which
        state."""
        with self._db.snapshot():
            total, done, failed = self._db.rows(
                "SELECT coalesce(sum(num_lines), 0), coalesce(sum(num_done), 0),"
                " coalesce(sum(num_failed), 0) FROM batches WHERE status = 'in_progress'"
            )[0]
            leased = self._db.value("SELECT count(*) FROM lines WHERE state = 'leased'")
            batches = dict(
                self._db.rows(
                    "SELECT status, count(*) FROM batches WHERE response IS NULL GROUP BY status"
                )
            )
        queued = total - done - failed - leased
        lines = {"queued": queued, "leased": leased, "done": done, "error": failed}
        return lines, {status: batches.get(status, 0) for status in get_args(Status)}

    def _check_epoch(self, owner: str, epoch: int) -> None:
        """Raise LeaseLost unless this is the owner's last epoch."""
        if self._db.value("SELECT epoch FROM owners WHERE name = ?", owner) != epoch:
            raise LeaseLost(f"{owner} has begun anew")

    def _record(self, number: int, now_s: float) -> BatchRecord:
        rows = self._db.rows(f"SELECT {_COLUMNS} FROM batches WHERE number = ?", number)
        return self._records(rows, now_s)[0]

    def _records(self, rows: Sequence[tuple[Any, ...]], now_s: float) -> list[BatchRecord]:
        """Return batches, with what is to be expected of those in progress."""
        batches = [dict(zip(_NAMES, row, strict=True)) for row in rows]
        in_progress = any(batch["status"] == "in_progress" for batch in batches)
        forecasts = self._forecasts.all(now_s) if in_progress else {}
        return [BatchRecord(**each, forecast=forecasts.get(each["number"])) for each in batches]
