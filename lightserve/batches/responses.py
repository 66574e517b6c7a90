"""Responses of a store: each with its own input, and the one that it goes on from."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lightserve.batches.database import Database
from lightserve.batches.files import check_quota
from lightserve.batches.records import NewResponse
from lightserve.errors import InvalidRequest

PAGE_ROWS = 64

_IS_THERE = "id = ? AND key_name = ? AND expires_s > ?"


class _Output(msgspec.Struct, frozen=True):
    status: str
    output: msgspec.Raw


_OUTPUT = msgspec.json.Decoder(_Output)


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
        num_bytes = len(new.input) + len(new.response)
        with self._db.transaction():
            self._db.write(
                "INSERT INTO responses (id, key_name, previous_id, created_s, expires_s,"
                " num_bytes, input, response) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                *(new.id, new.key_name, new.previous_id, int(now_s), int(now_s) + ttl_s),
                *(num_bytes, new.input, new.response),
            )
            check_quota(self._db, new.key_name, quota, param="store")

    def get(self, key_name: str, response_id: str, now_s: float) -> bytes:
        """Return a response as JSON. Raises InvalidRequest (404): the key has none of this id."""
        return self._column("response", key_name, response_id, now_s)

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
                its end (409), or they have more than `max_bytes` (400).
        """
        found: list[bytes] = []
        num_bytes, current = 0, response_id
        with self._db.snapshot():
            while current is not None:
                row = self._db.row(
                    f"SELECT previous_id, input, response FROM responses WHERE {_IS_THERE}",
                    *(current, key_name, now_s),
                )
                if row is None:
                    raise no_response(current, param="previous_response_id")
                previous_id, given, response = row
                output = _OUTPUT.decode(response)
                if output.status not in ("completed", "incomplete"):
                    raise InvalidRequest(
                        f"previous_response_id must be of a response that is completed or"
                        f" incomplete, got {current[:64]!r}, which is {output.status}",
                        param="previous_response_id",
                        code="response_not_over",
                        status=409,
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
                current = previous_id
        return found[::-1]

    def delete(self, key_name: str, response_id: str, now_s: float) -> None:
        """Delete a response; those that go on from it cannot be gone on from any more.

        Raises:
            InvalidRequest: the key has none of this id (404).
        """
        with self._db.transaction():
            if not self._db.write(
                f"DELETE FROM responses WHERE {_IS_THERE}", response_id, key_name, now_s
            ):
                raise no_response(response_id)

    def purge(self, now_s: float) -> int:
        """Delete some of the responses whose time is over; return how many."""
        with self._db.transaction():
            return self._db.write(
                "DELETE FROM responses WHERE number IN (SELECT number FROM responses"
                " WHERE expires_s <= ? LIMIT ?)",
                *(now_s, PAGE_ROWS),
            )
