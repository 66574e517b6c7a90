"""When batches will have been worked off, from the pace so far and what is left: what is promised.

Work is measured in seconds of an idle engine: what the router's cost model predicts for the
tokens of a line. The share of the engine that batches have had while lines were waiting says
how fast they get on; with too little history it is ASSUMED_SHARE. How long lines are is known from
those of their batch that are over, or else from those of others, and their own limits.

Of a key, lines of the batch that ends first run before others, and keys share (`leasing`): so a
batch ends when all the work up to it is done. Promises stand above shares: a batch that is made now
must leave every one before it as it is, of whatever key.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lightserve.batches.database import Database
from lightserve.batches.records import MAX_WINDOW_S, Forecast, LineSums, NewBatch
from lightserve.errors import InvalidRequest

ASSUMED_SHARE = 0.5
MARGIN = 1.25
"""A promise is made only if it is kept though batches take longer by this, at the lowest share that
they have had of late."""
LOW_MINUTES = 3
"""That is the share over so many minutes in a row."""
HISTORY_MINUTES = 60
LEAST_BUSY_S, LEAST_LINES = 60.0, 32
"""Less of history is too little."""
FEW_BUSY_S = 15.0
"""From so little on it is too little to promise anything by, but lines are due by it where it is
worse than what was assumed: a batch must not be behind before that is noticed."""
LEAST_OWN_LINES = 16
"""Lines of a batch with results, before its own lines say how long the others are."""
LEAST_SHARE = 0.01
TAIL_LINES = 1.5
"""A batch ends with the last of its lines: of those that are begun last, later than the mean by so
many times what a line takes, as long ones last longest, and lines of others begin beside them.
Chosen on ten seeds; see docs/results/batches.md."""
TOKENS_PER_BYTE = 0.25
ASSUMED_OUTPUT_TOKENS = 256


class Work(NamedTuple):
    """The rest of a batch."""

    number: int
    expires_s: float
    seconds: float
    """Time of an idle engine."""
    num_lines: int = 1
    """Lines without a result."""
    is_promised: bool = True
    """Whether the batch is to be done in its window."""
    key_name: str = ""


def work_until(works: Iterable[Work], *, by_keys: bool) -> dict[int, float]:
    """Return how much of all the work is done once each batch is, by its number.

    `by_keys`: they share evenly. By the time that one has had so much of the engine every other one
    has had as much, or all that it wants; its batches come by the ends of their windows. Otherwise
    all batches do, those that were promised first.
    """
    if not by_keys:
        in_order = sorted(works, key=lambda w: (not w.is_promised, w.expires_s, w.number))
        done_s = itertools.accumulate(work.seconds for work in in_order)
        return dict(zip((work.number for work in in_order), done_s, strict=True))
    in_order = sorted(works, key=lambda work: (work.expires_s, work.number))
    totals: dict[str, float] = {}
    for work in in_order:
        totals[work.key_name] = totals.get(work.key_name, 0.0) + work.seconds
    had = dict.fromkeys(totals, 0.0)
    found = {}
    for work in in_order:
        own = had[work.key_name] = had[work.key_name] + work.seconds
        found[work.number] = sum(min(own, total) for total in totals.values())
    return found


class Pace(NamedTuple):
    """The speed of lines, and their mean sizes."""

    prompt_token_s: float
    output_token_s: float
    """Seconds of an idle engine for a token of a prompt, and of an output."""
    share: float
    """Share of the engine that batches have; above 1 where several servers share the store."""
    low_share: float
    """The lowest recent share."""
    is_observed: bool
    tokens_per_byte: float
    """Tokens of prompts for each byte of lines."""
    output_tokens: float
    """Mean for each line."""
    sure_share: float = 1.0
    """The lowest recent share, also while the history is short; due times follow from it."""
    num_servers: int = 1
    tail_s: float = 0.0
    """Seconds from the time at which all the work of a batch is done until its last line ends."""


class Left(NamedTuple):
    """The rest of a batch as the store has it: sums over lines."""

    number: int
    expires_s: float
    num_lines: int
    num_done: int
    """Failed ones included."""
    num_bytes: int
    done_bytes: int
    prompt_tokens: int
    output_tokens: int
    """Output tokens of the lines with results."""
    limit_tokens: int | None
    """The most tokens of all outputs; None: some line sets no limit."""


def work_of(left: Left, pace: Pace) -> Work:
    """Return how much of a batch is left."""
    per_byte, output = pace.tokens_per_byte, pace.output_tokens
    if left.limit_tokens is not None:
        output = min(output, left.limit_tokens / left.num_lines)
    if left.num_done >= LEAST_OWN_LINES and left.done_bytes:
        per_byte = left.prompt_tokens / left.done_bytes
        output = left.output_tokens / left.num_done
    prompts_s = pace.prompt_token_s * per_byte * (left.num_bytes - left.done_bytes)
    outputs_s = pace.output_token_s * output * (left.num_lines - left.num_done)
    return Work(left.number, left.expires_s, prompts_s + outputs_s, left.num_lines - left.num_done)


def ends(works: Sequence[Work], pace: Pace, now_s: float) -> dict[int, float]:
    """Return when each batch will have been worked off, by its number."""
    done_s = work_until(works, by_keys=keys_share(works, pace, now_s))
    return {n: now_s + seconds / pace.share + pace.tail_s for n, seconds in done_s.items()}


def keys_share(works: Sequence[Work], pace: Pace, now_s: float) -> bool:
    """Return whether keys share: every promise is kept so, with its margin."""
    done_s, per_s = work_until(works, by_keys=True), MARGIN / pace.low_share
    return all(now_s + done_s[w.number] * per_s <= w.expires_s for w in works if w.is_promised)


def earliest_window(
    seconds: float, others: Iterable[Work], share: float, now_s: float, *, least_s: float
) -> int:
    """Return the shortest window from `least_s` on in which so much work can be promised.

    All promises made before are kept; one that cannot be kept anyway stands in no way.
    """
    waiting = sorted(others, key=lambda work: (work.expires_s, work.number))
    per_s = MARGIN / share
    before = list(itertools.accumulate((work.seconds for work in waiting), initial=0.0))
    rooms: list[float] = []
    """Seconds of work that fit before each of them, from the last on."""
    for work, done_s in zip(reversed(waiting), reversed(before), strict=False):
        spare_s = (work.expires_s - now_s) / per_s - done_s
        least = rooms[-1] if rooms else math.inf
        rooms.append(min(least, spare_s) if spare_s >= 0.0 else least)
    window_s = math.ceil(least_s)
    for work, before_s, room_s in zip(waiting, before, reversed(rooms), strict=False):
        window_s = max(window_s, math.ceil((before_s + seconds) * per_s))
        if now_s + window_s < work.expires_s and seconds <= room_s:
            return window_s
        window_s = max(math.ceil(least_s), math.ceil(work.expires_s - now_s))
    return max(window_s, math.ceil((before[-1] + seconds) * per_s))


def dues(
    works: Iterable[Work], pace: Pace, now_s: float, *, num_leased: Mapping[int, int]
) -> dict[int, float]:
    """Return until when the lines in flight of each batch should be answered, by its number.

    Behind them come the lines that wait, of their batch and of those promised before it: these take
    their time at the lowest share of late, and must be over when the window is. As long as nothing
    gets on, that time stays where it is, and the lines come nearer to it; what gets on puts it off.
    A batch cannot wait for its own lines alone: those before it are due for it as well. One that
    was not promised, or could not be kept with all of the engine, is not due.
    """
    found, waiting_s, total_s = {}, 0.0, 0.0
    most = max(pace.share, float(pace.num_servers))
    for work in sorted(works, key=lambda work: (work.expires_s, work.number)):
        found[work.number] = math.inf
        if not work.is_promised:
            continue
        total_s += work.seconds
        waiting_s += work.seconds * max(0.0, 1.0 - num_leased.get(work.number, 0) / work.num_lines)
        behind_s = waiting_s / pace.sure_share + pace.tail_s if waiting_s else 0.0
        if now_s + total_s / most <= work.expires_s:
            found[work.number] = work.expires_s - behind_s
    least_s = math.inf
    for number in reversed(found):
        if found[number] < math.inf:
            found[number] = least_s = min(least_s, found[number])
    return found


class Costs(NamedTuple):
    """Seconds of an idle engine for a token; 0: not known."""

    prompt_token_s: float
    output_token_s: float


class Tokens(NamedTuple):
    """Tokens of a line that has its result."""

    prompt: int = 0
    output: int = 0


_LEFT = (
    "number, expires_s, num_lines, num_done + num_failed, num_bytes, done_bytes, prompt_tokens,"
    " output_tokens, limit_tokens"
)


class Due(NamedTuple):
    """A batch in progress, without anything that its client has written."""

    id: str
    endpoint: str
    num_lines: int
    num_done: int
    num_failed: int
    promised_s: int
    """When its window ends."""
    forecast: Forecast | None
    """None: nothing is known yet."""


class Forecasts:
    """The history of the pace in the store, and the forecasts that follow from it."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def note(
        self, now_s: float, busy_s: float, lines: Sequence[tuple[int, Tokens]], costs: Costs
    ) -> None:
        """Take in what was done in so many seconds while lines were waiting: bytes and tokens."""
        minute = int(now_s) // 60
        sums = [sum(column) for column in zip(*((n, *t) for n, t in lines), strict=True)]
        with self._db.transaction():
            self._db.write("DELETE FROM pace WHERE minute < ?", minute - HISTORY_MINUTES)
            self._db.write(
                "INSERT INTO pace VALUES (?, 0, 0, 0, 0, 0) ON CONFLICT DO NOTHING", minute
            )
            self._db.write(
                "UPDATE pace SET busy_s = busy_s + ?, num_lines = num_lines + ?, num_bytes ="
                " num_bytes + ?, prompt_tokens = prompt_tokens + ?, output_tokens ="
                " output_tokens + ? WHERE minute = ?",
                *(busy_s, len(lines), *(sums or (0, 0, 0)), minute),
            )
            self._db.write(
                "INSERT INTO costs VALUES (0, ?, ?) ON CONFLICT (id) DO UPDATE SET"
                " prompt_token_s = excluded.prompt_token_s,"
                " output_token_s = excluded.output_token_s",
                *costs,
            )

    def pace(self, now_s: float) -> Pace | None:
        """Return the pace; None: what tokens cost is not known yet."""
        costs = self._db.row("SELECT prompt_token_s, output_token_s FROM costs")
        if costs is None or min(costs) <= 0.0:
            return None
        minutes = self._db.rows(
            "SELECT busy_s, num_lines, num_bytes, prompt_tokens, output_tokens FROM pace"
            " WHERE minute >= ? ORDER BY minute",
            int(now_s) // 60 - HISTORY_MINUTES,
        )
        busy_s, num_lines, num_bytes, prompt_tokens, output_tokens = (
            sum(column) for column in zip((0, 0, 0, 0, 0), *minutes, strict=True)
        )
        is_known = num_lines >= LEAST_LINES and num_bytes > 0
        is_observed = is_known and busy_s >= LEAST_BUSY_S
        works = [(m[0], m[3] * costs[0] + m[4] * costs[1]) for m in minutes]
        so_far = sum(work for _, work in works) / max(1.0, busy_s)
        share = max(LEAST_SHARE, so_far) if is_observed else ASSUMED_SHARE
        shares = [share, *(_shares_of_spans(works) if is_observed else ())]
        sure = [*shares, *([so_far] if num_lines and busy_s >= FEW_BUSY_S else ())]
        # Seconds were counted by each server that shares the store.
        num_servers = max(
            1, self._db.value("SELECT count(*) FROM owners WHERE lease_until_s > ?", now_s)
        )
        return Pace(
            prompt_token_s=costs[0],
            output_token_s=costs[1],
            share=share * num_servers,
            low_share=max(LEAST_SHARE, min(shares)) * num_servers,
            sure_share=max(LEAST_SHARE, min(sure)) * num_servers,
            num_servers=num_servers,
            tail_s=self._tail_s(num_lines / busy_s * num_servers) if is_observed else 0.0,
            is_observed=is_observed,
            tokens_per_byte=prompt_tokens / num_bytes if is_known else TOKENS_PER_BYTE,
            output_tokens=output_tokens / num_lines if is_known else ASSUMED_OUTPUT_TOKENS,
        )

    def _tail_s(self, lines_per_s: float) -> float:
        """Return how much longer than the mean the last lines take; one takes as long as as many
        are done in as are in flight."""
        leased = self._db.value("SELECT count(*) FROM lines WHERE state = 'leased'")
        return float(TAIL_LINES * leased / lines_per_s)

    def all(self, now_s: float) -> dict[int, Forecast]:
        """Return what is to be expected of each batch in progress; nothing if that is not known."""
        if (pace := self.pace(now_s)) is None:
            return {}
        works = self._works(pace)
        found = ends(works, pace, now_s)
        return {
            work.number: Forecast(
                ends_s=math.ceil(found[work.number]),
                is_in_time=found[work.number] <= work.expires_s,
                ratio=(found[work.number] - now_s) / max(1.0, work.expires_s - now_s),
                is_observed=pace.is_observed,
            )
            for work in works
        }

    def dues(self, now_s: float) -> dict[int, float]:
        """Return until when the lines in flight of each batch should be answered; see `dues`.

        What a line is like is not known at first: then they have all of their window.
        """
        if (pace := self.pace(now_s)) is None:
            rows = self._db.rows(
                "SELECT number, expires_s FROM batches WHERE status = 'in_progress'"
            )
            return dict(rows)
        leased = self._db.rows(
            "SELECT batch, count(*) FROM lines WHERE state = 'leased' GROUP BY batch"
        )
        return dues(self._works(pace), pace, now_s, num_leased=dict(leased))

    def next_due(self, num_most: int, now_s: float) -> list[Due]:
        """Return the batches in progress whose windows end first, of all keys."""
        rows = self._db.rows(
            "SELECT number, id, endpoint, num_lines, num_done, num_failed, expires_s FROM batches"
            " WHERE status = 'in_progress' AND response IS NULL ORDER BY expires_s, number LIMIT ?",
            num_most,
        )
        found = self.all(now_s) if rows else {}
        return [Due._make([*values, found.get(number)]) for number, *values in rows]

    def _works(self, pace: Pace) -> list[Work]:
        rows: list[Any] = self._db.rows(
            f"SELECT key_name, is_promised, {_LEFT} FROM batches WHERE status = 'in_progress'"
        )
        return [
            work_of(Left(*row), pace)._replace(key_name=key_name, is_promised=bool(is_promised))
            for key_name, is_promised, *row in rows
        ]

    def check(self, new: NewBatch, lines: LineSums, now_s: float) -> None:
        """Check that a batch can be done in its window, and all others in theirs.

        Raises:
            InvalidRequest: it cannot (409).
        """
        if (pace := self.pace(now_s)) is None:
            return
        left = Left(
            number=0,
            expires_s=now_s + new.window_s,
            num_lines=lines.num_lines,
            num_done=0,
            num_bytes=lines.num_bytes,
            done_bytes=0,
            prompt_tokens=0,
            output_tokens=0,
            limit_tokens=lines.limit_tokens,
        )
        tail_s = math.ceil(pace.tail_s)
        others = [w._replace(expires_s=w.expires_s - tail_s) for w in self._works(pace)]
        least_s = tail_s + earliest_window(
            *(work_of(left, pace).seconds, others, pace.low_share, int(now_s)),
            least_s=max(0, new.window_s - tail_s),
        )
        if least_s <= new.window_s:
            return
        wish = f"at least {least_s}s" if least_s <= MAX_WINDOW_S else "longer than any may be"
        raise InvalidRequest(
            f"completion_window must be {wish} for these lines beside the batches that are there,"
            f" got {new.window}; with x_accept_late: true they are taken all the same",
            param="completion_window",
            code="window_too_short",
            status=409,
        )


def _shares_of_spans(minutes: Sequence[tuple[float, float]]) -> Iterator[float]:
    """Yield the share over every few minutes in a row, of time and work in each."""
    for first in range(len(minutes) - LOW_MINUTES + 1):
        busy_s, work_s = map(sum, zip(*minutes[first : first + LOW_MINUTES], strict=True))
        if busy_s >= LEAST_BUSY_S:
            yield work_s / busy_s
