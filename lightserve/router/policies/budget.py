"""A step under a static token budget, which cuts the last prompt: what several policies share."""

from __future__ import annotations

import math
from collections.abc import Iterable

from lightserve.router.admission.base import AdmissionRound
from lightserve.router.policies.base import StepLimits, admissible
from lightserve.router.policies.step_loads import StepLoads, num_loaded_by
from lightserve.router.reasons import Reason
from lightserve.router.request import Request
from lightserve.router.request_table import Decodes, Rows, Running
from lightserve.router.shares import Allotment, Loading, Share, shape_of
from lightserve.types import RT, RequestClass


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
