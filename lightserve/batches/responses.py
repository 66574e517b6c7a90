"""Responses of a store: each with its own input, and the one that it goes on from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from lightserve.batches.database import Database
from lightserve.batches.files import check_quota
from lightserve.batches.records import MAX_LINKS, NewResponse
from lightserve.errors import InvalidRequest

PAGE_ROWS = 64
PAGE_LINKS = 16
"""Responses of a chain that one query reads."""

_IS_THERE = "id = ? AND key_name = ? AND expires_s > ?"
_CHAIN = f"""
WITH RECURSIVE chain AS (
    SELECT 0 AS depth, id, previous_id, input, response FROM responses WHERE {_IS_THERE}
    UNION ALL
    SELECT depth + 1, other.id, other.previous_id, other.input, other.response
    FROM responses AS other JOIN chain ON other.id = chain.previous_id
    WHERE other.key_name = ? AND other.expires_s > ? AND depth < ?
) SELECT depth, id, previous_id, input, response FROM chain ORDER BY depth
"""


class _State(msgspec.Struct, frozen=True):
    """Fields of a response that this module needs."""

    status: str
    output: msgspec.Raw
    background: bool = False


class _Error(msgspec.Struct, frozen=True):
    message: str


class _Refusal(msgspec.Struct, frozen=True):
    error: _Error


class _Answer(msgspec.Struct, frozen=True):
    status_code: int
    body: msgspec.Raw


class _Result(msgspec.Struct, frozen=True):
    """A line of an output or error file."""

    response: _Answer | None
    error: _Error | None


_STATE = msgspec.json.Decoder(_State)
_RESULT = msgspec.json.Decoder(_Result)
_OWN = ("id", "created_at", "background", "store", "previous_response_id")
"""Fields of a response in the background that its answer does not change."""
_CANCELLED = {"status": b'"cancelled"'}


def _with(response: bytes, fields: Mapping[str, bytes]) -> bytes:
    """Return a response with other values, all JSON."""
    known = msgspec.json.decode(response, type=dict[str, msgspec.Raw])
    return msgspec.json.encode(known | {name: msgspec.Raw(text) for name, text in fields.items()})


def _outcome(result: bytes) -> dict[str, bytes]:
    """Return the fields that a response has from the result of its line."""
    found = _RESULT.decode(result)
    if found.response is None:
        assert found.error is not None
        return _failure("server_error", found.error.message)
    answer = found.response
    if answer.status_code == 200:
        fields = msgspec.json.decode(answer.body, type=dict[str, msgspec.Raw])
        return {name: bytes(text) for name, text in fields.items() if name not in _OWN}
    message = msgspec.json.decode(answer.body, type=_Refusal).error.message
    return _failure("invalid_prompt" if answer.status_code < 500 else "server_error", message)


def _failure(code: str, message: str) -> dict[str, bytes]:
    error = msgspec.json.encode({"code": code, "message": message})
    return {"status": b'"failed"', "error": error}


def no_response(response_id: str, *, param: str = "response_id") -> InvalidRequest:
    """Return the refusal of an id that is no response of the key's."""
    return InvalidRequest(
        f"there is no response {response_id[:64]!r}: {param} must be of one that was stored, and"
        " neither deleted nor expired since",
        param=param,
        code="response_not_found",
        status=404,
    )


class Responses:
    """See the module. Each method is one transaction; `now_s` is Unix time."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def add(self, new: NewResponse, now_s: float, *, ttl_s: int, quota: int) -> None:
        """Keep a response: from its return on it is durable.

        Raises:
            InvalidRequest: the key has stored more than `quota` bytes in all (413).
        """
        with self._db.transaction():
            self.insert(new, now_s, ttl_s=ttl_s, quota=quota)

    def insert(self, new: NewResponse, now_s: float, *, ttl_s: int, quota: int) -> int:
        """Do the same in a transaction that is under way; return the response's number."""
        self._db.check_space()
        num_bytes = len(new.input) + len(new.response) + len(new.request)
        number: int = self._db.value(
            "INSERT INTO responses (id, key_name, previous_id, created_s, expires_s,"
            " num_bytes, input, response, request) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
            " RETURNING number",
            *(new.id, new.key_name, new.previous_id, int(now_s), int(now_s) + ttl_s),
            *(num_bytes, new.input, new.response, new.request),
        )
        check_quota(self._db, new.key_name, quota, param="store")
        return number

    def get(self, key_name: str, response_id: str, now_s: float) -> bytes:
        """Return a response as JSON. Raises InvalidRequest (404): the key has none of this id."""
        with self._db.snapshot():
            response = self._column("response", key_name, response_id, now_s)
            is_running = self._db.value(
                "SELECT lines.state = 'leased' FROM responses JOIN lines"
                f" ON lines.batch = responses.batch WHERE {_IS_THERE}",
                *(response_id, key_name, now_s),
            )
        return _with(response, {"status": b'"in_progress"'}) if is_running else response

    def batch_of(self, key_name: str, response_id: str, now_s: float) -> int | None:
        """Return the number of the batch that is to answer a response; None: it is over.

        Raises:
            InvalidRequest: the key has none of this id (404), or it is not in the background (400).
        """
        response = self._column("response", key_name, response_id, now_s)
        if not _STATE.decode(response).background:
            raise InvalidRequest(
                "response_id must name a response with background: true", param="response_id"
            )
        return self.batch(key_name, response_id)

    def batch(self, key_name: str, response_id: str) -> int | None:
        """Return the number of the batch that is to answer a response of a key; None: there is
        none."""
        batch: int | None = self._db.value(
            "SELECT batch FROM responses WHERE id = ? AND key_name = ?", response_id, key_name
        )
        return batch

    def finish(self, number: int, result: bytes | None) -> None:
        """End a response in the background, in the transaction that is under way.

        `result` is that of its line; None: it was cancelled.
        """
        response = self._db.value("SELECT response FROM responses WHERE number = ?", number)
        if response is None:  # it was deleted
            return
        response = _with(response, _CANCELLED if result is None else _outcome(result))
        self._db.write(
            "UPDATE responses SET response = ?, num_bytes = length(input) + length(?),"
            " batch = NULL, request = NULL WHERE number = ?",
            *(response, response, number),
        )

    def input(self, key_name: str, response_id: str, now_s: float) -> bytes:
        """Return what a response was asked, without what came before, as a JSON list of items.

        Raises:
            InvalidRequest: the key has none of this id (404).
        """
        return self._column("input", key_name, response_id, now_s)

    def _column(self, name: str, key_name: str, response_id: str, now_s: float) -> bytes:
        row = self._db.row(
            f"SELECT {name} FROM responses WHERE {_IS_THERE}", response_id, key_name, now_s
        )
        if row is None:
            raise no_response(response_id)
        found: bytes = row[0]
        return found

    def conversation(
        self, key_name: str, response_id: str, now_s: float, *, max_bytes: int
    ) -> Sequence[bytes]:
        """Return inputs and outputs that lead to the end of a response, as JSON lists of items.

        Raises:
            InvalidRequest: it is not there, or one that it goes on from (404), it has not come to
                its end (409), or they have more than `max_bytes` or are too many (400).
        """
        found: list[bytes] = []
        num_bytes = 0
        with self._db.snapshot():
            for current, given, response in self._links(key_name, response_id, now_s):
                output = _STATE.decode(response)
                if output.status not in ("completed", "incomplete"):
                    raise InvalidRequest(
                        f"previous_response_id must be of a response that is completed or"
                        f" incomplete, got {current[:64]!r}, which is {output.status}",
                        param="previous_response_id",
                        code="response_not_over",
                        status=409,
                    )
                if len(found) == 2 * MAX_LINKS:
                    raise InvalidRequest(
                        f"the conversation up to previous_response_id must have at most {MAX_LINKS}"
                        " responses, got more",
                        param="previous_response_id",
                        code="context_length_exceeded",
                    )
                found += [bytes(output.output), given]
                num_bytes += len(output.output) + len(given)
                if num_bytes > max_bytes:
                    raise InvalidRequest(
                        "the conversation up to previous_response_id must have at most"
                        f" {max_bytes} bytes (--max-body-bytes), got more",
                        param="previous_response_id",
                        code="context_length_exceeded",
                    )
        return found[::-1]

    def _links(
        self, key_name: str, response_id: str, now_s: float
    ) -> Iterator[tuple[str, bytes, bytes]]:
        """Yield id, input and response of each that leads to one, from the last on.

        Raises:
            InvalidRequest: one is not there (404).
        """
        current: str | None = response_id
        while current is not None:
            rows = self._db.rows(_CHAIN, current, *(key_name, now_s) * 2, PAGE_LINKS - 1)
            if not rows:
                raise no_response(current, param="previous_response_id")
            for _, found_id, _, given, response in rows:
                yield found_id, given, response
            current = rows[-1][2]

    def remove(self, key_name: str, response_id: str, now_s: float) -> None:
        """Delete a response, in the transaction that is under way.

        Raises:
            InvalidRequest: the key has none of this id (404).
        """
        if not self._db.write(
            f"DELETE FROM responses WHERE {_IS_THERE}", response_id, key_name, now_s
        ):
            raise no_response(response_id)

    def purge(self, now_s: float) -> int:
        """Delete some of the responses whose time is over; return how many."""
        with self._db.transaction():
            return self._db.write(
                "DELETE FROM responses WHERE number IN (SELECT number FROM responses"
                " WHERE expires_s <= ? AND batch IS NULL LIMIT ?)",
                *(math.floor(now_s), PAGE_ROWS),
            )
