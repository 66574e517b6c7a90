"""A step that is being filled: what is in it, how long that takes, and what else fits."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from lightserve.messages.router_worker import MAX_PROMPT_LOGPROB_POSITIONS
from lightserve.router.policies.base import (
    LOOK_AHEAD,
    NO_LIMIT,
    Phase,
    StepLimits,
    StepPace,
    Waiting,
)
from lightserve.router.policies.step_loads import StepLoads, num_loaded_by
from lightserve.router.request import WAITING, Request
from lightserve.router.request_table import NO_ROWS, DueTimes, Rows, Running
from lightserve.router.step import ALL_CLASSES, Loading, Reason, Scheduled, Skips
from lightserve.router.step_cost import StepShape
from lightserve.types import BE, RT, RequestClass

MIN_CHUNK = 16
"""Under deadlines, fewer tokens of a prompt are not worth a row, unless they end it."""
MEMORY_REASONS = {Reason.KV_NOW, Reason.KV_FUTURE, Reason.BYTES}
"""What newcomers may lack though there is time: those that run go on."""


class StepBudget:
    """Time, tokens and rows of a step; what is in it, and what was left out.

    Policies read it and set its time limits; the planner's loop fills it.
    """

    def __init__(
        self,
        running: Running,
        waiting: Waiting,
        limits: StepLimits,
        skips: Skips,
        *,
        meets_deadlines: bool,
    ) -> None:
        """Begin with an empty step, of requests that run and that may start.

        `skips` is told what is left out; `meets_deadlines`: whether the policy looks at deadlines.
        """
        self.running = running
        self.waiting = waiting
        self.limits = limits
        self.skips = skips
        self.started: dict[Request, None] = {}
        """Newcomers in it, those that load to start later included."""
        self.due = DueTimes(running.table, limits.start_s)
        self.urgent: set[Request] = set()
        """Best-effort newcomers that start whatever the turn."""
        self.has_run_out = False
        """Whether the last phase found too little time, or too few tokens."""
        self.closed: set[RequestClass] = set()
        """Classes of which no more newcomers are tried in this phase."""
        self.hits_limit = False
        """Whether a policy had to leave out a real-time request for want of time."""
        self.best_effort_s: float | None = None
        """What best-effort requests add to its time, where a share is theirs and they want more."""
        self.deadline_s = math.inf
        """From its start to the nearest deadline that it is to meet; inf: to none."""
        self.in_danger: list[Request] = []
        """Decodes in it that may be late, whatever joins it."""
        self.pace = StepPace()
        """Of real-time decodes that have no target."""
        self._meets_deadlines = meets_deadlines
        self._budget = limits.max_num_batched_tokens
        self._num_positions_left = MAX_PROMPT_LOGPROB_POSITIONS
        """Of prompts whose log-probabilities are wanted."""
        is_bounded = limits.max_be_seqs < NO_LIMIT
        self._num_be_left = limits.max_be_seqs - (len(running.of(BE)) if is_bounded else 0)
        """Best-effort requests that may start."""
        self._num_passed = 0
        self._cost = limits.cost
        self._loads = StepLoads(limits)
        self._shape = StepShape()
        self._timed = self._shape, 0.0
        """What it was when its time was last asked for, and that time."""
        self._limit_s = math.inf
        """By deadlines: of the whole step, with both guards."""
        self._best_effort_limit_s = math.inf
        """By deadlines that are met at best, before anything is lent."""
        self._lent_until_s = math.inf
        """As predicted, the copies of those that resume included."""
        self._base_s = 0.0
        """Predicted time of what was in it before anything was lent."""
        self._added: list[Rows | Scheduled | Loading] = []
        """What is in it, in order; arrays are rows of decodes."""
        self._chunks: set[Request] = set()
        """All others that advance in it."""
        self._table = running.table

    # ---------------------------------------------------------------- what policies ask

    @property
    def is_empty(self) -> bool:
        """Whether nothing advances in it."""
        return self._shape.num_new == 0

    @property
    def is_full(self) -> bool:
        """Whether the token budget is used up."""
        return self._budget <= 0

    @property
    def num_tokens(self) -> int:
        """New tokens in it, each of which takes a slot."""
        return self._shape.num_new

    @property
    def num_requests(self) -> int:
        """Requests that advance in it."""
        return self._shape.num_decodes + self._shape.num_chunks

    @property
    def full_of(self) -> Reason:
        """What there is no more of once something did not fit: tokens, pace or time."""
        if self.pace.is_limit and not self.is_full:
            return Reason.PACE
        return Reason.TIME if self._meets_deadlines and not self.is_full else Reason.TOKENS

    @property
    def parts(self) -> list[Scheduled | Loading]:
        """What is in it, one by one: for tests, and for those that watch policies."""
        parts: list[Scheduled | Loading] = []
        for part in self._added:
            if isinstance(part, np.ndarray):
                parts += [Scheduled(request, 1) for request in self._table.of(part)]
            else:
                parts.append(part)
        return parts

    def running_of(self, request_class: RequestClass | None = None) -> Phase:
        """Return a phase of the requests of a class, or of all, that run and are not in it yet."""
        rows = self.running.rows if request_class is None else self.running.of(request_class)
        return self.phase_of(rows)

    def phase_of(self, rows: Rows) -> Phase:
        """Return a phase of requests that run, those left out that are in the step already."""
        decodes, prompts, blocked = self.running.sort_out(self.not_in_it(rows))
        self.skips.note_rows(blocked, Reason.BLOCKED)
        return Phase(decodes=decodes, prompts=prompts)

    def not_in_it(self, rows: Rows) -> Rows:
        """Return those rows of which nothing is in the step."""
        if self.is_empty or not len(rows):
            return rows
        is_in = np.zeros(self._table.num_rows, dtype=np.bool_)
        is_in[self.decode_rows] = True
        is_in[[r.row for r in self._chunks if r.row is not None]] = True
        others: Rows = rows[~is_in[rows]]
        return others

    def waits_for_memory(self, request_class: RequestClass) -> bool:
        """Whether memory ended the search for newcomers of a class."""
        return self.skips.stopped_by.get(request_class) in MEMORY_REASONS

    # ---------------------------------------------------------------- what the loop asks

    def open_phase(self) -> None:
        """Begin another phase."""
        self.has_run_out = self.is_full
        self.closed.clear()
        self._num_passed = 0

    def in_time(self, rows: Rows) -> Rows:
        """Return as many decodes as budget and time allow, from the first on.

        Where tokens are short, the most urgent ones.
        """
        if len(rows) > self._budget and self._meets_deadlines:
            rows = self.due.in_order(rows)
        rows = rows[: max(0, self._budget)]
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

    def refuses_to_start(self, request: Request) -> Reason | None:
        """Return why a request that waits may not start, memory aside; None if it may."""
        if request.num_schedulable_tokens == 0:  # its frontend has not caught up with it yet
            return Reason.BLOCKED
        if request.request_class is BE and request not in self.urgent:
            if not self.limits.turn.allows(request):
                return Reason.ORDER
            if self.waiting.is_prefix_in_flight(request):
                return Reason.BLOCKED
        return None

    def is_open(self, request_class: RequestClass) -> bool:
        """Whether more newcomers of a class may be tried in this phase."""
        limits, is_real_time = self.limits, request_class is RT
        num_rows = limits.num_yielding_rows if is_real_time else limits.num_owed_be_rows
        has_row = num_rows + limits.num_free_rows > len(self.started)
        has_row &= is_real_time or self._num_be_left > 0
        if request_class not in self.closed and not has_row:
            self._close(request_class, Reason.ROWS)
        return request_class not in self.closed

    def offer(self, request: Request, phase: Phase) -> Scheduled | Loading | Reason:
        """Return as much of a request as there is time and budget for, or what is short.

        An empty step takes something, however little time there is. One that resumes and has too
        much to bring back loads it beside the step; then others may still join it.
        """
        rest = request.num_schedulable_tokens
        if rest == 0:
            return Reason.BLOCKED
        if request.wants_prompt_logprobs:
            rest = min(rest, self._num_positions_left)
            if rest == 0:
                return Reason.TOKENS
        if phase.num_tokens and not request.is_whole:
            return Scheduled(request, phase.num_tokens)
        if phase.is_whole or request.is_whole:
            is_in = self.is_empty or self.num_tokens_in_time(request, rest) == rest
            return Scheduled(request, rest) if is_in else self._run_out()
        loads = num_loaded_by(request) > 0
        can_go_beside = loads and self._loads.can_go_beside(request, self.seconds)
        if can_go_beside and self._loads.is_free_for(request, self.seconds, self._due_for(request)):
            return self._offer_loading(request)
        most = self._leaving_room(request, rest) if phase.leaves_room else rest
        num_tokens = self.num_tokens_in_time(request, most)
        is_small = self.pace.is_limit and request.request_class is BE
        least = min(rest, MIN_CHUNK) if self._meets_deadlines and not is_small else 1
        if num_tokens <= 0 or (num_tokens < least and not self.is_empty):
            if can_go_beside and not self.is_full:
                return self._offer_loading(request)
            return self._run_out()
        self.has_run_out = num_tokens < rest
        return Scheduled(request, num_tokens)

    def _due_for(self, request: Request) -> float:
        """Return the time that a request has to load its KV beside steps."""
        if request.request_class is RT and not self._meets_deadlines:
            return 0.0
        return self.residual(request) / self._cost.guard

    def _offer_loading(self, request: Request) -> Loading | Reason:
        num_tokens = self._loads.tokens_beside(request, self.seconds, self._predicted_limit_s)
        return Loading(request, num_tokens) if num_tokens else Reason.LOADING

    def _run_out(self) -> Reason:
        self.has_run_out = True
        return self.full_of

    def add_decodes(self, rows: Rows) -> None:
        """Add rows that compute one token."""
        if len(rows):
            self._added.append(rows)
            context = int(self._table.next_position[rows].sum())
            self._shape = self._shape.plus_decodes(len(rows), context)
            self._budget -= len(rows)
            self.has_run_out = self.has_run_out or self.is_full

    def add(self, part: Scheduled | Loading) -> None:
        """Add a part that was offered, or less of it."""
        request, num_tokens = part
        if request.state is WAITING:
            self.started[request] = None
            self._num_be_left -= request.request_class is BE
            if request.request_class is BE and request not in self.urgent:
                self.limits.turn.note(request)
        if isinstance(part, Loading):
            self._loads.add_beside(num_tokens)
            self._added.append(part)
            self.skips.note(request, Reason.LOADING)
            return
        shape = self._shape.plus(request.next_position, num_tokens)
        if num_tokens == request.num_schedulable_tokens and request.request_class is RT:
            # It yields a token in this step, whose deadline counts if it can be met.
            residual_s = self.residual(request)
            if residual_s >= self._seconds(shape):
                self._limit_s = min(self._limit_s, residual_s)
                self.deadline_s = min(self.deadline_s, residual_s)
            elif residual_s >= self._cost.seconds(shape):
                self._best_effort_limit_s = min(self._best_effort_limit_s, residual_s)
        if request.wants_prompt_logprobs:
            self._num_positions_left -= num_tokens
        self._added.append(part)
        self._chunks.add(request)
        self._loads.wait_for(request)
        self._shape = shape
        self._budget -= num_tokens
        self.has_run_out = self.has_run_out or self.is_full

    def skip(self, request: Request, reason: Reason, classes: tuple[RequestClass, ...]) -> None:
        """Leave a request out; what that ends, is ended.

        Args:
            request: it was tried.
            reason: what it lacks.
            classes: of the newcomers that are not tried any more where this one may not be passed.
        """
        self.skips.note(request, reason)
        if request.state is not WAITING or reason is Reason.BLOCKED:
            return
        is_best_effort = request.request_class is BE
        has_no_positions = request.wants_prompt_logprobs and self._num_positions_left <= 0
        if (
            reason is Reason.LOADING
            or (reason is Reason.KV_FUTURE and is_best_effort)
            or (reason is Reason.TOKENS and has_no_positions)
        ):
            self._num_passed += 1
            if self._num_passed <= LOOK_AHEAD:
                return
        for request_class in classes:
            self._close(request_class, reason)

    def _close(self, request_class: RequestClass, reason: Reason) -> None:
        self.closed.add(request_class)
        self.skips.stop(request_class, reason)

    def close_all(self, phase: Phase) -> None:
        """End a phase in which time or tokens ran out."""
        for request in phase.prompts:
            if request not in self._chunks:
                self.skips.note(request, self.full_of)
        for request_class in phase.classes:
            self._close(request_class, self.full_of)

    def note_rest(self) -> None:
        """Say of requests that were not tried why: it was not their turn."""
        reason = Reason.TOKENS if self.is_full else Reason.ORDER
        if self.num_requests - len(self.started) < len(self._table.rows):
            others = self.not_in_it(self._table.rows)
            is_blocked = self.running.schedulable[others] == 0
            self.skips.note_rows(others[is_blocked], Reason.BLOCKED)
            self.skips.note_rows(others[~is_blocked], reason)
        for request_class in ALL_CLASSES:
            self.skips.stop(request_class, reason)

    # ---------------------------------------------------------------- deadlines

    def residual(self, request: Request) -> float:
        """Return the time from the start of the step to the deadline of a request's next token."""
        return self.due.of(request)

    def can_be_in_time(self, request: Request) -> bool:
        """Whether a prompt, computed from here on without a pause, meets its deadline."""
        return self.seconds_to_end(request) <= self.residual(request)

    def seconds_to_end(self, request: Request, without: Rows = NO_ROWS) -> float:
        """Return how long a prompt takes from here on without a pause, with the guard.

        In this step if there is room for all of it; otherwise in as many like it as it needs, each
        with what is left beside the decodes: each computes these as well, but those `without`.
        """
        rest, shape = request.num_schedulable_tokens, self._without(without)
        fits = rest <= self._budget + len(without)
        if fits and (whole_s := self._seconds_with_all_of(request, shape)) <= self._limit_s:
            return whole_s
        decodes = shape.decodes
        chunk = self._tokens_beside(decodes, request)
        if chunk >= rest:
            return self._seconds_with_all_of(request, decodes)
        num_whole, last = divmod(rest, chunk)
        start = request.next_position
        ends = (start, start + (num_whole - 1) * chunk)
        each_s = sum(self._seconds(decodes.plus(place, chunk)) for place in ends) / 2
        last_s = self._seconds(decodes.plus(start + rest - last, last)) if last else 0.0
        return num_whole * each_s + last_s

    def seconds_to_end_beside_others(self, request: Request) -> float:
        """Return the share of the time of full steps that a prompt takes, with the guard."""
        start, decodes = request.next_position, self._shape.decodes
        chunk = self._tokens_beside(decodes, request)
        return request.num_schedulable_tokens / chunk * self._seconds(decodes.plus(start, chunk))

    def _tokens_beside(self, decodes: StepShape, request: Request) -> int:
        """Return how much of a prompt goes beside decodes in a step, at least MIN_CHUNK."""
        most = self.limits.max_num_batched_tokens - decodes.num_new
        if math.isfinite(self._limit_s) and self._cost.is_known:
            limit_s = self._limit_s / self._cost.guard
            most = self._cost.tokens_within(decodes, limit_s, request.next_position, most)
        return max(MIN_CHUNK, most)

    def is_urgent(self, request: Request, step_s: float | None = None) -> bool:
        """Whether a prompt can be in time, and no more after a step of `step_s`; None: as this."""
        if step_s is None:
            step_s = min(self._limit_s, self.limits.outlook.room_limit_s)
        return 0.0 <= self.residual(request) - self.seconds_to_end(request) <= step_s

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
        least_s, base_s = self.seconds, self._seconds(self._shape)
        rows = self.decode_rows
        residual_s = self.due.of_rows(rows, self.due.residuals.due)
        is_sure = residual_s >= base_s
        surely_s = float(residual_s[is_sure].min(initial=math.inf))
        self.in_danger = self._table.of(rows[~is_sure])
        lent_s = self.due.of_rows(rows, self.due.residuals.lent)
        lent_s = np.where(
            lent_s < least_s, self.due.of_rows(rows, self.due.residuals.of_late), lent_s
        )
        self.deadline_s = self._limit_s = surely_s
        self._best_effort_limit_s = float(lent_s[lent_s >= least_s].min(initial=math.inf))
        if self.limits.guard is not None and math.isfinite(surely_s):
            self._limit_s = self.limits.guard.limit(base_s, surely_s)

    @property
    def decode_rows(self) -> Rows:
        """Return the rows of all decodes in it."""
        rows = [part for part in self._added if isinstance(part, np.ndarray)]
        return rows[0] if len(rows) == 1 else np.concatenate([NO_ROWS, *rows])

    @property
    def is_padded(self) -> bool:
        """Whether workers fill it up with as many tokens as are worth a row."""
        return self._cost.num_padding(self._shape) >= MIN_CHUNK

    def lend(self, until_s: float, *, doubtless_s: float = 0.0) -> None:
        """Let best-effort requests have what is left up to then, in doubt to `doubtless_s`."""
        self._limit_s = min(self._limit_s, self._best_effort_limit_s)
        self._base_s = max(self.seconds, min(doubtless_s, self._limit_s))
        self._lent_until_s = until_s
        self.pace.limit(self._predicted_limit_s)

    @contextmanager
    def in_any_case(self, seconds: float) -> Iterator[None]:
        """Within it the step may be filled for so much longer, whatever its limits."""
        limits = self._limit_s, self._lent_until_s
        self._limit_s = math.inf
        self._lent_until_s = self.seconds + min(seconds, self.limits.outlook.idle_limit_s)
        yield
        self._limit_s, self._lent_until_s = limits

    @property
    def seconds(self) -> float:
        """What it takes as predicted, without copies."""
        if self._timed[0] is not self._shape:
            self._timed = self._shape, self._cost.seconds(self._shape)
        return self._timed[1]

    def _limit_for(self, request: Request) -> float:
        """Return how long the step may compute if a prompt, perhaps one that resumes, joins."""
        limit_s = self._predicted_limit_s
        if self.pace.limits.prompts_s < math.inf:
            limit_s = self.pace.limit(limit_s, request, self.residual(request))
        return limit_s - self._loads.seconds(num_loaded_by(request))

    @property
    def _predicted_limit_s(self) -> float:
        """Return how long the step may take as predicted, copies included.

        Whatever the doubts, tokens that make it no longer may be in it: below the knee of the cost
        model they are free.
        """
        return min(max(self._limit_s / self._cost.guard, self._base_s), self._lent_until_s)

    # ---------------------------------------------------------------- decodes

    def _has_time_for(self, num_decodes: int, context: int) -> bool:
        """Whether the step keeps its limits with so many more decodes, contexts summed."""
        shape = self._shape.plus_decodes(num_decodes, context)
        return self._cost.seconds(shape) + self._loads.seconds() <= self._predicted_limit_s

    def decodes_due_after(self, residual_s: float, *, lent: bool = False) -> Rows:
        """Return decodes in it whose residual is longer, or `lent`, what of it is lent."""
        rows = self.decode_rows
        due_s = self.due.of_rows(rows, self.due.residuals.lent if lent else self.due.residuals.due)
        has_output = self._table.num_output[rows] + self._table.inflight_samples[rows] > 0
        can_wait = (due_s > residual_s) & has_output
        if lent and self.pace.limits.best_effort_s < math.inf:
            can_wait &= due_s < math.inf
        late: Rows = rows[can_wait]
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

    def remove_decodes(self, rows: Rows) -> None:
        """Take decodes out; they may be added again."""
        self._shape = self._without(rows)
        for place, part in enumerate(self._added):
            if isinstance(part, np.ndarray):
                self._added[place] = part[~np.isin(part, rows)]
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

    def num_tokens_in_time(self, request: Request, most: int) -> int:
        """Return how many of a prompt's next tokens, `most` at most, fit time and budget."""
        most = min(most, self._budget)
        limit_s = self._limit_for(request)
        if most <= 0 or not math.isfinite(limit_s) or not self._cost.is_known:
            return most
        least, start = min(most, MIN_CHUNK), request.next_position
        if self.pace.is_limit and request.request_class is RT and not self._chunks:  # it gets on
            least_s = self._cost.seconds(self._shape.plus(start, least))
            most_s = self._predicted_limit_s - self._loads.seconds(num_loaded_by(request))
            limit_s = min(max(limit_s, least_s), most_s)
        in_time = self._cost.tokens_within(self._shape, limit_s, start, most)
        return max(in_time, least) if self.is_empty else in_time

    def _leaving_room(self, request: Request, most: int) -> int:
        """Return how many of a prompt's tokens leave time to arrivals, if it is in time so.

        They wait for the rest of the step. But it has tokens to which the constant is little.
        """
        outlook, cost, start = self.limits.outlook, self._cost, request.next_position
        if request.request_class is BE or outlook.ttft_s == math.inf:
            return most
        least_s = cost.seconds(self._shape.plus(start, min(most, MIN_CHUNK))) + cost.worthwhile_s
        limit_s = max(outlook.room_limit_s / cost.guard, least_s)
        num_tokens = cost.tokens_within(self._shape, limit_s, start, most)
        is_cut = num_tokens < most and not self.is_urgent(request, limit_s * cost.guard)
        return num_tokens if is_cut else most

    def seconds_added(self, request: Request, num_tokens: int) -> float:
        """Return what the step takes longer if so many tokens of a prompt join, loads included."""
        shape = self._shape.plus(request.next_position, num_tokens)
        return self._cost.seconds(shape) - self.seconds + self._seconds_loading(request)

    def share_of(self, request: Request) -> tuple[int, float]:
        """Return how many of a prompt's tokens, at least 1, would join, and what they add to it.

        As `num_tokens_in_time` and `seconds_added` say, which as a rule are one question.
        """
        most = min(request.num_schedulable_tokens, self._budget)
        if most > 1:
            seconds = self._cost.seconds(self._shape.plus(request.next_position, most))
            if seconds <= self._limit_for(request) or not self._cost.is_known:
                return most, seconds - self.seconds + self._seconds_loading(request)
        num_tokens = max(1, self.num_tokens_in_time(request, most))
        return num_tokens, self.seconds_added(request, num_tokens)

    def _seconds_loading(self, request: Request) -> float:
        """Return what the step takes longer for the loads of one more request."""
        num_loaded = num_loaded_by(request)
        return self._loads.seconds(num_loaded) - self._loads.seconds() if num_loaded else 0.0

    def _seconds(self, shape: StepShape) -> float:
        return (self._cost.seconds(shape) + self._loads.seconds()) * self._cost.guard
