"""Time and tokens of a step that is being filled: what is in it, how long that takes, what fits."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lightserve.router.arrivals import NO_OUTLOOK, Outlook, TimeShare
from lightserve.router.encoding import NO_ENCODING, Encoding, StepEncodes
from lightserve.router.policies.pace import NO_PACE
from lightserve.router.queue import MIN_CHUNK, Turn
from lightserve.router.request import FoundOf, Request
from lightserve.router.request_table import NO_ROWS, DueTimes, RequestTable, Rows
from lightserve.router.seats import Seats
from lightserve.router.step import Loading, Scheduled
from lightserve.router.step_cost import StepCost, StepShape
from lightserve.types import BE, RT

NO_LIMIT = 1 << 30
LOOK_AHEAD = 8
"""Requests that are looked at in one step where another than the first may be the better choice:
best-effort ones that are compared, or passed over as a smaller one behind them may fit now; urgent
ones that wait."""


class Starts(NamedTuple):
    """Most requests that may begin or resume in a step."""

    rt: int = 0
    """Requests that may when one is real-time: free rows, and rows of others that yield."""
    be: int = 0
    """Requests that may when one is best-effort: free rows, and rows that keys are owed."""
    most_be: int = NO_LIMIT
    """Best-effort requests that may, by `--max-be-seqs`."""


class Pool(NamedTuple):
    """Slots of the KV pool."""

    num_slots: int = 0
    num_free: int = 0
    """Slots that hold nothing, cached KV counting as something."""
    num_cached: int = 0
    """Slots whose KV no request reads."""
    num_wanted: int = 0
    """Cached slots that a waiting request would read."""


class CopyTimes(NamedTuple):
    """Predictions of the time of loads, by their number of tokens."""

    waited_s: Callable[[int], float] = lambda _num_tokens: 0.0
    """Seconds of loads that the step waits for."""
    beside_s: Callable[[int], float] = lambda _num_tokens: 0.0
    """Seconds of loads that it does not wait for; 0: unknown."""
    overlap: bool = False
    """Whether the latter are made beside the step; otherwise they follow it."""


@dataclass(frozen=True)
class StepLimits:
    """The resources of a step, and predictions of its cost."""

    max_num_batched_tokens: int
    starts: Starts = field(default_factory=Starts)
    step_number: int = 0
    """Steps that were planned before this one."""
    pool: Pool = field(default_factory=Pool)
    num_steps_in_time: int = 0
    """Steps before this one since one that `Step.hits_limit`."""
    start_s: float = 0.0
    """When the step will start, as predicted, on the router's clock."""
    cost: StepCost = field(default_factory=StepCost)
    """Predicts what it takes."""
    copies: CopyTimes = field(default_factory=CopyTimes)
    best_effort_time: TimeShare = field(default_factory=TimeShare)
    """The share of time that best-effort requests got while they wanted more."""
    average_step_s: float = 0.0
    """Execution time of recent steps, on average."""
    outlook: Outlook = NO_OUTLOOK
    """Demand of real-time requests."""
    turn: Turn = field(default_factory=Turn)
    """Whose turn it is among best-effort requests that wait."""
    seats: Seats = field(default_factory=Seats)
    """Which requests that wait are owed a seat."""
    encoding: Encoding = NO_ENCODING
    """Progress of images that are encoded."""


NO_ENCODES = StepEncodes(NO_ENCODING)

# KV that comes back from the host in a step: what it waits for, and what is loaded beside it.
#
# A request that resumes brings its KV along in the step in which it runs again, if there is time
# for all of it. Otherwise it stays paused while its KV comes back bit by bit, beside the steps of
# others, and runs in the step after the last bit; it may lose what it has got at any time, at no
# cost, as all of it is still on the host. How much is loaded beside a step:
#
#     where copies overlap (GPU)    what the link can do while the step computes, at no cost to it
#     where they do not (CPU)       what there is time for in the step: they follow it, a sum
#
# Where copies overlap they make no step longer, unless nothing else is in it, or its own deadline
# is too near for bits: then it is waited for, as far as all deadlines are kept.


class StepLoads:
    """The loads of a step that is being filled."""

    def __init__(self, copies: CopyTimes) -> None:
        self._waited_seconds, self._beside_seconds, self._overlaps = copies
        self._num_waited = 0
        self._num_beside = 0
        self.encodes = NO_ENCODES
        """Images whose encoding makes the step longer."""

    def seconds(self, num_more: int = 0) -> float:
        """Return what the step takes longer for its loads, and for those of one more request."""
        seconds = self.encodes.seconds
        if num_waited := self._num_waited + num_more:  # as a rule there are none
            seconds += self._waited_seconds(num_waited)
        if self._num_beside and not self._overlaps:
            seconds += self._beside_seconds(self._num_beside)
        return seconds

    def wait_for(self, num_loaded: int) -> None:
        """Load all that a request lacks before the step: it runs in it."""
        self._num_waited += num_loaded

    def can_go_beside(self, num_loaded: int, step_s: float) -> bool:
        """Whether a request that has to load could do so beside the step instead of running in it.

        Another has to be in it, and there has to be an idea of what copies take. `step_s` is
        what it takes without its loads; 0: it is empty.
        """
        return step_s > 0.0 and self._beside_seconds(num_loaded) > 0.0

    def is_free_for(self, num_loaded: int, step_s: float, due_s: float) -> bool:
        """Whether loading a request beside steps costs nothing, to itself or to others.

        Its next token is due in `due_s`, perhaps inf; steps are taken to be as long as this one.
        """
        if not self._overlaps:
            return False
        load_s = self._beside_seconds(num_loaded)
        return (math.ceil(load_s / step_s) + 1) * step_s <= due_s

    def tokens_beside(self, num_loaded: int, step_s: float, limit_s: float) -> int:
        """Return how many of the tokens that a request lacks can be loaded beside the step.

        `step_s`: the step without its loads; `limit_s`: what it may take with them.
        """
        free_s = step_s
        if not self._overlaps:
            free_s = limit_s - step_s - self._waited_seconds(self._num_waited)
        counts = range(1, num_loaded + 1)
        return bisect.bisect_right(
            counts, free_s, key=lambda count: self._beside_seconds(self._num_beside + count)
        )

    def add_beside(self, num_tokens: int) -> None:
        """Load so many tokens beside the step."""
        self._num_beside += num_tokens


class StepBudget:
    """The contents of a step, its predicted time and its limits. Policies set the limits."""

    def __init__(
        self, table: RequestTable, limits: StepLimits, found: FoundOf, *, meets_deadlines: bool
    ) -> None:
        """Begin with an empty step; `found` tells what each request would go on from."""
        self._limits, self._found = limits, found
        self.due = DueTimes(table, limits.start_s)
        self.deadline_s = math.inf
        """From its start to the nearest deadline that it is to meet; inf: to none."""
        self.in_danger: list[Request] = []
        """Decodes in it that may be late, whatever joins it."""
        self.pace = NO_PACE
        """The pace of real-time decodes without a target."""
        self._num_left = limits.max_num_batched_tokens
        """Tokens that it has room for."""
        self.loads = StepLoads(limits.copies)
        self.chunks: set[Request] = set()
        """All that advance in it but its decodes."""
        self._table = table
        self._meets_deadlines = meets_deadlines
        self._cost = limits.cost
        self.shape = StepShape()
        """New tokens, contexts and requests in it."""
        self._timed = self.shape, 0.0
        """The shape of the last prediction, and the predicted time."""
        self._limit_s = math.inf
        """By deadlines: of the whole step, with both guards."""
        self._best_effort_limit_s = math.inf
        """By deadlines that are met at best, before anything is lent."""
        self._lent_until_s = math.inf
        """Latest predicted end, copies of resuming requests included."""
        self._base_s = 0.0
        """Predicted time of what was in it before anything was lent."""
        self._added: list[Rows | Scheduled | Loading] = []
        """Contents in order; arrays are rows of decodes."""

    # ---------------------------------------------------------------- what is in it

    @property
    def is_empty(self) -> bool:
        """Whether nothing advances in it, and no image is encoded."""
        return self.shape.num_new == 0 and not self.loads.encodes.orders

    @property
    def is_full(self) -> bool:
        """Whether the token budget is used up."""
        return self._num_left <= 0

    @property
    def parts(self) -> list[Scheduled | Loading]:
        """Contents one by one, for tests and for watchers of policies."""
        parts: list[Scheduled | Loading] = []
        for part in self._added:
            if isinstance(part, np.ndarray):
                parts += [Scheduled(request, 1) for request in self._table.of(part)]
            else:
                parts.append(part)
        return parts

    def decodes_in_time(self, rows: Rows) -> Rows:
        """Return as many decodes as budget and time allow, from the first on.

        Where tokens are short, the most urgent ones.
        """
        if len(rows) > self._num_left and self._meets_deadlines:
            rows = self.due.in_order(rows)
        rows = rows[: max(0, self._num_left)]
        positions, count = self._table.next_position[rows], len(rows)
        if not count or self._has_time_for(count, int(positions.sum())):
            return rows
        contexts = np.cumsum(positions).tolist()
        # Time only grows with each: as many as one by one would find it.
        count = bisect.bisect_left(
            range(1, count),
            True,
            key=lambda number: not self._has_time_for(number, contexts[number - 1]),
        )
        return rows[: max(count, int(self.is_empty))]  # an empty step takes one

    def add_decodes(self, rows: Rows) -> None:
        """Add rows that compute one token."""
        if len(rows):
            self._added.append(rows)
            context = int(self._table.next_position[rows].sum())
            self.shape = self.shape.plus_decodes(len(rows), context)
            self._num_left -= len(rows)

    def remove_decodes(self, rows: Rows) -> None:
        """Take decodes out; they may be added again."""
        self.shape = self._without(rows)
        for place, part in enumerate(self._added):
            if isinstance(part, np.ndarray):
                self._added[place] = part[~np.isin(part, rows)]
        self._num_left += len(rows)

    def add(self, part: Scheduled | Loading) -> None:
        """Add what a prompt computes, or loads beside the step."""
        request, num_tokens = part
        self._added.append(part)
        if isinstance(part, Loading):
            self.loads.add_beside(num_tokens)
            return
        start, num_left, num_loaded, *_ = self._found(request)
        if request.parameters.images:
            self.loads.encodes.add_chunk(request, start, num_tokens)
        shape = self.shape.plus(start, num_tokens)
        if num_tokens == num_left and request.request_class is RT:
            # It yields a token in this step, whose deadline counts if it can be met.
            residual_s = self.due.of(request)
            if residual_s >= self._seconds(shape):
                self._limit_s = min(self._limit_s, residual_s)
                self.deadline_s = min(self.deadline_s, residual_s)
            elif residual_s >= self._cost.seconds(shape) + self.loads.encodes.seconds:
                self._best_effort_limit_s = min(self._best_effort_limit_s, residual_s)
        self.chunks.add(request)
        self.loads.wait_for(num_loaded)
        self.shape = shape
        self._num_left -= num_tokens

    # ---------------------------------------------------------------- deadlines

    def can_be_in_time(self, request: Request, without: Rows = NO_ROWS) -> bool:
        """Whether a prompt, computed from here on without a pause, meets its deadline.

        Or one of `in_danger`. A prompt of several steps is in each of them `without` some decodes
        that are in this one.
        """
        if len(without) and request in self.in_danger:
            return self._seconds(self._without(without)) <= self.due.of(request)
        return self._seconds_to_end(request, without) <= self.due.of(request)

    def _seconds_to_end(self, request: Request, without: Rows = NO_ROWS) -> float:
        """Return how long a prompt takes from here on without a pause, with the guard.

        In this step if there is room for all of it; otherwise in as many like it as it needs, each
        with what is left beside the decodes: each computes these as well, but those `without`.
        """
        start, rest = self._found(request)[:2]
        encode_s = self._limits.encoding.seconds_left(request, start) * self._cost.guard
        return encode_s + self._seconds_of_tokens(request, start, rest, without)

    def _seconds_of_tokens(self, request: Request, start: int, rest: int, without: Rows) -> float:
        shape = self._without(without)
        fits = rest <= self._num_left + len(without)
        if fits and (whole_s := self._seconds_with_all_of(request, shape)) <= self._limit_s:
            return whole_s
        decodes = shape.decodes
        chunk = self._tokens_beside(decodes, request)
        if chunk >= rest:
            return self._seconds_with_all_of(request, decodes)
        num_whole, last = divmod(rest, chunk)
        ends = (start, start + (num_whole - 1) * chunk)
        each_s = sum(self._seconds(decodes.plus(place, chunk)) for place in ends) / 2
        last_s = self._seconds(decodes.plus(start + rest - last, last)) if last else 0.0
        return num_whole * each_s + last_s

    def seconds_to_end_beside_others(self, request: Request) -> float:
        """Return the share of the time of full steps that a prompt takes, with the guard."""
        (start, rest), decodes = self._found(request)[:2], self.shape.decodes
        chunk = self._tokens_beside(decodes, request)
        encode_s = self._limits.encoding.seconds_left(request, start) * self._cost.guard
        return encode_s + rest / chunk * self._seconds(decodes.plus(start, chunk))

    def _tokens_beside(self, decodes: StepShape, request: Request) -> int:
        """Return how much of a prompt goes beside decodes in a step, at least MIN_CHUNK."""
        most = self._limits.max_num_batched_tokens - decodes.num_new
        if math.isfinite(self._limit_s) and self._cost.is_known:
            limit_s = self._limit_s / self._cost.guard
            most = self._cost.tokens_within(decodes, limit_s, self._found(request).start, most)
        return max(MIN_CHUNK, most)

    def is_urgent(self, request: Request, step_s: float | None = None) -> bool:
        """Whether a prompt can be in time, and no more after a step of `step_s`; None: as this."""
        if step_s is None:
            step_s = min(self._limit_s, self._limits.outlook.idle_limit_s)
        return 0.0 <= self.due.of(request) - self._seconds_to_end(request) <= step_s

    def _seconds_with_all_of(self, request: Request, shape: StepShape) -> float:
        return self._seconds(shape.plus(*self._found(request)[:2]))

    # ---------------------------------------------------------------- limits

    def limit_by_deadlines(self, at_most_s: float = math.inf) -> None:
        """Limit the step by the deadlines of the decodes in it, and to `at_most_s`.

        Prompts of real-time requests keep to those that will surely be met: for others they need
        not wait. Best-effort ones do: doubts about the prediction must not make a step longer,
        and a token that will be late in any case is due as if all before it had been in time,
        lest its request falls behind further. If that cannot be either, it sets no limit.
        """
        least_s, base_s = self.seconds, self._seconds(self.shape)
        rows = self.decode_rows
        residual_s = self.due.of_rows(rows, self.due.residuals.due)
        is_sure = residual_s >= base_s
        surely_s = float(residual_s[is_sure].min(initial=math.inf))
        self.in_danger = self._table.of(rows[~is_sure])
        lent_s = self.due.of_rows(rows, self.due.residuals.lent)
        late_s = self.due.of_rows(rows, self.due.residuals.of_late)
        lent_s = np.where(lent_s < least_s, late_s, lent_s)
        self.deadline_s, self._limit_s = surely_s, min(surely_s, at_most_s)
        self._best_effort_limit_s = float(lent_s[lent_s >= least_s].min(initial=math.inf))

    def limit_by_returning(self, rows: Rows) -> None:
        """Limit the step by its contents and by decodes that gave way and come back.

        In place of the limit that they gave way for.
        """
        context = int(self._table.next_position[rows].sum())
        base_s = self._seconds(self.shape.decodes.plus_decodes(len(rows), context))
        due = self.due.of_rows(rows, self.due.residuals.due)
        self._limit_s = min(self.deadline_s, float(due[due >= base_s].min(initial=math.inf)))

    @property
    def decode_rows(self) -> Rows:
        """Return the rows of all decodes in it."""
        rows = [part for part in self._added if isinstance(part, np.ndarray)]
        return rows[0] if len(rows) == 1 else np.concatenate([NO_ROWS, *rows])

    def lend(self, until_s: float, *, doubtless_s: float = 0.0) -> None:
        """Let best-effort requests have what is left up to then, in doubt to `doubtless_s`."""
        self._limit_s = min(self._limit_s, self._best_effort_limit_s)
        self._base_s = max(self.seconds, min(doubtless_s, self._limit_s))
        self._lent_until_s = until_s

    @contextmanager
    def in_any_case(self, seconds: float) -> Iterator[None]:
        """Within it the step may be filled for so much longer, whatever its limits."""
        limits = self._limit_s, self._lent_until_s
        self._limit_s = math.inf
        self._lent_until_s = self.seconds + min(seconds, self._limits.outlook.idle_limit_s)
        yield
        self._limit_s, self._lent_until_s = limits

    @property
    def seconds(self) -> float:
        """Predicted time of the step without copies."""
        if self._timed[0] is not self.shape:
            self._timed = self.shape, self._cost.seconds(self.shape)
        return self._timed[1]

    def limit_for(self, prompt: Request | None = None) -> float:
        """Return how long the step may take as predicted, copies included, if a prompt joins.

        Whatever the doubts, tokens that make it no longer may be in it: below the knee of the cost
        model they are free. None: the pace of prompts does not count.
        """
        limit_s = min(max(self._limit_s / self._cost.guard, self._base_s), self._lent_until_s)
        if prompt is None or self.pace is NO_PACE:
            return limit_s
        return self.pace.limit(limit_s, prompt, self.due.of(prompt))

    # ---------------------------------------------------------------- decodes

    def _has_time_for(self, num_decodes: int, context: int) -> bool:
        """Whether the step keeps its limits with so many more decodes, contexts summed."""
        shape = self.shape.plus_decodes(num_decodes, context)
        return self._cost.seconds(shape) + self.loads.seconds() <= self.limit_for()

    def decodes_due_after(self, residual_s: float, *, lent: bool = False) -> Rows:
        """Return decodes in it whose residual is longer, or `lent`, what of it is lent."""
        rows = self.decode_rows
        due_s = self.due.of_rows(rows, self.due.residuals.lent if lent else self.due.residuals.due)
        has_output = self._table.num_output[rows] + self._table.inflight_samples[rows] > 0
        can_wait = (due_s > residual_s) & has_output
        if lent and self.pace.best_effort_s < math.inf:
            can_wait &= due_s < math.inf
        late: Rows = rows[can_wait]
        return late

    def _without(self, rows: Rows) -> StepShape:
        if not len(rows):
            return self.shape
        context = int(self._table.next_position[rows].sum())
        return self.shape.plus_decodes(-len(rows), -context)

    def decodes_worth_less(self, spare_s: float) -> Rows:
        """Return decodes in whose place a best-effort prompt has more tokens up to the deadline.

        They are due so long after the step; none: no deadline limits it.
        """
        limit_s = self._limit_s / self._cost.guard
        if not self._cost.is_known or limit_s >= self._lent_until_s:
            return NO_ROWS
        ample = self.decodes_due_after(self._limit_s + spare_s, lent=True)
        if not len(ample):
            return ample
        before, after = (
            self._cost.tokens_within(shape, limit_s, 0, self._num_left)
            for shape in (self.shape, self._without(ample))
        )
        return ample if after - before > len(ample) else NO_ROWS

    def num_tokens_in_time(self, request: Request, most: int, *, leaves_room: bool = False) -> int:
        """Return how many of a prompt's next tokens, `most` at most, fit time and budget.

        `leaves_room`: one that has time leaves some of it to arrivals, which wait for the rest of
        the step. But it has tokens to which the constant is little.
        """
        start, idle_s = self._found(request).start, math.inf
        if leaves_room:
            idle_s = idle_limit_s(self.shape, self._limits, request, start, most)
        if idle_s < math.inf:
            count = self._cost.tokens_within(self.shape, idle_s, start, most)
            if count < most and not self.is_urgent(request, idle_s * self._cost.guard):
                most = count
        most = min(most, self._num_left)
        load_s = self.loads.seconds(self._found(request).num_loaded)
        limit_s = self.limit_for(request) - load_s
        if most <= 0 or not math.isfinite(limit_s) or not self._cost.is_known:
            return most
        least, encode_s = min(most, MIN_CHUNK), 0.0
        if request.parameters.images:
            encode_s = self.loads.encodes.seconds_with(request, start, most)
            limit_s -= encode_s
        is_first = request.request_class is RT and not self.chunks
        if is_first and self.pace.sets(self.limit_for(request)):  # it gets on
            least_s = self._cost.seconds(self.shape.plus(start, least))
            most_s = self.limit_for() - load_s - encode_s
            limit_s = min(max(limit_s, least_s), most_s)
        in_time = self._cost.tokens_within(self.shape, limit_s, start, most)
        return max(in_time, least) if self.is_empty else in_time

    def seconds_added(self, request: Request, num_tokens: int) -> float:
        """Return what so many tokens of a prompt add to this step, or to earlier ones for them.

        Loads of their KV and the encoding of their images are in it.
        """
        start = self._found(request).start
        added_s = self._cost.seconds(self.shape.plus(start, num_tokens)) - self.seconds
        added_s += self._limits.encoding.seconds_left(request, start, num_tokens)
        return added_s + self._seconds_loading(request)

    def _seconds_loading(self, request: Request) -> float:
        """Return what the step takes longer for the loads of one more request."""
        num_loaded = self._found(request).num_loaded
        return self.loads.seconds(num_loaded) - self.loads.seconds() if num_loaded else 0.0

    def _seconds(self, shape: StepShape) -> float:
        return (self._cost.seconds(shape) + self.loads.seconds()) * self._cost.guard


def idle_limit_s(
    shape: StepShape, limits: StepLimits, request: Request, start: int, most: int
) -> float:
    """Return how long a step may take with a prompt that leaves time to arrivals; inf: any time.

    `shape`: what is in it. `most`: tokens that the prompt needs from `start` on.
    """
    if request.request_class is BE or limits.outlook.ttft_s == math.inf:
        return math.inf
    cost = limits.cost
    least_s = cost.seconds(shape.plus(start, min(most, MIN_CHUNK))) + cost.worthwhile_s
    return max(limits.outlook.idle_limit_s / cost.guard, least_s)
