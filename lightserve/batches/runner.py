"""Works off batches: leases lines, has them answered, writes what became of them.

One task leases and writes; each line in flight is a task of its own. While the engine is not ready
nothing is leased, and what it lost is queued again: that counts against no line, but that one with
which workers die again and again is taken for the reason in the end. A line that fails by itself is
tried MAX_ATTEMPTS times, one that is refused by anything but the router's queue MAX_REFUSALS times,
while others go on; how often this process may die with one, `jobs` knows. When the store
fails, what is in flight is given up, and the work begins anew, in a new epoch, as soon as the store
can be written. So it is when the lease is over, whatever the store is waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec

from lightserve.batches.access import StoreThread
from lightserve.batches.contents import Lines, Store
from lightserve.batches.forecast import Costs, Tokens
from lightserve.batches.lines import result_line
from lightserve.batches.records import MAX_WINDOW_S, Forecast, LeasedLine, LeaseLost, Outcome
from lightserve.errors import StoreError

log = logging.getLogger(__name__)

OWNER = "server"
"""The owner of leases in a store of one server: the leases of an earlier server are free. Servers
that share a store have names of their own."""
LEASE_S = 30.0
"""A server that renews its lease later than this loses its lines to others. It may be stopped or
cut off: it gives them up by its own clock."""
RENEW_S = 5.0
PURGE_S = 60.0
COUNT_S = 2.0
POLL_S = 0.25
"""Seconds between two looks for new and cancelled batches."""
GATHER_S = 0.05
"""Seconds within which results are written in one transaction."""
LEAST_MOVE_S, MOVE_SHARE = 0.5, 0.02
"""When lines are due is said again where it is off by more than this, or than this share of the
time until then."""
MAX_SLICES = 16
"""Slices of rows that are deleted or given an error before other work goes on."""
MAX_LEASED_BYTES = 64 * 1024 * 1024
MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""Bytes of answers, whole or in part, that are not written yet; see `Room`."""
MAX_ATTEMPTS = 2
MAX_REFUSALS = 10
"""Times that a line gets a 429 for its own content; the last one is its result."""
LEAST_REFUSAL_S, MAX_REFUSAL_S = 1.0, 64.0
"""Seconds that the line waits after the first one, twice as long after each further one, and at
most."""
MAX_LOSSES = 6
"""Times that workers die with a line, before it is taken for the reason."""
STORE_RETRY_S = 1.0
OBJECT_RETRY_S = 5.0
INPUT_LOST = (
    b'{"error":{"message":"the content of the input file is lost","type":"server_error",'
    b'"param":null,"code":"input_lost"}}'
)
"""The answer to a line that is not where its file should be."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to a line."""

    status: int
    """Status of HTTP."""
    body: bytes
    request_id: str
    retry_after_s: float = 0.0
    """Seconds to wait, with 429 and 503."""
    is_lost: bool = False
    """Whether workers died with the line (503)."""
    is_own_refusal: bool = False
    """Whether the line was refused for its own content, not because the router is full (429)."""


class Room:
    """Bounds the bytes of answers that are held, from their first part until they are written.

    A part that goes beyond waits where it comes from: until others are written, or, where all that
    are held have yet to come to their ends, until it is of the one that began first.
    """

    def __init__(self, max_bytes: int = MAX_ANSWER_BYTES) -> None:
        self.num_bytes = self.most_bytes = 0
        """Held now, and at any time."""
        self._max_bytes = max_bytes
        self._held: Counter[tuple[int, int]] = Counter()
        """Bytes by batch and number of a line."""
        self._coming: dict[tuple[int, int], None] = {}
        """Lines whose answers have begun and not ended, in order."""
        self._ended: set[tuple[int, int]] = set()
        self._news = asyncio.Event()

    async def take(self, place: tuple[int, int], num_bytes: int) -> None:
        """Wait until so many more bytes of an answer may be held."""
        self._coming.setdefault(place)
        while self.num_bytes + num_bytes > self._max_bytes and (
            self._ended or next(iter(self._coming)) != place
        ):
            self._news.clear()
            await self._news.wait()
        self._held[place] += num_bytes
        self.num_bytes += num_bytes
        self.most_bytes = max(self.most_bytes, self.num_bytes)

    def end(self, place: tuple[int, int]) -> None:
        """Note that an answer is there as a whole: it is going to be written."""
        self._coming.pop(place, None)
        if place in self._held:
            self._ended.add(place)
        self._news.set()

    def release(self, place: tuple[int, int]) -> None:
        """Note that an answer is held no more."""
        self.num_bytes -= self._held.pop(place, 0)
        self._ended.discard(place)
        self.end(place)


@dataclass
class Counts:
    """Figures that the runner keeps."""

    lines: dict[str, int]
    batches: dict[str, int]
    num_late: int = 0
    """Results of lines that were no longer leased."""
    late_batches: frozenset[int] = frozenset()
    """Numbers of batches in progress that will not be done in their windows."""
    oldest_age_s: float = 0.0
    """Age of the oldest batch in progress; 0: there is none."""
    forecast_ratio: float = 0.0
    """The largest `Forecast.ratio`; 0: there is none."""
    num_leases_lost: int = 0
    """Lines in flight that another owner has taken over."""


class Engine(Protocol):
    """The engine that answers lines; see `process`."""

    @property
    def is_ready(self) -> bool:
        """Whether lines can be answered now."""

    @property
    def is_ending(self) -> bool:
        """Whether the server is shutting down."""

    @property
    def costs(self) -> Costs:
        """Seconds of the engine for a token."""

    async def answer(self, line: LeasedLine, *, due_in_s: float) -> Answer:
        """Return the answer to a line, which should be there in so many seconds."""

    def move_batch(self, batch: int, due_in_s: float) -> bool:
        """Have all lines of a batch in flight be due then; False: it cannot be said now."""


class Runner:
    """See the module; `should_exit` ends `serve`."""

    def __init__(
        self,
        store: StoreThread,
        engine: Engine,
        *,
        max_in_flight: int,
        quota: int = 2**62,
        room: Room | None = None,
        owner: str = OWNER,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`quota`: bytes that a key may have stored in all; `room`: of the engine's answers."""
        self.listening = asyncio.Event()
        """Set once it works."""
        self.should_exit = False
        self.counts = Counts({}, {})
        self._store = store
        self._engine = engine
        self._max_in_flight = max_in_flight
        self._quota = quota
        self._room = room or Room()
        self._owner = owner
        self._clock = clock
        self._epoch = 0
        self._tasks: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._num_bytes = 0
        """Bytes of the lines in flight."""
        self._outcomes: list[Outcome] = []
        self._wake = asyncio.Event()
        self._pause_until_s = 0.0
        """By `_passing_s`: the engine has asked for so long a pause."""
        self._done: list[tuple[int, Tokens]] = []
        """Bytes and tokens of lines that were answered since it was last counted."""
        self._full_since_s: float | None = None
        """By `_passing_s`: since then lines wait, and what was answered is counted."""
        self._has_noted_costs = False
        self._dues: dict[int, float] = {}
        """When lines of each batch are due, as the engine knows it, by the clock."""
        self._due_s: dict[Callable[[], Awaitable[None]], float] = {}
        self._lease_end: asyncio.TimerHandle | None = None
        self._is_lease_over = False
        self._tidying: asyncio.Task[None] | None = None

    def wake(self) -> None:
        """Have it look for work at once."""
        self._due_s.pop(self._look, None)
        self._wake.set()

    async def stop_listening(self) -> None:
        """Return at once: it has no clients."""

    async def serve(self) -> None:
        """Work until told to end."""
        self.listening.set()
        try:
            await self._serve()
        finally:
            self._await_lease_end(None)
            if self._tidying is not None:
                self._tidying.cancel()
                await asyncio.gather(self._tidying, return_exceptions=True)

    async def _serve(self) -> None:
        while not self.should_exit:
            try:
                await self._work()
            except StoreError as error:
                log.error("batches wait: %s", error)
                if isinstance(error, LeaseLost) and not self._is_lease_over:
                    self.counts.num_leases_lost += len(self._tasks)
                await self._give_up()
                if not self._is_lease_over:
                    await self._sleep(STORE_RETRY_S)
        await self._give_up()
        with contextlib.suppress(StoreError):  # the next process is not to think that this one died
            await self._store.run(lambda store: store.jobs.begin(self._owner, self._clock()))

    async def _work(self) -> None:
        now_s, has_crashed = self._clock(), self._epoch == 0
        self._await_lease_end(None)
        self._is_lease_over = False
        self._epoch = await self._store.run(
            lambda store: store.jobs.begin(self._owner, now_s, has_crashed=has_crashed)
        )
        try:
            while not self.should_exit:
                if self._is_lease_over:
                    raise LeaseLost("the lease is over: the store could not be reached in time")
                await self._every(RENEW_S, self._renew)
                await self._every(PURGE_S, self._purge)
                await self._every(POLL_S, self._look)
                await self._lease()
                await self._every(COUNT_S, self._count)
                await self._sleep(POLL_S)
                if self._outcomes:
                    await asyncio.sleep(GATHER_S)
                    await self._write()
                if self._engine.is_ending:  # no client waits: what is in flight runs again
                    await self._give_up()
        finally:
            with contextlib.suppress(StoreError):
                await self._write()

    async def _every(self, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        """Do some work if it was done so long ago."""
        now_s = _passing_s()
        if now_s >= self._due_s.get(work, 0.0):
            self._due_s[work] = now_s + seconds
            await work()

    async def _sleep(self, seconds: float) -> None:
        """Sleep until something has come, or so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        self._wake.clear()

    # ------------------------------------------------------------------ the store

    async def _renew(self) -> None:
        now_s, epoch, since_s = self._clock(), self._epoch, _passing_s()
        await self._store.run(lambda s: s.jobs.renew(self._owner, epoch, now_s, lease_s=LEASE_S))
        self._await_lease_end(since_s + LEASE_S)

    def _await_lease_end(self, end_s: float | None) -> None:
        """Give up what is in flight at this time (`_passing_s`), unless it is put off before.

        A lease that is over stays so: until the work begins anew.
        """
        if self._lease_end is not None:
            self._lease_end.cancel()
            self._lease_end = None
        if end_s is not None and not self._is_lease_over:
            in_s = end_s - _passing_s()
            self._lease_end = asyncio.get_running_loop().call_later(in_s, self._end_lease)

    def _end_lease(self) -> None:
        self._is_lease_over = True
        self.counts.num_leases_lost += len(self._tasks)
        for task in self._tasks.values():
            task.cancel()
        self._wake.set()

    async def _purge(self) -> None:
        now_s = self._clock()
        while await self._store.run(
            lambda store: store.responses.purge(now_s) + store.jobs.purge(now_s)
        ):
            pass
        if self._tidying is None or self._tidying.done():
            self._tidying = asyncio.create_task(self._tidy(now_s))

    async def _tidy(self, now_s: float) -> None:
        """Delete files that are over, and make objects of results; other work does not wait."""
        try:
            while await self._store.contents.purge(now_s):
                pass
            while await self._store.contents.move():
                pass
        except StoreError as error:
            log.error("files wait: %s", error)

    async def _look(self) -> None:
        """End batches whose window is over or whose key has no room, and delete what is left over;
        give up lines that have ended, or are others' now."""
        now_s, epoch, quota = self._clock(), self._epoch, self._quota

        def end_some(store: Store) -> int:
            return store.jobs.expire(now_s, quota=quota) + store.files.sweep()

        for _ in range(MAX_SLICES):
            if not await self._store.run(end_some):
                break
        held = await self._store.run(lambda store: store.jobs.held(self._owner, epoch))
        for (batch, number), task in list(self._tasks.items()):
            if (batch, number) not in held.lines:
                task.cancel()
                self.counts.num_leases_lost += batch in held.batches

    async def _count(self) -> None:
        now_s, costs = self._clock(), self._engine.costs
        (lines, batches), oldest_s = await self._store.run(
            lambda store: (store.jobs.counts(), store.jobs.oldest_s())
        )
        self.counts.lines, self.counts.batches = lines, batches
        self.counts.oldest_age_s = 0.0 if oldest_s is None else max(0.0, now_s - oldest_s)
        is_full = lines["queued"] > 0 and self._engine.is_ready
        busy_s, done = self._take_done(is_full=is_full)
        is_news = busy_s > 0 or (min(costs) > 0.0 and not self._has_noted_costs)

        def note(store: Store) -> tuple[dict[int, Forecast], dict[int, float]]:
            if is_news:
                store.forecasts.note(now_s, busy_s, done, costs)
            return store.forecasts.all(now_s), store.forecasts.dues(now_s)

        forecasts, dues = await self._store.run(note)
        self._has_noted_costs |= is_news
        self._move(dues)
        late = frozenset(n for n, forecast in forecasts.items() if not forecast.is_in_time)
        for number in sorted(late - self.counts.late_batches):
            log.warning("batch number %d will not be done in its window", number)
        self.counts.late_batches = late
        self.counts.forecast_ratio = max((f.ratio for f in forecasts.values()), default=0.0)

    def _take_done(self, *, is_full: bool) -> tuple[float, list[tuple[int, Tokens]]]:
        """Return for how long lines have waited since this was asked last, and what was done.

        It counts from the first answer on: before, nothing can have been done.
        """
        done, self._done = self._done, []
        now_s, since_s = _passing_s(), self._full_since_s
        if not is_full:
            self._full_since_s = None
        elif since_s is not None or done:
            self._full_since_s = now_s
        if not is_full or since_s is None:
            return 0.0, []
        return now_s - since_s, done

    async def _lease(self) -> None:
        """Take as many lines as there is room for; in portions, as each is a transaction."""
        room = self._max_in_flight - len(self._tasks)
        is_paused = _passing_s() < self._pause_until_s or not self._engine.is_ready
        if is_paused or room < max(1, self._max_in_flight // 8):
            return
        now_s, epoch, since_s = self._clock(), self._epoch, _passing_s()
        num_bytes = MAX_LEASED_BYTES - self._num_bytes

        def lease(store: Store) -> tuple[list[LeasedLine], dict[int, float]]:
            lines = store.jobs.lease(
                *(self._owner, epoch, now_s), lease_s=LEASE_S, max_lines=room, max_bytes=num_bytes
            )
            return lines, store.forecasts.dues(now_s) if lines else {}

        lines, dues = await self._store.run(lease)
        self._await_lease_end(since_s + LEASE_S)
        if self._is_lease_over:
            return
        in_objects = [line for line in lines if line.object_id]
        texts = asyncio.ensure_future(self._store.contents.texts(in_objects))
        texts.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._move(dues)
        for line in lines:
            self._num_bytes += line.num_bytes
            place = line.batch, line.number
            if (before := self._tasks.get(place)) is not None:  # it was another's meanwhile
                before.cancel()
            self._tasks[place] = task = asyncio.create_task(self._run(line, texts))
            task.add_done_callback(partial(self._forget, place, line))

    def _move(self, dues: Mapping[int, float]) -> None:
        """Tell the engine of batches whose lines are due at another time than it knows."""
        now_s, in_flight = self._clock(), {batch for batch, _ in self._tasks}
        self._dues = {batch: due_s for batch, due_s in self._dues.items() if batch in in_flight}
        for batch, found_s in dues.items():
            due_s = min(found_s, now_s + MAX_WINDOW_S)
            if batch not in in_flight:
                self._dues[batch] = due_s
            told_s = self._dues[batch]
            least_s = max(LEAST_MOVE_S, MOVE_SHARE * abs(told_s - now_s))
            is_news = abs(due_s - told_s) > least_s
            if is_news and self._engine.move_batch(batch, due_s - now_s):
                self._dues[batch] = due_s

    async def _write(self) -> None:
        outcomes, self._outcomes = self._outcomes, []
        if not outcomes:
            return
        now_s, epoch = self._clock(), self._epoch
        try:
            num_late = await self._store.run(
                lambda store: store.jobs.settle(self._owner, epoch, outcomes, now_s)
            )
        finally:
            for outcome in outcomes:
                self._room.release((outcome.batch, outcome.number))
        self.counts.num_late += num_late

    async def _give_up(self) -> None:
        """End what is in flight; its lines are queued again when the work begins anew."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in self._outcomes:
            self._room.release((outcome.batch, outcome.number))
        self._outcomes.clear()

    # ------------------------------------------------------------------ lines

    def _forget(self, place: tuple[int, int], line: LeasedLine, task: asyncio.Task[None]) -> None:
        if self._tasks.get(place) is task:
            del self._tasks[place]
        if task.cancelled():
            self._room.release(place)
        self._num_bytes -= line.num_bytes
        self._wake.set()

    async def _answer(self, line: LeasedLine, texts: asyncio.Future[Lines]) -> Answer:
        """Return the answer to a line, which is perhaps still to be read."""
        if line.object_id:
            try:
                found = await asyncio.shield(texts)
            except StoreError as error:
                log.error("lines wait for their file: %s", error)
                return Answer(
                    status=503, body=b"", request_id=line.id, retry_after_s=OBJECT_RETRY_S
                )
            text = found.get((line.batch, line.number))
            if text is None:
                return Answer(status=500, body=INPUT_LOST, request_id=line.id)
            line = msgspec.structs.replace(line, line=text)
        due_s = self._dues.setdefault(line.batch, line.expires_s)
        return await self._engine.answer(line, due_in_s=due_s - self._clock())

    async def _run(self, line: LeasedLine, texts: asyncio.Future[Lines]) -> None:
        """Have a line answered, and note what became of it."""
        answer = await self._answer(line, texts)
        self._room.end((line.batch, line.number))
        is_worn_out = line.losses + answer.is_lost >= MAX_LOSSES
        outcome = functools.partial(Outcome, batch=line.batch, number=line.number, result=None)
        if answer.is_own_refusal:
            if line.attempt + 1 < MAX_REFUSALS:
                wait_s = max(answer.retry_after_s, LEAST_REFUSAL_S) * 2**line.attempt
                self._outcomes.append(outcome(has_failed=True, wait_s=min(wait_s, MAX_REFUSAL_S)))
                return
        elif answer.status in (429, 503) and not is_worn_out:
            self._pause_until_s = _passing_s() + max(0.1, answer.retry_after_s)
            self._outcomes.append(outcome(is_lost=answer.is_lost))
            return
        if answer.status >= 500 and not is_worn_out and line.attempt + 1 < MAX_ATTEMPTS:
            self._outcomes.append(outcome(has_failed=True))
            return
        result = result_line(
            line, status=answer.status, request_id=answer.request_id, body=answer.body
        )
        tokens = tokens_of(answer.body) if answer.status == 200 else Tokens()
        self._done.append((line.num_bytes, tokens))
        self._outcomes.append(
            outcome(
                result=result,
                is_error=answer.status != 200,
                num_bytes=line.num_bytes,
                prompt_tokens=tokens.prompt,
                output_tokens=tokens.output,
            )
        )


def _passing_s() -> float:
    """Return the time of the event loop: unlike the clock it is never put back."""
    return asyncio.get_running_loop().time()


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


class _Answered(msgspec.Struct, frozen=True):
    usage: _Usage


_ANSWERED = msgspec.json.Decoder(_Answered)


def tokens_of(body: bytes) -> Tokens:
    """Return what an answer says that it has cost."""
    usage = _ANSWERED.decode(body).usage
    return Tokens(
        usage.prompt_tokens + usage.input_tokens, usage.completion_tokens + usage.output_tokens
    )
