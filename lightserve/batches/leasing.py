"""The choice of the lines that are leased next, and their contents.

With one key, lines of the batch that ends first go before others. Several keys share, as far as the
windows that were promised allow it: the key that has had the least goes first. That is the virtual
token counter of Sheng et al., "Fairness in Serving Large Language Models", as the router has it for
requests; it counts the time that a line takes of an idle engine, when the line is leased. Once a
promise would not be kept so, promised batches go before others, by the ends of their windows, until
there is time to spare again.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from lightserve.batches.database import Database
from lightserve.batches.files import Files
from lightserve.batches.forecast import Forecasts, Left, Work, keys_share, work_of
from lightserve.batches.records import LeasedLine

MAX_CRASHES = 6
SUSPECT_CRASHES = 2
"""A line with which the process has died so often runs beside no other such one: so no line is
taken for the reason that only ran beside it."""
LOSS_DELAY_S = 60.0
"""Seconds that a line waits after its second loss, twice as long after each further one. So no
line alone costs as many restarts of workers as a server allows by default."""
MAX_LOSS_DELAY_S = 16 * LOSS_DELAY_S
"""No line waits longer: what seems to was lost before the clock was put back."""

_BATCHES = (
    "SELECT key_name, is_promised, id, endpoint, input_file, response, number, expires_s,"
    " num_lines, num_done + num_failed, num_bytes, done_bytes, prompt_tokens, output_tokens,"
    " limit_tokens, EXISTS (SELECT 1 FROM lines WHERE batch = batches.number"
    " AND state = 'queued') FROM batches WHERE status = 'in_progress' AND expires_s > ?"
    " AND failing IS NULL ORDER BY expires_s, number"
)


class Place(NamedTuple):
    """The place of a line: a stretch of a file, or a response."""

    file: int
    position: int
    num_bytes: int
    response: int | None
    """Number of the response in the background that the line asks for; None: it is in a file."""


class _Batch(NamedTuple):
    key_name: str
    is_promised: bool
    id: str
    endpoint: str
    input_file: int
    response: int | None
    left: Left
    has_queued: bool


Portion = list[tuple[LeasedLine, Place]]


class Leasing:
    """See the module. `choose` is part of a transaction; `now_s` is Unix time."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._files = Files(database)
        self._forecasts = Forecasts(database)
        self._turns = Turns()

    def choose(self, owner: str, now_s: float, *, max_lines: int, max_bytes: int) -> Portion:
        """Return lines that are queued; at least one if there is one and room."""
        rows = self._db.rows(_BATCHES, now_s)
        batches = [_Batch._make((*row[:6], Left(*row[6:-1]), row[-1])) for row in rows]
        waiting = [batch for batch in batches if batch.has_queued]
        taking = _Taking(self._db, owner, now_s, max_bytes)
        if len({batch.key_name for batch in waiting}) <= 1:
            taking.take(waiting, max_lines)
            return taking.lines
        costs = self._costs(batches, now_s)
        if costs is None:
            taking.take(sorted(waiting, key=lambda batch: not batch.is_promised), max_lines)
            return taking.lines
        of_keys = {batch.key_name: costs[batch.key_name] for batch in waiting}
        while of_keys and (room := max_lines - len(taking.lines)) > 0 and taking.has_room:
            for key, num_lines in self._turns.split(of_keys, room).items():
                own = [batch for batch in waiting if batch.key_name == key]
                num_taken = taking.take(own, num_lines)
                if num_taken < num_lines:
                    self._turns.give_back(key, costs[key], num_lines - num_taken)
                    del of_keys[key]
        return taking.lines

    def _costs(self, batches: Sequence[_Batch], now_s: float) -> dict[str, float] | None:
        """Return what a line of each key takes; None: promises leave no time to share."""
        pace = self._forecasts.pace(now_s)
        if pace is None:
            return {batch.key_name: 1.0 for batch in batches}
        works = [
            work_of(batch.left, pace)._replace(
                key_name=batch.key_name, is_promised=bool(batch.is_promised)
            )
            for batch in batches
        ]
        return line_costs(works) if keys_share(works, pace, now_s) else None

    def texts(self, portion: Portion) -> list[LeasedLine]:
        """Return lines with what they say, or where in objects they do.

        This is outside of the transaction, which others would wait for. Lines are left out of what
        was cancelled and deleted since.
        """
        in_objects = {place.file: self._files.place(place.file) for _, place in portion}
        lines = []
        for line, place in portion:
            values: dict[str, object]
            if (object_id := in_objects[place.file]) is not None:
                values = {"object_id": object_id, "position": place.position}
            elif text := self._text(place):
                values = {"line": text}
            else:
                continue
            lines.append(msgspec.structs.replace(line, num_bytes=place.num_bytes, **values))
        return lines

    def _text(self, place: Place) -> bytes:
        if place.response is None:
            return self._files.read_span(place.file, place.position, place.num_bytes)
        return (
            self._db.value("SELECT request FROM responses WHERE number = ?", place.response) or b""
        )


class _Taking:
    """Lines that are taken in one transaction."""

    def __init__(self, database: Database, owner: str, now_s: float, max_bytes: int) -> None:
        self.lines: Portion = []
        self._db = database
        self._now_s = now_s
        self._max_bytes = max_bytes
        self._last: dict[int, int] = {}
        """The number of the last line taken, by batch."""
        self._num_suspects = self._db.value(
            "SELECT count(*) FROM lines WHERE state = 'leased' AND owner = ? AND crashes >= ?",
            *(owner, SUSPECT_CRASHES),
        )

    @property
    def has_room(self) -> bool:
        """Whether more bytes of lines may be taken."""
        return self._max_bytes > 0

    def take(self, batches: Sequence[_Batch], max_lines: int) -> int:
        """Take `max_lines` lines at most, of the first batches with any; return their number."""
        before = len(self.lines)
        for batch in batches:
            room = max_lines - (len(self.lines) - before)
            if room <= 0 or not self.has_room:
                break
            self._take(batch, room)
        return len(self.lines) - before

    def _take(self, batch: _Batch, max_lines: int) -> None:
        """Take the first queued lines of a batch, as far as there is room; one suspect."""
        number = batch.left.number
        most_crashes = MAX_CRASHES if self._num_suspects == 0 else SUSPECT_CRASHES - 1
        for index, custom_id, position, num_bytes, attempt, losses, crashes in self._db.rows(
            "SELECT number, custom_id, position, num_bytes, attempt, losses, crashes FROM lines"
            " WHERE batch = ? AND number > ? AND state = 'queued' AND crashes <= ?"
            " AND (not_before_s <= ? OR not_before_s > ?) ORDER BY number LIMIT ?"
            f"{self._db.skip_locked}",
            *(number, self._last.get(number, -1), most_crashes, self._now_s),
            *(self._now_s + MAX_LOSS_DELAY_S, max_lines),
        ):
            if not self.has_room:
                break
            if crashes > most_crashes:
                continue
            if crashes >= SUSPECT_CRASHES:
                most_crashes = SUSPECT_CRASHES - 1
                self._num_suspects += 1
            self._max_bytes -= num_bytes
            self._last[number] = index
            line = LeasedLine(
                batch=number,
                number=index,
                batch_id=batch.id,
                custom_id=custom_id,
                endpoint=batch.endpoint,
                key_name=batch.key_name,
                attempt=attempt,
                losses=losses,
                crashes=crashes,
                line=b"",
                expires_s=int(batch.left.expires_s),
            )
            self.lines.append((line, Place(batch.input_file, position, num_bytes, batch.response)))


def line_costs(works: Iterable[Work]) -> dict[str, float]:
    """Return what a line of each key takes of an idle engine, in seconds, at the mean."""
    sums: dict[str, tuple[float, int]] = {}
    for work in works:
        seconds, num_lines = sums.get(work.key_name, (0.0, 0))
        sums[work.key_name] = seconds + work.seconds, num_lines + work.num_lines
    return {key: max(1e-6, seconds / max(1, num)) for key, (seconds, num) in sums.items()}


class Turns:
    """Work that each key with waiting lines has had; a key that comes has saved up nothing."""

    def __init__(self) -> None:
        self._had: dict[str, float] = {}

    def split(self, costs: Mapping[str, float], num_lines: int) -> dict[str, int]:
        """Return how many of so many lines are each key's, by what one takes; and count them."""
        least = min((had for key, had in self._had.items() if key in costs), default=0.0)
        self._had = {key: max(least, self._had.get(key, least)) for key in costs}
        turns = [(had, key) for key, had in self._had.items()]
        heapq.heapify(turns)
        portions: dict[str, int] = {}
        for _ in range(num_lines if turns else 0):
            had, key = turns[0]
            portions[key] = portions.get(key, 0) + 1
            self._had[key] = had + costs[key]
            heapq.heapreplace(turns, (self._had[key], key))
        return portions

    def give_back(self, key: str, cost: float, num_lines: int) -> None:
        """Count so many lines less: the key has no more."""
        self._had[key] -= cost * num_lines
