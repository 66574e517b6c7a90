"""A step under a static token budget, which cuts the last prompt: what several policies share."""

from __future__ import annotations

from collections.abc import Iterable

from lightserve.router.admission.base import AdmissionRound
from lightserve.router.policies.base import Allotment, StepLimits, admissible
from lightserve.router.reasons import Reason
from lightserve.router.request import Request
from lightserve.types import RequestClass


class BudgetedStep:
    """Shares chosen so far, and the budget that is left; whom it leaves out is noted."""

    def __init__(self, limits: StepLimits) -> None:
        self.budget = limits.max_num_batched_tokens
        self.chosen: list[Allotment] = []
        self._skips = limits.skips

    def add(self, request: Request, num_tokens: int) -> None:
        """Add the next `num_tokens` tokens of a request, or as many as the budget allows."""
        if self.budget == 0:
            self._skips.note(request, Reason.TOKENS)
            return
        num_tokens = min(num_tokens, self.budget)
        self.chosen.append(Allotment(request, num_tokens))
        self.budget -= num_tokens

    def advance(self, running: Iterable[Request]) -> None:
        """Add requests that run: decodes, then prompts in progress, either in the given order."""
        prompts: list[Allotment] = []
        for request in running:
            num_tokens = request.num_schedulable_tokens
            if num_tokens > 1:
                prompts.append(Allotment(request, num_tokens))
            elif num_tokens == 1:
                self.add(request, 1)
            else:
                self._skips.note(request, Reason.BLOCKED)
        for request, num_tokens in prompts:
            self.add(request, num_tokens)

    def start(
        self,
        waiting: Iterable[Request],
        admission: AdmissionRound,
        num_rows: int,
        classes: Iterable[RequestClass] = RequestClass,
    ) -> int:
        """Add waiting requests that may start while budget and rows last; returns how many.

        `classes` are those that may be among them: none of theirs is looked for elsewhere.
        """
        num_started = 0
        newcomers = admissible(waiting, admission, self._skips)
        while self.budget > 0 and num_started < num_rows and (request := next(newcomers, None)):
            self.add(request, request.num_schedulable_tokens)
            num_started += 1
        if self.budget == 0:
            self._skips.stop_all(Reason.TOKENS, classes)
        elif num_started >= num_rows:
            self._skips.stop_all(Reason.ROWS, classes)
        else:  # it ended before its end with somebody who may not be passed
            self._skips.stop_all(Reason.ORDER, classes)
        return num_started
