"""Best-effort jobs with a completion time (AccelGen's JCT; mechanisms A7, C13).

Such a job is as any other until its time left comes below PROMOTION_FACTOR times the work that it
needs; from then on it goes with the real-time requests, as long as it can still end in time. It
keeps its class otherwise: memory is admitted and taken as for best-effort requests.

Its work: what is left of its prompt in large steps, and an average step for every token to come.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from lightserve.router.policies.base import StepLimits, Waiting
from lightserve.router.request import Request
from lightserve.router.request_table import NO_ROWS, Rows, Running
from lightserve.router.slo import CompletionLedger
from lightserve.router.step_cost import StepShape

MAX_JOBS = 8
"""Of the jobs that wait, so many are looked at: those that are to end first."""


class Promoted(NamedTuple):
    """Jobs that are urgent."""

    rows: Rows
    """Those that run."""
    waiting: list[Request]
    due_s: dict[Request, float]
    """From the start of the step to when each should have its prompt behind it."""


def promote(running: Running, best_effort: Rows, waiting: Waiting, limits: StepLimits) -> Promoted:
    """Return the best-effort jobs that have to run now; `best_effort` are rows of that class."""
    assert limits.cost is not None
    urgent_running: list[Request] = []
    promoted = Promoted(NO_ROWS, [], {})
    for requests, urgent in (
        (running.table.jobs(best_effort), urgent_running),
        (itertools.islice(waiting.jobs(), MAX_JOBS), promoted.waiting),
    ):
        for request in requests:
            ledger = request.deadlines
            if not isinstance(ledger, CompletionLedger) or request.num_schedulable_tokens == 0:
                continue
            prompt = StepShape().plus(request.next_position, request.num_schedulable_tokens)
            decodes_s = _num_to_come(request, ledger) * limits.average_step_s
            work_left_s = limits.cost.work(prompt) + decodes_s
            if not ledger.is_urgent(limits.start_s, work_left_s=work_left_s):
                continue
            urgent.append(request)
            if request.num_schedulable_tokens > 1:
                promoted.due_s[request] = ledger.end_s - limits.start_s - decodes_s
    rows = [request.row for request in urgent_running]
    return promoted._replace(rows=np.array(rows, dtype=np.int64)) if rows else promoted


def _num_to_come(request: Request, ledger: CompletionLedger) -> float:
    """Return the expected tokens to come; whoever has outrun that is believed to be mostly done."""
    num_output = len(request.output_token_ids) + request.num_inflight_samples
    num_left = request.max_tokens - num_output
    return min(num_left, max(ledger.num_tokens_to_come, 1.0 + num_output / 4))
