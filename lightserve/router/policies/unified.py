"""Real-time tokens by their deadlines, best-effort ones in all the time that is left.

One time limit per step (mechanisms C3, E2): the smallest residual among tokens that this step
completes and that can still be in time; token budgets are the inverse of the cost model at that
limit (A2, A4), so that prompts fill it exactly. Slack that early tokens bought (architecture 7)
is what long chunks and best-effort work live on.

    1. real-time decodes, all of them: they make the limit
    2. real-time prompts that can still be in time, by residual, one cut where the limit ends
    3. real-time prompts that are late anyway; in every tenth step they go before those of 2
    4. best-effort decodes, prompts in progress, those that resume, newcomers

In overload this order keeps goodput: sorted by deadline alone, everybody would be a little late.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Collection, Iterable, Sequence

from lightserve.router.admission.base import AdmissionRound
from lightserve.router.policies.base import Allotment, StepLimits, Waiting, admissible
from lightserve.router.policies.lending import IDLE_LIMIT_S, lent_until_s
from lightserve.router.request import Request, RequestState
from lightserve.router.step_cost import StepCost, StepShape
from lightserve.types import RequestClass

LATE_EVERY = 10
"""Of so many steps, late prompts head one: they get a share of the time at the least."""
MIN_CHUNK = 16
"""Fewer tokens of a prompt are not worth a row, unless they end it."""


class UnifiedPolicy:
    """See the module's docstring."""

    is_class_aware = True
    meets_deadlines = True

    def select(
        self,
        running: Collection[Request],
        waiting: Waiting,
        limits: StepLimits,
        admission: AdmissionRound,
    ) -> list[Allotment]:
        """See `Policy.select`."""
        assert limits.cost is not None, "the planner gives it"
        step = _TimedStep(limits, limits.cost)
        real_time = [r for r in running if r.request_class is RequestClass.RT]
        best_effort = [r for r in running if r.request_class is RequestClass.BE]
        decodes, prompts = _sort_out(real_time)
        step.add_decodes(decodes)
        step.limit_by_deadlines()
        num_started = self._prompts(step, prompts, waiting, limits, admission)
        if step.is_full or step.left_waiting:
            return step.chosen
        step.lend(real_time, limits)
        num_yielded = max(0, num_started - limits.num_free_rows)
        best_effort = best_effort[: len(best_effort) - num_yielded]
        decodes, prompts = _sort_out(best_effort)
        step.add_while_in_time(decodes)
        for request in prompts:
            if not step.add_chunk(request):
                return step.chosen
        num_rows = min(limits.num_free_rows - num_started, limits.max_be_seqs - len(best_effort))
        step.start(admissible(waiting.of(RequestClass.BE), admission, limits.skips), num_rows)
        return step.chosen

    def _prompts(
        self,
        step: _TimedStep,
        prompts: Sequence[Request],
        waiting: Waiting,
        limits: StepLimits,
        admission: AdmissionRound,
    ) -> int:
        """Add real-time prompts; returns how many of them are newcomers."""
        prompts = sorted(prompts, key=step.residual)
        late = [r for r in prompts if not step.can_be_in_time(r)]
        if limits.step_number % LATE_EVERY:
            prompts = [r for r in prompts if r not in late]
            late_first: list[Request] = []
        else:
            late_first, late = late, []
        for request in [*late_first, *prompts]:
            if not step.add_chunk(request):
                step.left_waiting = True
                return 0
        num_rows = limits.num_free_rows + limits.num_yielding_rows
        newcomers = admissible(waiting.of(RequestClass.RT), admission, limits.skips)
        num_started = step.start(newcomers, num_rows)
        for request in late:
            if not step.add_chunk(request):
                step.left_waiting = True
                break
        if not step.left_waiting:
            step.left_waiting = _any_left(waiting, step.chosen)
        return num_started


class _TimedStep:
    """Shares chosen so far, their shape, and the time that is left for more."""

    def __init__(self, limits: StepLimits, cost: StepCost) -> None:
        self.chosen: list[Allotment] = []
        self.left_waiting = False
        """Whether a real-time prompt was left out, or cut."""
        self._budget = limits.max_num_batched_tokens
        self._start_s = limits.start_s
        self._cost = cost
        self._copy_seconds = limits.copy_seconds
        self._num_loaded = 0
        """Tokens that come back from the host for those who resume."""
        self._shape = StepShape()
        self._limit_s = math.inf
        """By deadlines: of the whole step, with the guard."""
        self._lent_until_s = math.inf
        """As predicted, and without the copies of those who resume: they must not wait for a
        step that has time for all of them."""

    @property
    def is_full(self) -> bool:
        """Whether the token budget is used up."""
        return self._budget <= 0

    def residual(self, request: Request) -> float:
        """Return the time from the start of the step to a request's deadline."""
        deadlines = request.deadlines
        return math.inf if deadlines is None else deadlines.residual(self._start_s)

    def _seconds(self, shape: StepShape) -> float:
        copied_s = self._copy_seconds(self._num_loaded)
        return (self._cost.seconds(shape) + copied_s) * self._cost.guard

    def can_be_in_time(self, request: Request) -> bool:
        """Whether a prompt, computed from here on without a pause, meets its deadline."""
        rest = request.num_schedulable_tokens
        return self._seconds(self._shape.plus(request.next_position, rest)) <= self.residual(
            request
        )

    def add_decodes(self, requests: Sequence[Request]) -> None:
        """Add decodes as far as the token budget goes, the most urgent first."""
        if len(requests) > self._budget:
            requests = sorted(requests, key=self.residual)[: self._budget]
        self._add_decodes(requests, sum([r.next_position for r in requests]))

    def limit_by_deadlines(self) -> None:
        """Limit the step by the deadlines of the decodes in it that can still be met."""
        base_s = self._seconds(self._shape)
        residuals = (self.residual(request) for request, _ in self.chosen)
        self._limit_s = min((r for r in residuals if r >= base_s), default=math.inf)

    def lend(self, real_time: Sequence[Request], limits: StepLimits) -> None:
        """Let best-effort requests have what is left, as far as it is lent to them."""
        held_share = sum(request.num_held_tokens for request in real_time) / limits.num_slots
        base_s = self._cost.seconds(self._shape)
        self._lent_until_s = lent_until_s(base_s, held_share, limits.outlook, limits.num_slots)

    def add_while_in_time(self, decodes: Sequence[Request]) -> None:
        """Add decodes while budget and time last."""
        if self._budget <= 0 or not decodes:
            return
        decodes = decodes[: self._budget]
        contexts = list(itertools.accumulate([request.next_position for request in decodes]))
        count = len(decodes)
        if not self._has_time_for(count, contexts[-1]):
            # Time only grows with each: as many as one by one would find it.
            count = bisect.bisect_left(
                range(1, count),
                True,
                key=lambda number: not self._has_time_for(number, contexts[number - 1]),
            )
            count = max(count, int(not self.chosen))  # an empty step takes one
        if count > 0:
            self._add_decodes(decodes[:count], contexts[count - 1])

    def _has_time_for(self, num_decodes: int, context: int) -> bool:
        """Whether the step keeps its limits with so many more decodes, contexts summed."""
        shape = self._shape.plus_decodes(num_decodes, context)
        is_lent = self._cost.seconds(shape) <= self._lent_until_s
        return is_lent and self._seconds(shape) <= self._limit_s

    def _limit_for(self, request: Request) -> float:
        """Return how long the step may compute if a prompt, perhaps one that resumes, joins."""
        num_loaded = _num_loaded_by(request)
        copied_s = self._copy_seconds(self._num_loaded + num_loaded)
        limit_s = self._limit_s / self._cost.guard
        if num_loaded > 0 and self._num_loaded > 0:
            # A single one may bring more than there is time for otherwise, not several.
            limit_s = min(limit_s, IDLE_LIMIT_S)
        return min(limit_s - copied_s, self._lent_until_s)

    def add_chunk(self, request: Request) -> bool:
        """Add as much of a prompt as there is time and budget for; whether that is its rest.

        An empty step takes something, however little time there is.
        """
        rest = request.num_schedulable_tokens
        most = min(rest, self._budget)
        limit_s = self._limit_for(request)
        if most > 0 and math.isfinite(limit_s) and self._cost.is_known:
            start = request.next_position
            in_time = self._cost.tokens_within(self._shape, limit_s, start, most)
            most = in_time if self.chosen else max(in_time, min(most, MIN_CHUNK))
        if most <= 0 or (most < min(rest, MIN_CHUNK) and self.chosen):
            return False
        if most == rest and request.request_class is RequestClass.RT:
            # It yields a token in this step, whose deadline counts if it can be met.
            residual_s = self.residual(request)
            if residual_s >= self._seconds(self._shape.plus(request.next_position, rest)):
                self._limit_s = min(self._limit_s, residual_s)
        self._add(request, most)
        return most == rest

    def start(self, newcomers: Iterable[Request], num_rows: int) -> int:
        """Add newcomers while time, budget and rows last; returns how many."""
        num_started = 0
        if num_rows <= 0 or self._budget <= 0:
            return 0
        for request in newcomers:
            num_before = len(self.chosen)
            is_whole = self.add_chunk(request)
            num_started += len(self.chosen) - num_before
            if not is_whole or num_started >= num_rows or self._budget <= 0:
                break
        return num_started

    def _add_decodes(self, requests: Sequence[Request], context: int) -> None:
        """Add decodes, contexts summed."""
        self.chosen += [Allotment(request, 1) for request in requests]
        self._shape = self._shape.plus_decodes(len(requests), context)
        self._budget -= len(requests)

    def _add(self, request: Request, num_tokens: int) -> None:
        self.chosen.append(Allotment(request, num_tokens))
        self._num_loaded += _num_loaded_by(request)
        self._shape = self._shape.plus(request.next_position, num_tokens)
        self._budget -= num_tokens


def _sort_out(running: Iterable[Request]) -> tuple[list[Request], list[Request]]:
    """Return the decodes and the prompts among requests, those left out that have nothing to do."""
    decodes: list[Request] = []
    prompts: list[Request] = []
    for request in running:
        num_tokens = request.num_schedulable_tokens
        if num_tokens == 1:
            decodes.append(request)
        elif num_tokens > 1:
            prompts.append(request)
    return decodes, prompts


def _num_loaded_by(request: Request) -> int:
    return request.num_loaded_by_start if request.state is RequestState.WAITING else 0


def _any_left(waiting: Waiting, chosen: Sequence[Allotment]) -> bool:
    """Return whether a real-time request that could start is not among the chosen."""
    started = {request for request, _ in chosen}
    return any(
        request not in started and request.num_schedulable_tokens > 0
        for request in waiting.of(RequestClass.RT)
    )
