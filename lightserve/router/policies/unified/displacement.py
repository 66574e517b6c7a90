"""Real-time decodes that can wait for a step give way (mechanisms B3, B7, C4).

    rescue      to a real-time token that would be late beside them, and is in time without
    make_room   to best-effort prompts, if these gain more tokens in their time

A decode can wait if it is still in time after this step and one more like the recent ones, for
best-effort prompts two. Whoever gave way comes back if the step has time left for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from lightserve.router.policies.unified.timed_step import TimedStep
from lightserve.router.request import Request
from lightserve.router.request_table import NO_ROWS, Rows


def rescue(step: TimedStep, prompts: Iterable[Request], average_step_s: float) -> Rows:
    """Leave decodes out for the most urgent request that they make late; return them.

    Args:
        step: with the decodes, its limit known.
        prompts: of real-time requests, that may join.
        average_step_s: execution time of recent steps; 0: there were none.
    """
    if average_step_s <= 0:
        return NO_ROWS
    in_danger = [*step.in_danger, *(r for r in prompts if not step.can_be_in_time(r))]
    for request in sorted((r for r in in_danger if step.residual(r) > 0), key=step.residual):
        others = step.decodes_due_after(step.residual(request) + average_step_s)
        if len(others) and step.would_be_in_time(request, without=others):
            step.leave_out(others)
            return others
    return NO_ROWS


def make_room(step: TimedStep, average_step_s: float) -> Rows:
    """Leave decodes out for best-effort prompts; return them.

    Only where deadlines are what limits the step: time that is not lent is no gain.
    """
    limit_s = step.deadline_limit_s
    if average_step_s <= 0 or limit_s == math.inf:
        return NO_ROWS
    ample = step.decodes_due_after(limit_s + 2 * average_step_s, lent=True)
    if not len(ample) or step.gained_by_prompt(without=ample) <= len(ample):
        return NO_ROWS
    step.leave_out(ample)
    return ample
