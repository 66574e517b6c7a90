"""A step under a static token budget, which cuts the last prompt: what several policies share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from lightserve.router.admission.base import AdmissionRound
from lightserve.router.policies.base import StepLimits, Waiting, admissible, within_be_limit
from lightserve.router.policies.step_loads import StepLoads, num_loaded_by
from lightserve.router.request import Request
from lightserve.router.request_table import Decodes, Rows, Running
from lightserve.router.shares import Allotment, Loading, Reason, Share, shape_of
from lightserve.types import BE, RT, RequestClass

# First come, first served with whole prompts, prefill before decode (early vLLM, ORCA-like).
#
# The baseline of BROS (B17) and AccelGen (A13): while a waiting prompt can start, a step is made
# of whole prompts; otherwise all running requests decode. A prompt longer than the budget runs
# alone.


class FcfsPolicy:
    """Whole prompts first, else decodes; never both in one step."""

    is_class_aware = False
    meets_deadlines = False

    def select(
        self,
        running: Running,
        waiting: Waiting,
        limits: StepLimits,
        admission: AdmissionRound,
    ) -> Sequence[Share]:
        """See `Policy.select`."""
        if prompts := _prompts(running, waiting, limits, admission):
            limits.skips.note_rows(running.rows, Reason.ORDER)
            return prompts
        decodes, started, blocked = running.sort_out(running.rows)
        limits.skips.note_rows(blocked, Reason.BLOCKED)
        chosen: list[Share] = [Decodes(running.table, decodes)] if len(decodes) else []
        return [*chosen, *(Allotment(r, r.num_schedulable_tokens) for r in started)]


def _prompts(
    running: Running, waiting: Waiting, limits: StepLimits, admission: AdmissionRound
) -> list[Allotment]:
    chosen: list[Allotment] = []
    candidates = within_be_limit(waiting, running, limits, chosen)
    for request in admissible(_within(candidates, limits, chosen), admission, limits):
        chosen.append(Allotment(request, request.num_schedulable_tokens))
    limits.skips.stop_all(Reason.ORDER)  # if nothing else: it ended with one that may not be passed
    return chosen


def _within(
    waiting: Iterable[Request], limits: StepLimits, chosen: Sequence[Allotment]
) -> Iterator[Request]:
    """Yield waiting requests until rows or budget end; the first may exceed the budget."""
    for request in waiting:
        num_chosen = sum(part.num_tokens for part in chosen)
        num_tokens = num_chosen + request.num_schedulable_tokens
        is_full = len(chosen) == limits.num_free_rows
        if is_full or (chosen and num_tokens > limits.max_num_batched_tokens):
            reason = Reason.ROWS if is_full else Reason.TOKENS
            limits.skips.note_all([request], reason)
            limits.skips.stop_all(reason)
            return
        yield request


class BudgetedStep:
    """Shares chosen so far, and the budget that is left; whom it leaves out is noted."""

    def __init__(self, limits: StepLimits) -> None:
        self.budget = limits.max_num_batched_tokens
        self.chosen: list[Share] = []
        self._limits = limits
        self._skips = limits.skips
        self._cost = limits.cost
        self._loads = StepLoads(limits)

    def add(self, request: Request, num_tokens: int) -> None:
        """Add the next `num_tokens` tokens of a request, or as many as the budget allows."""
        if self.budget == 0:
            self._skips.note(request, Reason.TOKENS)
            return
        num_tokens = min(num_tokens, self.budget)
        self._loads.wait_for(request)
        self.chosen.append(Allotment(request, num_tokens))
        self.budget -= num_tokens

    def advance(self, running: Running, rows: Rows | None = None) -> None:
        """Add requests that run: decodes, then prompts in progress, either in order.

        `rows` are those of them that may be added; None: all.
        """
        decodes, prompts, blocked = running.sort_out(running.rows if rows is None else rows)
        self._skips.note_rows(blocked, Reason.BLOCKED)
        self._skips.note_rows(decodes[self.budget :], Reason.TOKENS)
        decodes = decodes[: self.budget]
        if len(decodes):
            self.chosen.append(Decodes(running.table, decodes))
            self.budget -= len(decodes)
        for request in prompts:
            self.add(request, request.num_schedulable_tokens)

    def start(
        self,
        waiting: Iterable[Request],
        admission: AdmissionRound,
        num_rows: int,
        classes: Iterable[RequestClass] = RequestClass,
    ) -> int:
        """Add waiting requests that may start while budget and rows last; returns how many.

        Best-effort ones that resume load beside the step first, where that is free; they count.
        `classes` are those that may be among them: none of theirs is looked for elsewhere.
        """
        num_started = 0
        newcomers = admissible(waiting, admission, self._limits)
        while self.budget > 0 and num_started < num_rows and (request := next(newcomers, None)):
            if not self._loads_beside(request):
                self.add(request, request.num_schedulable_tokens)
                num_started += 1
            elif self._load_beside(request):
                num_started += 1
            elif not self._loads.may_pass_more:
                break
        if self.budget == 0:
            self._skips.stop_all(Reason.TOKENS, classes)
        elif num_started >= num_rows:
            self._skips.stop_all(Reason.ROWS, classes)
        else:  # it ended before its end with somebody who may not be passed
            self._skips.stop_all(Reason.ORDER, classes)
        return num_started

    def _loads_beside(self, request: Request) -> bool:
        if num_loaded_by(request) == 0 or request.request_class is RT:
            return False
        step_s = self._seconds()
        can_go_beside = self._loads.can_go_beside(request, step_s)
        return can_go_beside and self._loads.is_free_for(request, step_s, math.inf)

    def _load_beside(self, request: Request) -> bool:
        """Let a request load beside the step; whether there is time for any of it."""
        self._skips.note(request, Reason.LOADING)
        num_tokens = self._loads.add_beside(request, self._seconds(), math.inf)
        if num_tokens:
            self.chosen.append(Loading(request, num_tokens))
        return num_tokens > 0

    def _seconds(self) -> float:
        """Return what the step takes as predicted so far; 0: nothing is known, or in it."""
        if self._cost is None:
            return 0.0
        return self._cost.seconds(shape_of([p for p in self.chosen if not isinstance(p, Loading)]))


# Chunked prefill under a static token budget (Sarathi-Serve; baseline of AccelGen, A13).
#
# Every decode advances in every step; what is left of the budget goes to prompts in order of
# arrival, the last of them cut where the budget ends.


class ChunkedPolicy:
    """Decodes first, then chunks of prompts up to `max_num_batched_tokens`."""

    is_class_aware = False
    meets_deadlines = False

    def select(
        self,
        running: Running,
        waiting: Waiting,
        limits: StepLimits,
        admission: AdmissionRound,
    ) -> Sequence[Share]:
        """See `Policy.select`."""
        step = BudgetedStep(limits)
        step.advance(running)
        newcomers = within_be_limit(waiting, running, limits, step.chosen)
        step.start(newcomers, admission, limits.num_free_rows)
        return step.chosen


# Two FCFS queues, real-time and best-effort, served in turn (BROS, section II-B: "RR"; B17).
#
# Every second step belongs to one class: its decodes, then chunks of its prompts in order of
# arrival, under a static token budget. A class that has nothing to do leaves its turn to the other.
# Memory is the same for both: nobody gives any up for a newcomer.


class RoundRobinPolicy:
    """Real-time requests in even steps, best-effort ones in odd steps."""

    is_class_aware = False
    meets_deadlines = False

    def select(
        self,
        running: Running,
        waiting: Waiting,
        limits: StepLimits,
        admission: AdmissionRound,
    ) -> Sequence[Share]:
        """See `Policy.select`."""
        turns = (RT, BE)
        tried: list[RequestClass] = []
        for request_class in turns if limits.step_number % 2 == 0 else turns[::-1]:
            step = BudgetedStep(limits)
            step.advance(running, running.of(request_class))
            num_rows = limits.num_free_rows
            if request_class is BE:
                num_rows = min(num_rows, limits.max_be_seqs - len(running.of(BE)))
            step.start(waiting.of(request_class), admission, num_rows, [request_class])
            tried.append(request_class)
            if step.chosen:
                for other in set(turns) - set(tried):
                    limits.skips.note_rows(running.of(other), Reason.ORDER)
                limits.skips.stop_all(Reason.ORDER)
                return step.chosen
        return []


# Real-time before best-effort, under a static token budget.
#
# The order of a step: real-time decodes, real-time prompts in progress, real-time newcomers;
# then best-effort decodes, prompts in progress, those that resume, newcomers. Prompts are cut where
# the budget ends, as in `chunked`.
#
# While a real-time prompt waits, no best-effort request runs: none is in a step in which some
# real-time request could have started, but does not (for want of budget, rows or memory). One that
# starts in this very step does not wait, and neither does one whose frontend has to catch up.
#
# The strict two-class scheduler that the papers compare with (Echo's BS, E13), and the *tuned
# baseline* of every target about both classes.


class PriorityPolicy:
    """Best-effort requests get what real-time ones leave of a step."""

    is_class_aware = True
    meets_deadlines = False

    def select(
        self,
        running: Running,
        waiting: Waiting,
        limits: StepLimits,
        admission: AdmissionRound,
    ) -> Sequence[Share]:
        """See `Policy.select`."""
        best_effort = running.of(BE)
        step = BudgetedStep(limits)
        step.advance(running, running.of(RT))
        num_rows = limits.num_free_rows + limits.num_yielding_rows
        num_started = step.start(self.newcomers(waiting), admission, num_rows, [RT])
        if step.budget == 0 or _keeps_waiting(waiting, step.chosen):
            reason = Reason.TOKENS if step.budget == 0 else Reason.ORDER
            limits.skips.note_rows(best_effort, reason)
            limits.skips.stop(BE, reason)
            return step.chosen
        # Rows that are not free come from the best-effort requests that were admitted last.
        num_yielded = max(0, num_started - limits.num_free_rows)
        num_kept = len(best_effort) - num_yielded
        step.advance(running, best_effort[:num_kept])
        limits.skips.note_rows(best_effort[num_kept:], Reason.ROWS)
        num_rows = min(limits.num_free_rows - num_started, limits.max_be_seqs - len(best_effort))
        step.start(waiting.of(BE), admission, num_rows, [BE])
        return step.chosen

    def newcomers(self, waiting: Waiting) -> Iterable[Request]:
        """Return real-time requests that wait, in the order in which they start."""
        return waiting.of(RT)


def _keeps_waiting(waiting: Waiting, chosen: Sequence[Share]) -> bool:
    """Return whether a real-time request that could start is not among the chosen."""
    started = {part.request for part in chosen if not isinstance(part, Decodes)}
    return any(
        request not in started and request.num_schedulable_tokens > 0 for request in waiting.of(RT)
    )


# Shortest prompt first: `priority`, whose real-time newcomers start in the order of their lengths.
#
# What is short waits least and counts as much as what is long, so that past capacity no order that
# knows deadlines alone meets more of them; long prompts then wait for as long as shorter ones come.
# A baseline for overload.


class SjfPolicy(PriorityPolicy):
    """See the module."""

    def newcomers(self, waiting: Waiting) -> Iterable[Request]:
        """Return real-time requests that wait, those with least to compute first."""
        return sorted(waiting.of(RT), key=lambda request: request.num_schedulable_tokens)
