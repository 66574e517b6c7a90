"""A step under a static token budget, which cuts the last prompt: what several policies share."""

from __future__ import annotations

from collections.abc import Iterable

from lightserve.router.admission.base import AdmissionRound
from lightserve.router.policies.base import Allotment, admissible
from lightserve.router.request import Request


class BudgetedStep:
    """Shares chosen so far, and the budget that is left."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.chosen: list[Allotment] = []

    def add(self, request: Request, num_tokens: int) -> None:
        """Add the next `num_tokens` tokens of a request, or as many as the budget allows."""
        if self.budget > 0:
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
        for request, num_tokens in prompts:
            self.add(request, num_tokens)

    def start(self, waiting: Iterable[Request], admission: AdmissionRound, num_rows: int) -> int:
        """Add waiting requests that may start while budget and rows last; returns how many."""
        num_started = 0
        newcomers = admissible(waiting, admission)
        while self.budget > 0 and num_started < num_rows and (request := next(newcomers, None)):
            self.add(request, request.num_schedulable_tokens)
            num_started += 1
        return num_started
