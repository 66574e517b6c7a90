"""Which best-effort request starts next (Echo, section 4.1; AccelGen, section 3).

The queue gives those that were paused, then the few newcomers that are worth asking; before all of
them the oldest where it is its turn (`Turn`). Among the next of either kind the best goes first:

    those that resume    what brings the least back: loads and recomputed tokens, in seconds
    newcomers            those of the account that has had least before others (`accounts`); of
                         one account by tokens gained, cached ones included, less those that leave
                         the cache for them and may have to be computed again, per second that they
                         add

Newcomers whose scores are alike are told apart by what is left of the step and of the pool: the
one whose demand for both, as shares of all there is, is nearest to it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from lightserve.router.accounts import Account
from lightserve.router.policies.base import Step
from lightserve.router.policies.step_budget import LOOK_AHEAD
from lightserve.router.request import Request
from lightserve.router.request_table import NO_ROWS, Rows
from lightserve.router.slo import PROMOTION_FACTOR, CompletionLedger, LineDeadline
from lightserve.router.step_cost import StepShape

# Best-effort jobs with a completion time (AccelGen's JCT).
#
# Such a job is as any other until its time left comes below PROMOTION_FACTOR times the work that it
# needs; from then on it goes with the real-time requests, as long as it can still end in time. It
# keeps its class otherwise: memory is admitted and taken as for best-effort requests.
#
# Its work: what is left of its prompt in large steps, and an average step for every token to come.

# A line of a batch has no time of its own but one that all of its batch have in common, after which
# what is left of the batch would not end in its window any more (`batches.forecast`). It is urgent
# from the same factor on, also once that time has passed: then it goes before other best-effort
# requests. From real-time ones it takes nothing that these would not have had.


class Promoted(NamedTuple):
    """Jobs that are urgent."""

    rows: Rows
    """Rows of urgent requests that run."""
    waiting: list[Request]
    due_s: dict[Request, float]
    """From the start of the step to when each should have its prompt behind it."""


def promote(step: Step, best_effort: Rows) -> Promoted:
    """Return the best-effort jobs that have to run now; `best_effort` are rows of that class."""
    limits = step.limits
    urgent_running: list[Request] = []
    promoted = Promoted(NO_ROWS, [], {})
    for requests, urgent in (
        (step.running.table.jobs(best_effort), urgent_running),
        (itertools.islice(step.waiting.queue.jobs(), LOOK_AHEAD), promoted.waiting),
    ):
        for request in requests:
            ledger, num_left = request.deadlines, step.found(request).num_left
            if not isinstance(ledger, CompletionLedger) or num_left == 0:
                continue
            decodes_s = _num_to_come(request, ledger) * limits.average_step_s
            work_left_s = _prompt_s(step, request) + decodes_s
            if not ledger.is_urgent(limits.start_s, work_left_s=work_left_s):
                continue
            urgent.append(request)
            if num_left > 1:
                promoted.due_s[request] = ledger.end_s - limits.start_s - decodes_s
    rows = [request.row for request in urgent_running]
    return promoted._replace(rows=np.array(rows, dtype=np.int64)) if rows else promoted


class UrgentLines(NamedTuple):
    """Lines of batches that are behind."""

    rows: Rows
    """Rows of urgent requests that run."""
    waiting: list[Request]


def urgent_lines(step: Step, best_effort: Rows) -> UrgentLines:
    """Return the lines that go before others; `best_effort` are rows of that class."""
    limits, running = step.limits, step.running
    table, start_s = running.table, limits.start_s
    rows = best_effort[table.line_due_s[best_effort] < math.inf]
    if len(rows):
        num_output = table.num_output[rows] + table.inflight_samples[rows]
        to_come = np.maximum(table.num_expected[rows] - num_output, 1.0 + num_output / 4)
        work_s = limits.average_step_s * np.minimum(to_come, table.max_tokens[rows] - num_output)
        for place in np.flatnonzero(running.schedulable[rows] > 1).tolist():
            (request,) = table.of(rows[place : place + 1])
            work_s[place] += _prompt_s(step, request)
        rows = rows[table.line_due_s[rows] - start_s < PROMOTION_FACTOR * work_s]
    urgent: list[Request] = []
    for request in itertools.islice(step.waiting.queue.lines(), LOOK_AHEAD):
        line = request.deadlines
        if not isinstance(line, LineDeadline) or step.found(request).num_left == 0:
            continue
        num_left = request.max_tokens - len(request.output_token_ids)
        work_left_s = limits.average_step_s * min(num_left, line.num_expected)
        work_left_s += _prompt_s(step, request)
        if line.shared.due_s - start_s < PROMOTION_FACTOR * work_left_s:
            urgent.append(request)
    return UrgentLines(rows, urgent)


def _prompt_s(step: Step, request: Request) -> float:
    """Return the time of what is left of a prompt, in large steps."""
    found = step.found(request)
    prompt_s = step.limits.cost.work(StepShape().plus(found.start, found.num_left))
    return prompt_s + step.limits.encoding.seconds_left(request, found.start)


def _num_to_come(request: Request, ledger: CompletionLedger) -> float:
    """Return the expected tokens to come; one that has outrun that is taken to be mostly done."""
    num_output = len(request.output_token_ids) + request.num_inflight_samples
    num_left = request.max_tokens - num_output
    return min(num_left, max(ledger.num_tokens_to_come, 1.0 + num_output / 4))


ALIKE = 0.05
"""Scores that differ by a smaller share are alike."""


class BatchOrder:
    """Compares best-effort requests that could start in a step."""

    def __init__(self, step: Step, *, spares_wanted: bool = False) -> None:
        """`spares_wanted`: of what leaves the cache, only what others wait for counts as lost."""
        self._budget = budget = step.budget
        self._found = step.found
        limits = step.limits
        self._max_tokens = limits.max_num_batched_tokens
        self._turn = limits.turn
        self._num_free_at_first = limits.pool.num_free
        if spares_wanted:
            self._num_free_at_first += limits.pool.num_cached - limits.pool.num_wanted
        self._num_slots = max(1, limits.pool.num_slots)
        self._scores: dict[Request, float] = {}
        self._distances: dict[Request, float] = {}
        self._num_left: dict[tuple[int, int], int] = {}
        """Tokens of a prompt that there is time for, by where it begins and what it loads."""
        self._num_tokens = budget.shape.num_new
        """By others the step was then filled: what was found holds as long."""

    def best_first(self, waiting: Iterable[Request]) -> Iterator[Request]:
        """Yield waiting requests, the best of the next few first.

        `waiting` come in the order of the queue: those that were paused, then by priority.
        """
        waiting = iter(waiting)
        if self._turn.is_of_oldest and (oldest := next(waiting, None)) is not None:
            yield oldest
        for _, group in itertools.groupby(waiting, key=_rank):
            window: list[Request] = []
            for request in group:
                window.append(request)
                if len(window) == LOOK_AHEAD:
                    yield window.pop(self._index_of_best(window))
            while window:
                yield window.pop(self._index_of_best(window))

    def score(self, request: Request) -> float:
        """Return the tokens that a newcomer's chunk gains per second."""
        start, rest = self._found(request)[:2]
        num_new = max(1, self._budget.num_tokens_in_time(request, rest))
        added_s = self._budget.seconds_added(request, num_new)
        num_lost = max(0, num_new - self._num_free)
        num_gained = start + num_new - num_lost
        return num_gained / added_s if added_s > 0 else math.inf

    @property
    def _num_free(self) -> int:
        """Slots that hold nothing, and that no request of the step takes."""
        return max(0, self._num_free_at_first - self._budget.shape.num_new)

    def _index_of_best(self, requests: list[Request]) -> int:
        if len(requests) == 1:
            return 0
        if requests[0].num_requeues:
            found = map(self._found, requests)
            loads = [
                self._budget.seconds_added(request, each.num_left)
                for request, each in zip(requests, found, strict=True)
            ]
            return loads.index(min(loads))
        scores = [self._score_now(request) for request in requests]
        alike = (1.0 - ALIKE) * max(scores)
        best = [index for index, of_one in enumerate(scores) if of_one >= alike]
        if len(best) == 1:
            return best[0]
        return min(best, key=lambda index: self._distance_now(requests[index]))

    def _score_now(self, request: Request) -> float:
        """Return the score, from memory while nothing has joined the step since."""
        if self._num_tokens != self._budget.shape.num_new:
            self._num_tokens = self._budget.shape.num_new
            self._scores.clear()
            self._distances.clear()
            self._num_left.clear()
        if request not in self._scores:
            self._scores[request] = self.score(request)
        return self._scores[request]

    def _distance_now(self, request: Request) -> float:
        """Return the distance; its score has been asked for."""
        if request not in self._distances:
            self._distances[request] = self._distance(request)
        return self._distances[request]

    def _distance(self, request: Request) -> float:
        """Return how far a demand for compute and KV is from what is left of both, as shares."""
        start, num_rest, num_loaded, *_ = self._found(request)
        place = start, num_loaded
        if (num_left := self._num_left.get(place)) is None:
            num_left = self._budget.num_tokens_in_time(request, self._max_tokens)
            self._num_left[place] = num_left
        compute = (num_rest - num_left) / self._max_tokens
        return math.hypot(compute, (num_rest - self._num_free) / self._num_slots)


def _rank(request: Request) -> tuple[bool, int, Account | None]:
    """Return what goes before any score: groups that follow one another."""
    if request.num_requeues > 0:
        return False, 0, None
    return True, request.priority, request.account
