"""Multi-level feedback queues over iterations (FastServe-like; baseline of AccelGen, A12 and A13).

Five queues. A request is in the queue whose limit of service it has not reached; service is
tokens, of prompt and output, and each queue's share of it twice the one's before:

    queue             0     1     2      3      4
    tokens        < 128  <384  <896  <1920   more

So a long prompt joins a lower queue at once (FastServe's skip-join: its first iteration would
use up the share of those above), and whoever generates is demoted step by step. A step is filled
from the top queue down, within a queue decodes first, then prompts in progress, then newcomers by
priority and arrival; who finds no budget left skips the step and keeps its KV. Class and memory
play no part: one that waits and may not start by memory ends the search for newcomers.

Against starvation a request that was overtaken too often joins the top queue.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence

from lightserve.router.admission.base import AdmissionRound
from lightserve.router.policies.base import StepLimits, Waiting
from lightserve.router.policies.budget import BudgetedStep
from lightserve.router.request import WAITING, Request
from lightserve.router.request_table import Running
from lightserve.router.shares import Reason, Share
from lightserve.types import BE, RequestClass

SERVICE_LIMITS = (128, 384, 896, 1920)
"""Tokens at which a request leaves a queue for the next one."""
MAX_OVERTAKEN = 64
"""Who was overtaken this often joins the top queue."""
MAX_CANDIDATES = 32
"""Waiting requests of each class that are looked at, from the head of its queue."""


class MlfqPolicy:
    """Those who have had least service first."""

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
        newcomers = [
            request
            for request_class in RequestClass
            for request in itertools.islice(waiting.of(request_class), MAX_CANDIDATES)
        ]
        newcomers.sort(key=lambda request: (request.priority, request.arrival_number))
        limits.skips.stop_all(Reason.ORDER)  # those behind MAX_CANDIDATES
        rows = _Rows(limits, limits.max_be_seqs - len(running.of(BE)), admission)
        ranked = iter(sorted([*running, *newcomers], key=_rank))
        for request in ranked:
            num_tokens = request.num_schedulable_tokens
            reason = Reason.BLOCKED if num_tokens == 0 else rows.refuse(request)
            if reason is not None:
                limits.skips.note(request, reason)
                continue
            step.add(request, num_tokens)
            if step.budget == 0:
                break
        limits.skips.note_all(ranked, Reason.TOKENS)
        return step.chosen


class _Rows:
    """Who may start: rows and memory that newcomers have not taken yet."""

    def __init__(self, limits: StepLimits, num_be_left: int, admission: AdmissionRound) -> None:
        self._num_left = limits.num_free_rows
        self._num_be_left = num_be_left
        self._admission = admission
        self._is_over = False

    def refuse(self, request: Request) -> Reason | None:
        """Return why a request may not take part, None if it may: then it counts from here on."""
        if request.state is not WAITING:
            return None
        is_best_effort = request.request_class is BE
        if self._is_over:
            return Reason.ORDER
        if self._num_left == 0 or (is_best_effort and self._num_be_left <= 0):
            return Reason.ROWS
        if not self._admission.admit(request):
            self._is_over = True
            return Reason.KV_FUTURE
        self._num_left -= 1
        self._num_be_left -= is_best_effort
        return None


def queue_of(request: Request) -> int:
    """Return the number of a request's queue, 0 … 4."""
    if request.num_overtaken >= MAX_OVERTAKEN:
        return 0
    return bisect_right(SERVICE_LIMITS, request.num_known_tokens)


def _rank(request: Request) -> tuple[int, int]:
    """Return a sort key; requests of equal rank stay in order."""
    is_waiting = request.state is WAITING
    return queue_of(request), 2 if is_waiting else request.num_schedulable_tokens > 1
