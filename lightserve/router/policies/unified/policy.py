"""The order in which a step is filled; see the package."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from lightserve.router.admission.base import AdmissionRound
from lightserve.router.policies.base import (
    LOOK_AHEAD,
    StepLimits,
    Waiting,
    admissible,
    num_best_effort,
)
from lightserve.router.policies.unified.batch_order import BatchOrder, promote
from lightserve.router.policies.unified.timed_step import TimedStep, make_room, rescue
from lightserve.router.queue import Turn
from lightserve.router.request import WAITING, Request
from lightserve.router.request_table import NO_ROWS, Decodes, RequestTable, Rows, Running
from lightserve.router.shares import Reason, Share, Skips
from lightserve.types import BE, RT

# What `--policy unified` can be told.


@dataclass(frozen=True, kw_only=True)
class UnifiedOptions:
    """Fields are options of `lightserve serve`; defaults are theirs."""

    late_min_share: float = 0.1
    be_min_share: float = 0.0
    best_first: bool = True
    """Whether best-effort requests start by what they gain; otherwise as the queue has them."""
    long_prompt_tokens: int = 4096
    """AccelGen's bound of long prompts."""


# Which real-time requests that are late start, and when.
#
# Whoever runs gets a token in every step, so that a share of those who run is a share of time.
# While requests whose first token was late are fewer than `--late-min-share` of all that run, one
# more starts before those that can be in time. Otherwise they start last, and only while memory is
# left for arrivals that can be in time.

LATE_POOL_SHARE = 0.8
"""Beyond their share of time late requests start while real-time ones hold less of the pool."""


class LateTurn(NamedTuple):
    """What late requests may do before all others in a step."""

    has_prompts: bool
    """Those in progress go first."""
    has_newcomer: bool
    """One of those that wait does."""


def turn_of_late(
    table: RequestTable, real_time: Rows, min_share: float, step_number: int
) -> LateTurn:
    """Return what is theirs, as long as fewer of them run than should at least.

    Among few, a single one would be more than the share: then only every so many steps.
    """
    num_late = int(np.count_nonzero(table.is_first_late[real_time]))
    most = min_share * len(real_time)
    is_turn = num_late < most and step_number % round(1 / min_share) == 0
    return LateTurn(is_turn, is_turn or num_late + 1 <= most)


def late_in_order(
    waiting: Waiting, num_held: int, limits: StepLimits, *, late_first: bool
) -> Iterable[Request]:
    """Return who waits and may start, in order: one late request first, or all last or not at all.

    `num_held` tokens are those of real-time requests that run.
    """
    if late_first and (late := next(iter(waiting.late()), None)) is not None:
        others = (r for r in waiting.of(RT) if r is not late)
        return itertools.chain([late], others)
    if num_held < LATE_POOL_SHARE * limits.num_slots:
        return waiting.of(RT)
    return _until_late(waiting, limits.skips)


def _until_late(waiting: Waiting, skips: Skips) -> Iterator[Request]:
    """Yield those who can be in time, or have started before; late ones, who come last, wait."""
    first_late = next(iter(waiting.late()), None)
    for request in waiting.of(RT):
        if request is first_late:
            skips.stop(RT, Reason.ORDER)
            return
        yield request


# Long prompts one after the other (AccelGen's exclusive allocation; mechanisms A3, C9).
#
# Two long prompts that take turns both end late: each waits for the other's chunks, and both hold
# memory meanwhile. So a new one waits until the one in progress is through, however near its own
# deadline is, unless it is urgent: it could not meet it any more after one more step. Short prompts
# go on. Best-effort prompts need no rule: they follow one another anyway.


def one_long_at_once(
    newcomers: Iterable[Request],
    in_progress: Iterable[Request],
    *,
    long_tokens: int,
    step: TimedStep,
    skips: Skips,
) -> Iterator[Request]:
    """Yield real-time newcomers, those left out that would be a second long prompt in progress.

    Args:
        newcomers: who waits, in order.
        in_progress: prompts that run and can be in time; a late one may never end.
        long_tokens: from so many tokens to compute on a prompt is long; 0: none is.
        step: what they would join.
        skips: is told of those left out; LOOK_AHEAD of them end the search.
    """
    num_held = 0
    is_taken = long_tokens > 0 and any(
        request.num_known_tokens - (request.num_cached_tokens or 0) >= long_tokens
        for request in in_progress
    )
    for request in newcomers:
        is_long = request.num_schedulable_tokens >= long_tokens
        if not is_taken or not is_long or step.is_urgent(request):
            yield request
            continue
        skips.note(request, Reason.ORDER)
        num_held += 1
        if num_held == LOOK_AHEAD:
            skips.stop(RT, Reason.ORDER)
            return


MAX_RESCUED = 4
"""Of those that wait, decodes may give way to one of so many."""
MAX_WEIGHED = 64
"""Of those that wait, so many are compared by what they take."""
MEMORY_REASONS = {Reason.KV_NOW, Reason.KV_FUTURE}


class UnifiedPolicy:
    """See the package's docstring."""

    is_class_aware = True
    meets_deadlines = True

    def __init__(self, options: UnifiedOptions = UnifiedOptions()) -> None:
        """`options` are frozen."""
        self._options = options

    def select(
        self,
        running: Running,
        waiting: Waiting,
        limits: StepLimits,
        admission: AdmissionRound,
    ) -> Sequence[Share]:
        """See `Policy.select`."""
        assert limits.cost is not None, "the planner gives it to policies that meet deadlines"
        filling = _Filling(self._options, running, waiting, limits, admission)
        filling.add_decodes()
        filling.pay_owed()
        filling.add_urgent()
        filling.add_best_effort()
        skips = limits.skips
        if math.isfinite(filling.step.deadline_s):
            skips.limit_s = filling.step.deadline_s
        if self._options.be_min_share > 0:
            skips.best_effort_s = filling.best_effort_s if filling.wants_more else None
        return filling.step.chosen


class _Filling:
    """A step as it is being filled, from the most urgent requests to the least."""

    def __init__(
        self,
        options: UnifiedOptions,
        running: Running,
        waiting: Waiting,
        limits: StepLimits,
        admission: AdmissionRound,
    ) -> None:
        """See `Policy.select`."""
        self.step = TimedStep(limits, running)
        self.best_effort_s = 0.0
        """What best-effort requests add to the step's time."""
        self.wants_more = False
        """Whether there are some that could do with more time."""
        self._options = options
        self._waiting = waiting
        self._limits = limits
        self._skips = limits.skips
        self._admission = admission
        self._running, self._table = running, running.table
        self._real_time, best_effort = running.of(RT), running.of(BE)
        self._num_held = int(running.table.next_position[self._real_time].sum())
        """Tokens of real-time requests."""
        promoted = promote(running, best_effort, waiting, limits)
        self.step.due_s = promoted.due_s
        self._jobs = promoted.waiting
        """Those that wait, and go with real-time requests."""
        self._decodes, self._prompts = self._sort_out(self._real_time)
        """Of real-time requests, that run."""
        self._job_decodes, job_prompts = self._sort_out(promoted.rows)
        """Of such jobs."""
        self._prompts += job_prompts
        self._best_effort = best_effort
        if len(promoted.rows):
            self._best_effort = best_effort[~np.isin(best_effort, promoted.rows)]
        self._num_be_rows = limits.max_be_seqs - len(best_effort)
        self._gave_way: Rows = NO_ROWS
        """Decodes left out for a more urgent request."""
        self._is_left = False
        """Whether something urgent that could move or start was left out, or cut."""

    def add_decodes(self) -> None:
        """Add the decodes of real-time requests: they make the limit. Jobs' may not break it."""
        self.step.add_decodes(self._decodes)
        self.step.limit_by_deadlines()
        if len(self._job_decodes):
            self.step.add_while_in_time(self._job_decodes)
            self.step.limit_by_deadlines()
        newcomers = itertools.islice(self._waiting.of(RT), MAX_RESCUED)
        prompts = itertools.chain(self._prompts, newcomers)
        self._gave_way = rescue(self.step, prompts, self._limits.average_step_s)
        if len(self._gave_way):
            self.step.limit_by_deadlines()

    def pay_owed(self) -> None:
        """Give best-effort requests what is missing from their share, whatever the limit."""
        owed_s = self._limits.best_effort_time.owed_s(self._options.be_min_share)
        if owed_s > 0:
            with self.step.in_any_case(owed_s):
                self._add_best_effort()

    def add_urgent(self) -> None:
        """Add prompts of real-time requests: those that can be in time, then those that cannot."""
        options, limits, step, skips = self._options, self._limits, self.step, self._skips
        prompts = sorted(self._prompts, key=step.residual)
        late = [r for r in prompts if not step.can_be_in_time(r)]
        in_time = [r for r in prompts if r not in late]
        late_first: list[Request] = []
        turn = turn_of_late(
            self._table, self._real_time, options.late_min_share, limits.step_number
        )
        if turn.has_prompts:
            late_first, late = late, []
        newcomers = late_in_order(
            self._waiting, self._num_held, limits, late_first=turn.has_newcomer
        )
        num_free = LATE_POOL_SHARE * limits.num_slots - self._num_held
        newcomers = _most_in_time(newcomers, in_time, step, skips, num_free=num_free)
        newcomers = one_long_at_once(
            newcomers, in_time, long_tokens=options.long_prompt_tokens, step=step, skips=skips
        )
        newcomers = admissible(newcomers, self._admission, limits)
        num_rows = limits.num_free_rows + limits.num_yielding_rows - step.num_started
        newcomers = step.while_rows(newcomers, num_rows, RT)
        started = self._started()
        jobs = step.while_rows(
            admissible(
                (r for r in self._jobs if r not in started),
                self._admission,
                replace(limits, turn=Turn()) if self._jobs else limits,
            ),
            self._rows_left(),
            BE,
        )
        in_order = _by_residual(_by_residual(in_time, jobs, step), newcomers, step)
        for some in (late_first, in_order, late):
            if not step.add_chunks(some):
                skips.note_all(prompts, step.full_of)
                skips.stop(RT, step.full_of)
                self._is_left = True
                return
        self._is_left = _any_left(self._waiting, step.chosen, skips)

    def add_best_effort(self) -> None:
        """Fill the rest of the step, as far as it is lent, if nothing urgent is left."""
        if len(self._gave_way):
            self.step.add_while_in_time(self.step.by_residual(self._gave_way))
        if not self._is_left and not self.step.is_full:
            self.step.lend(self._num_held, self._limits)
            displaced = make_room(self.step, self._limits.average_step_s)
            self._add_best_effort()
            self.step.add_while_in_time(displaced)
            return
        reason = Reason.TOKENS if self.step.is_full else Reason.ORDER
        self._skips.note_rows(self._best_effort, reason)
        self._skips.stop(BE, reason)
        self.wants_more = self._options.be_min_share > 0 and (
            bool(len(self._best_effort)) or next(iter(self._waiting.of(BE)), None) is not None
        )

    def _add_best_effort(self) -> None:
        """Add those that run, then those that start, up to the limit that is set."""
        step, skips = self.step, self._skips
        before_s = step.seconds
        started = self._started()
        running = self._not_chosen(self._best_effort)
        num_kept = len(running) - max(0, step.num_started - self._limits.num_free_rows)
        skips.note_rows(running[num_kept:], Reason.ROWS)
        decodes, prompts = self._sort_out(running[:num_kept])
        is_all = step.add_while_in_time(decodes)
        others: Iterator[Request] = (r for r in self._waiting.of(BE) if r not in started)
        if self._options.best_first:
            others = BatchOrder(step, self._limits).best_first(others)
        newcomers = admissible(others, self._admission, self._limits)
        newcomers = step.while_rows(newcomers, self._rows_left(), BE)
        if _waits_for_memory(skips):
            skips.stop(BE, Reason.ORDER)
            newcomers = iter(())
        if not step.add_chunks(prompts) or not step.add_chunks(newcomers):
            skips.note_all(prompts, step.full_of)
            skips.stop(BE, step.full_of)
            is_all = False
        self.wants_more = not is_all
        self.best_effort_s += step.seconds - before_s

    def _sort_out(self, rows: Rows) -> tuple[Rows, list[Request]]:
        """Return the decodes and the prompts among rows; the rest have nothing to do."""
        decodes, prompts, blocked = self._running.sort_out(rows)
        self._skips.note_rows(blocked, Reason.BLOCKED)
        return decodes, prompts

    def _not_chosen(self, rows: Rows) -> Rows:
        """Return those rows that nothing was chosen of."""
        is_chosen = np.zeros(self._table.num_rows, dtype=np.bool_)
        for part in self.step.chosen:
            if isinstance(part, Decodes):
                is_chosen[part.rows] = True
            elif part.request.row is not None:
                is_chosen[part.request.row] = True
        not_chosen: Rows = rows[~is_chosen[rows]]
        return not_chosen

    def _started(self) -> set[Request]:
        """Return the requests that are chosen and do not run yet."""
        return _newcomers(self.step.chosen)

    def _rows_left(self) -> int:
        """Return how many best-effort requests may start."""
        new = self._started()
        num_rows = self._limits.num_free_rows - self.step.num_started
        return min(num_rows, self._num_be_rows - num_best_effort(new))


def _by_residual(
    in_time: Iterable[Request], newcomers: Iterator[Request], step: TimedStep
) -> Iterator[Request]:
    """Merge prompts in progress, by residual, with newcomers; late ones of these come last."""
    newcomer = next(newcomers, None)
    for request in in_time:
        while newcomer is not None and _goes_before(newcomer, request, step):
            yield newcomer
            newcomer = next(newcomers, None)
        yield request
    if newcomer is not None:
        yield newcomer
    yield from newcomers


def _goes_before(newcomer: Request, request: Request, step: TimedStep) -> bool:
    return step.residual(newcomer) < step.residual(request) and step.can_be_in_time(newcomer)


def _most_in_time(
    newcomers: Iterable[Request],
    in_progress: Iterable[Request],
    step: TimedStep,
    skips: Skips,
    *,
    num_free: float,
) -> Iterator[Request]:
    """Yield newcomers by deadline while all can be in time, otherwise the shortest first.

    By deadlines alone those who cannot be in time would be at the head of the queue in overload;
    and as one is worth as much as another, most are in time if those go first that take least,
    time as well as memory. Those that cannot be in time follow, before those that are late. Those
    that never ran and that nothing is due of are not looked at before it is their turn: they come
    by arrival, as otherwise shorter ones would pass a long one for ever.

    Args:
        newcomers: by deadline, those without any and those that are late at the end.
        in_progress: prompts that compute as well.
        step: what they would join.
        skips: is told of those that cannot be in time.
        num_free: slots that newcomers may come to hold.
    """
    waiting = iter(newcomers)
    weighed: list[Request] = []
    rest: Iterator[Request] = waiting
    for request in itertools.islice(waiting, MAX_WEIGHED):
        residual_s = step.residual(request)
        if residual_s <= 0 or (residual_s == math.inf and request.num_requeues == 0):
            rest = itertools.chain([request], waiting)
            break
        weighed.append(request)
    hopeless = [r for r in weighed if not step.can_be_in_time(r)]
    in_time = [r for r in weighed if r not in hopeless]
    if not _fit_all(in_time, in_progress, step, num_free):
        in_time.sort(key=lambda request: request.num_schedulable_tokens)
    skips.note_all(hopeless, Reason.TIME)
    yield from in_time
    for request in hopeless:
        skips.take_back(request, Reason.TIME)  # it has its turn now: what then fails is the reason
        yield request
    yield from rest


def _fit_all(
    newcomers: Sequence[Request], in_progress: Iterable[Request], step: TimedStep, num_free: float
) -> bool:
    """Return whether newcomers, one after the other, have memory and are all in time."""
    if sum(request.num_known_tokens for request in newcomers) > num_free:
        return False
    done_s = sum(step.seconds_to_end_beside_others(request) for request in in_progress)
    for request in newcomers:
        done_s += step.seconds_to_end_beside_others(request)
        if done_s > step.residual(request):
            return False
    return True


def _newcomers(chosen: Sequence[Share]) -> set[Request]:
    """Return the requests among parts that do not run yet."""
    parts = [part for part in chosen if not isinstance(part, Decodes)]
    return {part.request for part in parts if part.request.state is WAITING}


def _waits_for_memory(skips: Skips) -> bool:
    """Whether memory ended the search for real-time requests that may start."""
    return skips.stopped_by.get(RT) in MEMORY_REASONS


def _any_left(waiting: Waiting, chosen: Sequence[Share], skips: Skips) -> bool:
    """Return whether a real-time request is left out that could have started.

    One that waits for memory could not: what time there is best-effort requests that run may have.
    """
    if _waits_for_memory(skips):
        return False
    started = _newcomers(chosen)
    return any(
        request not in started
        and request.num_schedulable_tokens > 0
        and skips.reason_of(request) not in MEMORY_REASONS
        for request in waiting.of(RT)
    )
