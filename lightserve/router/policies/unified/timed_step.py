"""A step under a time limit: what is in it, how long that takes, and what else fits."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np

from lightserve.router.demand import Outlook
from lightserve.router.policies.base import StepLimits
from lightserve.router.policies.step_loads import StepLoads, num_loaded_by
from lightserve.router.request import WAITING, Request
from lightserve.router.request_table import NO_ROWS, Decodes, FloatArray, Rows, Running
from lightserve.router.shares import Allotment, Loading, Reason, Share
from lightserve.router.step_cost import StepShape
from lightserve.types import RT, RequestClass

# Time that is lent to best-effort requests in a step (architecture 7, step 6).
#
# Deadlines alone lend too much. Longer steps keep real-time requests, and their KV, for longer: at
# the same rate of arrival memory grows with the time of a step (Little's law), until newcomers wait
# for it; and near capacity there is no time left in which it would fall again. So steps are kept to
# the time at which real-time requests come to hold a share of the pool; the share is the smaller,
# the less time is free, and it is left by and by as they hold more than that.
#
# Below the knee of the cost model tokens cost next to nothing. A step is stretched by a share of
# itself in any case, as far as there is free time, so that these are not left unused.

IDLE_FLOORS = 2.0
"""Beyond the idle limit, so many times the shortest step: on slow machines that may be longer."""
MAX_SHARE = 0.85
"""Share of the pool that real-time requests may come to hold where most time is free."""
BUSY_SHARE, SHARE_PER_FREE = 0.1, 1.8
"""The share at full load, and its growth with the share of time that is free."""
OVER_SHARE, FADE = 0.1, 0.3
"""This much over its share nothing is lent, this much below that all of it."""
STRETCH_PER_FREE = 0.1
"""Share of a step by which it is stretched in any case, per share of time that is free."""


def lent_until_s(
    base_s: float, floor_s: float, held_share: float, outlook: Outlook, num_slots: int
) -> float:
    """Return how long a step may take, best-effort requests included, in seconds.

    Args:
        base_s: what its real-time requests take; 0: there are none.
        floor_s: what a step of one token takes.
        held_share: of the pool's slots, in real-time hands.
        outlook: what real-time requests ask for.
        num_slots: size of the pool.
    """
    free = min(1.0, max(0.0, 1.0 - outlook.load))
    share = min(MAX_SHARE, BUSY_SHARE + SHARE_PER_FREE * free)
    shortest_s = IDLE_FLOORS * floor_s
    limit_s = max(outlook.idle_limit_s, shortest_s)
    if outlook.kv_per_step_s > 0:
        limit_s = min(limit_s, share * num_slots / outlook.kv_per_step_s)
    limit_s *= min(1.0, max(0.0, (share + OVER_SHARE - held_share) / FADE))
    stretched_s = base_s * (1.0 + STRETCH_PER_FREE * free) if base_s > 0 else shortest_s
    return max(limit_s, stretched_s)


MIN_CHUNK = 16
"""Fewer tokens of a prompt are not worth a row, unless they end it."""


class TimedStep:
    """Shares chosen so far, their shape, and the time that is left for more.

    Whoever is offered to it and left out is noted, with the reason.
    """

    def __init__(self, limits: StepLimits, running: Running) -> None:
        """`limits` come with a cost model; `running` are the requests that have rows."""
        assert limits.cost is not None, "the planner gives it to policies that meet deadlines"
        self.chosen: list[Share] = []
        self.due_s: dict[Request, float] = {}
        """Seconds to when prompts are due that have no deadline for their first token."""
        self.num_started = 0
        """Newcomers among them, those that load to start later included."""
        self._skips = limits.skips
        self._max_tokens = self._budget = limits.max_num_batched_tokens
        self._start_s = limits.start_s
        self._cost = limits.cost
        self._loads = StepLoads(limits)
        self._shape = StepShape()
        self._guard = limits.guard
        self._idle_limit_s = limits.outlook.idle_limit_s
        self.deadline_s = math.inf
        """From its start to the nearest deadline that it is to meet; inf: to none."""
        self._limit_s = math.inf
        """By deadlines: of the whole step, with both guards."""
        self._best_effort_limit_s = math.inf
        """By deadlines that are met at best, before anything is lent."""
        self._lent_until_s = math.inf
        """As predicted, the copies of those who resume included."""
        self._base_s = 0.0
        """Predicted time of what was in it before anything was lent."""
        self.in_danger: list[Request] = []
        """Decodes in it that may be late, whatever joins it."""
        self._table = running.table
        self._residuals = running.table.residuals(limits.start_s)

    @property
    def is_full(self) -> bool:
        """Whether the token budget is used up."""
        return self._budget <= 0

    @property
    def num_tokens(self) -> int:
        """New tokens in it, each of which takes a slot."""
        return self._shape.num_new

    @property
    def full_of(self) -> Reason:
        """What there is no more of once somebody did not fit: tokens or time."""
        return Reason.TOKENS if self.is_full else Reason.TIME

    def residual(self, request: Request) -> float:
        """Return the time from the start of the step to the deadline of a request's next token.

        One that is in flight comes when the step starts; the one of this step is due behind it.
        """
        if request in self.due_s:
            return self.due_s[request]
        if request.row is not None:
            return float(self._residuals.due[request.row])
        deadlines = request.deadlines
        return math.inf if deadlines is None else deadlines.residual(self._start_s)

    def can_be_in_time(self, request: Request) -> bool:
        """Whether a prompt, computed from here on without a pause, meets its deadline."""
        return self.seconds_to_end(request) <= self.residual(request)

    def seconds_to_end(self, request: Request, without: Rows = NO_ROWS) -> float:
        """Return how long a prompt takes from here on without a pause, with the guard.

        In this step if there is room for all of it; otherwise in as many like it as it needs, each
        with what is left beside the decodes: each computes these as well, but those `without`.
        """
        rest, shape = request.num_schedulable_tokens, self._without(without)
        if rest <= self._budget + len(without):
            seconds = self._seconds_with_all_of(request, shape)
            if seconds <= self._limit_s:
                return seconds
        decodes = shape.decodes
        chunk = self._tokens_beside(decodes, request)
        if chunk >= rest:
            return self._seconds_with_all_of(request, decodes)
        num_whole, last = divmod(rest, chunk)
        start = request.next_position
        ends = (start, start + (num_whole - 1) * chunk)
        whole_s = sum(self._seconds(decodes.plus(place, chunk)) for place in ends) / 2
        last_s = self._seconds(decodes.plus(start + rest - last, last)) if last else 0.0
        return num_whole * whole_s + last_s

    def seconds_to_end_beside_others(self, request: Request) -> float:
        """Return the share of the time of full steps that a prompt takes, with the guard."""
        chunk = self.tokens_per_step(request)
        start, decodes = request.next_position, self._shape.decodes
        return request.num_schedulable_tokens / chunk * self._seconds(decodes.plus(start, chunk))

    def tokens_per_step(self, request: Request) -> int:
        """Return how much of a prompt goes beside the decodes of a step, at least MIN_CHUNK."""
        return self._tokens_beside(self._shape.decodes, request)

    def _tokens_beside(self, decodes: StepShape, request: Request) -> int:
        most = self._max_tokens - decodes.num_new
        if math.isfinite(self._limit_s) and self._cost.is_known:
            limit_s = self._limit_s / self._cost.guard
            most = self._cost.tokens_within(decodes, limit_s, request.next_position, most)
        return max(MIN_CHUNK, most)

    def is_urgent(self, request: Request) -> bool:
        """Whether a prompt can be in time, and no more if it waits for one step like this (A8)."""
        slack_s = self.residual(request) - self.seconds_to_end(request)
        return 0.0 <= slack_s <= min(self._limit_s, self._idle_limit_s)

    def _seconds_with_all_of(self, request: Request, shape: StepShape) -> float:
        return self._seconds(shape.plus(request.next_position, request.num_schedulable_tokens))

    # ---------------------------------------------------------------- limits

    def limit_by_deadlines(self) -> None:
        """Limit the step by the deadlines of the decodes in it.

        Prompts of real-time requests keep to those that will surely be met: for others they need
        not wait. Best-effort ones do: doubts about the prediction must not make a step longer,
        and a token that will be late in any case is due as if all before it had been in time,
        lest its request falls behind further. If that cannot be either, it sets no limit.
        """
        least_s, base_s = self._cost.seconds(self._shape), self._seconds(self._shape)
        rows = self._decode_rows()
        residual_s = self._due_of(rows, self._residuals.due)
        is_sure = residual_s >= base_s
        surely_s = float(residual_s[is_sure].min(initial=math.inf))
        self.in_danger = self._table.of(rows[~is_sure])
        lent_s = self._due_of(rows, self._residuals.lent)
        lent_s = np.where(lent_s < least_s, self._due_of(rows, self._residuals.of_late), lent_s)
        self.deadline_s = self._limit_s = surely_s
        self._best_effort_limit_s = float(lent_s[lent_s >= least_s].min(initial=math.inf))
        if self._guard is not None and math.isfinite(surely_s):
            self._limit_s = self._guard.limit(base_s, surely_s)

    def _decode_rows(self) -> Rows:
        """Return the rows of all decodes in it."""
        rows = [part.rows for part in self.chosen if isinstance(part, Decodes)]
        return rows[0] if len(rows) == 1 else np.concatenate([NO_ROWS, *rows])

    def _due_of(self, rows: Rows, residuals: FloatArray) -> FloatArray:
        """Return what `residuals` say of rows, but for those that `due_s` has."""
        found: FloatArray = residuals[rows]
        for request, due_s in self.due_s.items():
            if request.row is not None:
                found[rows == request.row] = due_s
        return found

    def lend(self, num_held: int, limits: StepLimits) -> None:
        """Let best-effort requests have what is left, as far as it is lent to them.

        Real-time ones that run hold `num_held` tokens.
        """
        self._limit_s = min(self._limit_s, self._best_effort_limit_s)
        held_share = num_held / limits.num_slots
        self._base_s = self.seconds
        self._lent_until_s = lent_until_s(
            self._base_s,
            self._cost.seconds(StepShape().plus(0, 1)),
            held_share,
            limits.outlook,
            limits.num_slots,
        )

    @contextmanager
    def in_any_case(self, seconds: float) -> Iterator[None]:
        """Within it the step may be filled for so much longer, whatever its limits."""
        limits = self._limit_s, self._lent_until_s
        self._limit_s = math.inf
        self._lent_until_s = self.seconds + min(seconds, self._idle_limit_s)
        yield
        self._limit_s, self._lent_until_s = limits

    @property
    def seconds(self) -> float:
        """What it takes as predicted, without copies."""
        return self._cost.seconds(self._shape)

    def _limit_for(self, request: Request) -> float:
        """Return how long the step may compute if a prompt, perhaps one that resumes, joins."""
        return self._predicted_limit_s - self._loads.seconds(num_loaded_by(request))

    @property
    def _predicted_limit_s(self) -> float:
        """Return how long the step may take as predicted, copies included.

        Whatever the doubts, tokens that make it no longer may be in it: below the knee of the cost
        model they are free.
        """
        return min(max(self._limit_s / self._cost.guard, self._base_s), self._lent_until_s)

    # ---------------------------------------------------------------- decodes

    def add_decodes(self, rows: Rows) -> None:
        """Add decodes as far as the token budget goes, the most urgent first."""
        if len(rows) > self._budget:
            rows = rows[np.argsort(self._due_of(rows, self._residuals.due), kind="stable")]
            self._skips.note_rows(rows[self._budget :], Reason.TOKENS)
            rows = rows[: self._budget]
        self._add_decodes(rows)

    def add_while_in_time(self, rows: Rows) -> bool:
        """Add decodes while budget and time last; whether that is all of them."""
        count = self._num_decodes_in_time(rows)
        if count > 0:
            self._add_decodes(rows[:count])
        if count < len(rows):
            self._skips.note_rows(rows[count:], self.full_of)
        return count == len(rows)

    def by_residual(self, rows: Rows) -> Rows:
        """Return decodes, the most urgent first."""
        by_residual: Rows = rows[np.argsort(self._due_of(rows, self._residuals.due), kind="stable")]
        return by_residual

    def _num_decodes_in_time(self, rows: Rows) -> int:
        if self._budget <= 0 or not len(rows):
            return 0
        rows = rows[: self._budget]
        contexts = np.cumsum(self._table.next_position[rows]).tolist()
        count = len(rows)
        if self._has_time_for(count, contexts[-1]):
            return count
        # Time only grows with each: as many as one by one would find it.
        count = bisect.bisect_left(
            range(1, count),
            True,
            key=lambda number: not self._has_time_for(number, contexts[number - 1]),
        )
        return max(count, int(not self.chosen))  # an empty step takes one

    def _has_time_for(self, num_decodes: int, context: int) -> bool:
        """Whether the step keeps its limits with so many more decodes, contexts summed."""
        shape = self._shape.plus_decodes(num_decodes, context)
        return self._cost.seconds(shape) + self._loads.seconds() <= self._predicted_limit_s

    def _add_decodes(self, rows: Rows) -> None:
        if len(rows):
            decodes = Decodes(self._table, rows)
            self.chosen.append(decodes)
            self._shape = self._shape.plus_decodes(len(rows), decodes.num_context_tokens)
            self._budget -= len(rows)

    def decodes_due_after(self, residual_s: float, *, lent: bool = False) -> Rows:
        """Return decodes in it whose residual is longer, or `lent`, what of it is lent."""
        rows = self._decode_rows()
        due_s = self._due_of(rows, self._residuals.lent if lent else self._residuals.due)
        has_output = self._table.num_output[rows] + self._table.inflight_samples[rows] > 0
        late: Rows = rows[(due_s > residual_s) & has_output]
        return late

    def would_be_in_time(self, request: Request, without: Rows) -> bool:
        """Whether one in it, or a prompt, computed without a pause, would be without others.

        These are decodes in it; a prompt that takes several steps is without them in each.
        """
        if request in self.in_danger:
            return self._seconds(self._without(without)) <= self.residual(request)
        return self.seconds_to_end(request, without) <= self.residual(request)

    def _without(self, rows: Rows) -> StepShape:
        if not len(rows):
            return self._shape
        context = int(self._table.next_position[rows].sum())
        return self._shape.plus_decodes(-len(rows), -context)

    def leave_out(self, rows: Rows) -> None:
        """Take decodes out; they may be added again."""
        self._shape = self._without(rows)
        chosen: list[Share] = []
        for part in self.chosen:
            if isinstance(part, Decodes):
                left = part.rows[~np.isin(part.rows, rows)]
                if len(left):
                    chosen.append(Decodes(self._table, left))
            else:
                chosen.append(part)
        self.chosen = chosen
        self._budget += len(rows)

    @property
    def deadline_limit_s(self) -> float:
        """What deadlines leave, of the whole step; inf: what is lent ends before, or is unknown."""
        is_first = self._limit_s / self._cost.guard < self._lent_until_s and self._cost.is_known
        return self._limit_s if is_first else math.inf

    def gained_by_prompt(self, without: Rows) -> int:
        """Return how many more tokens of a prompt would fit until then without decodes."""
        limit_s = self._limit_s / self._cost.guard
        before = self._cost.tokens_within(self._shape, limit_s, 0, self._budget)
        return self._cost.tokens_within(self._without(without), limit_s, 0, self._budget) - before

    # ---------------------------------------------------------------- prompts

    def add_chunk(self, request: Request) -> bool:
        """Add as much of a prompt as there is time and budget for; whether that is its rest.

        An empty step takes something, however little time there is. Who resumes and has too much
        to bring back loads it beside the step; then others may still join it.
        """
        loads = num_loaded_by(request) > 0
        can_go_beside = loads and self._loads.can_go_beside(request, self.seconds)
        due_s = self.residual(request) / self._cost.guard if can_go_beside else 0.0
        if can_go_beside and self._loads.is_free_for(request, self.seconds, due_s):
            return self._load_beside(request)
        rest = request.num_schedulable_tokens
        num_tokens = self.num_tokens_in_time(request, rest)
        if num_tokens <= 0 or (num_tokens < min(rest, MIN_CHUNK) and self.chosen):
            if can_go_beside and not self.is_full:
                return self._load_beside(request)
            self._skips.note(request, self.full_of)
            return False
        if num_tokens == rest and request.request_class is RT:
            # It yields a token in this step, whose deadline counts if it can be met.
            residual_s = self.residual(request)
            shape = self._shape.plus(request.next_position, rest)
            if residual_s >= self._seconds(shape):
                self._limit_s = min(self._limit_s, residual_s)
                self.deadline_s = min(self.deadline_s, residual_s)
            elif residual_s >= self._cost.seconds(shape):
                self._best_effort_limit_s = min(self._best_effort_limit_s, residual_s)
        self._add(request, num_tokens)
        self.num_started += request.state is WAITING
        return num_tokens == rest

    def _load_beside(self, request: Request) -> bool:
        """Let a request load what there is time for; whether to look at those behind it."""
        self._skips.note(request, Reason.LOADING)
        num_tokens = self._loads.add_beside(request, self.seconds, self._predicted_limit_s)
        if num_tokens == 0:
            return self._loads.may_pass_more
        self.chosen.append(Loading(request, num_tokens))
        self.num_started += 1
        return True

    def add_chunks(self, requests: Iterable[Request]) -> bool:
        """Add prompts in order up to one that is cut or left out; whether all are in, whole."""
        return all(map(self.add_chunk, requests))

    def while_rows(
        self, newcomers: Iterator[Request], num_rows: int, request_class: RequestClass
    ) -> Iterator[Request]:
        """Yield newcomers of a class while there are rows for those that start."""
        num_rows += self.num_started
        while self.num_started < num_rows:
            if (request := next(newcomers, None)) is None:
                return
            yield request
        self._skips.stop(request_class, Reason.ROWS)

    def num_tokens_in_time(self, request: Request, most: int) -> int:
        """Return how many of a prompt's next tokens, `most` at most, fit time and budget."""
        most = min(most, self._budget)
        limit_s = self._limit_for(request)
        if most <= 0 or not math.isfinite(limit_s) or not self._cost.is_known:
            return most
        in_time = self._cost.tokens_within(self._shape, limit_s, request.next_position, most)
        return in_time if self.chosen else max(in_time, min(most, MIN_CHUNK))

    def seconds_added(self, request: Request, num_tokens: int) -> float:
        """Return what the step takes longer if so many tokens of a prompt join, loads included."""
        shape = self._shape.plus(request.next_position, num_tokens)
        copied_s = self._loads.seconds(num_loaded_by(request)) - self._loads.seconds()
        return self._cost.seconds(shape) - self._cost.seconds(self._shape) + copied_s

    def _add(self, request: Request, num_tokens: int) -> None:
        self.chosen.append(Allotment(request, num_tokens))
        self._loads.wait_for(request)
        self._shape = self._shape.plus(request.next_position, num_tokens)
        self._budget -= num_tokens

    def _seconds(self, shape: StepShape) -> float:
        return (self._cost.seconds(shape) + self._loads.seconds()) * self._cost.guard


# Real-time decodes that can wait for a step give way (mechanisms B3, B7, C4).
#
#     rescue      to a real-time token that would be late beside them, and is in time without
#     make_room   to best-effort prompts, if these gain more tokens in their time
#
# A decode can wait if it is still in time after this step and one more like the recent ones, for
# best-effort prompts two. Whoever gave way comes back if the step has time left for it.


def rescue(step: TimedStep, prompts: Iterable[Request], average_step_s: float) -> Rows:
    """Leave decodes out for the most urgent request that they make late; return them.

    Args:
        step: with the decodes, its limit known.
        prompts: of real-time requests, that may join.
        average_step_s: execution time of recent steps; 0: there were none.
    """
    if average_step_s <= 0:
        return NO_ROWS
    in_danger = [*step.in_danger, *(r for r in prompts if not step.can_be_in_time(r))]
    for request in sorted((r for r in in_danger if step.residual(r) > 0), key=step.residual):
        others = step.decodes_due_after(step.residual(request) + average_step_s)
        if len(others) and step.would_be_in_time(request, without=others):
            step.leave_out(others)
            return others
    return NO_ROWS


def make_room(step: TimedStep, average_step_s: float) -> Rows:
    """Leave decodes out for best-effort prompts; return them.

    Only where deadlines are what limits the step: time that is not lent is no gain.
    """
    limit_s = step.deadline_limit_s
    if average_step_s <= 0 or limit_s == math.inf:
        return NO_ROWS
    ample = step.decodes_due_after(limit_s + 2 * average_step_s, lent=True)
    if not len(ample) or step.gained_by_prompt(without=ample) <= len(ample):
        return NO_ROWS
    step.leave_out(ample)
    return ample
