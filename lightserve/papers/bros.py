"""Real-time tokens by the time left to them, best-effort ones packed beside them (BROS).

Algorithm 1 of the paper (section IV-B), each step:

    order       real-time requests, decodes and whole prompts alike, by what is left of their time
    limit       the least of these times; what will be late in any case does not count
    batch       at most BASE_BATCH requests, twice as many after each step in which real-time ones
                did not run into the limit, BASE_BATCH again once they do ("Adaptive Batch Sizing")
    pack        best-effort requests, those with the fewest tokens on the host first
    replace     where time or batch are full: the least urgent real-time decode leaves the step for
                a best-effort one, one by one, if it is still in time after one more step

The paper's k (tokens of a group that are still due) is 1: each token has a deadline of its own. Its
loop ends after one replacement, whether that worked or not; here it ends with the first that did
not. A prompt that never fits as a whole, which the paper does not have, is cut: it is longer than
the token budget, or than the targets of the decodes beside it allow with the guard. Memory: blocks
with two ends and lazy checkpoints (section V) are `kv.slots` and `kv.host`, and who loses memory
first is `router.victims`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from lightserve.router.policies.base import Step, heads_of_real_time, merged, one_by_one
from lightserve.router.request import Request
from lightserve.router.request_table import Rows
from lightserve.router.step_cost import StepShape
from lightserve.types import BE, RT

BASE_BATCH = 128
MAX_DOUBLINGS = 12
MAX_REPLACED = 16


class BrosPolicy:
    """BROS (algorithm 1), as the module describes it."""

    is_class_aware = True
    meets_deadlines = True

    def fill(self, step: Step) -> None:
        """Fill a step; `Policy.fill` says how."""
        size = BASE_BATCH << min(step.limits.num_steps_in_time, MAX_DOUBLINGS)
        waiting = heads_of_real_time(step.waiting)
        waiting.sort(key=lambda request: (request.priority, step.budget.due.of(request)))
        limit_s = _least_residual(step, waiting)
        step.budget.lend(limit_s / step.limits.cost.guard)
        _try_real_time(step, waiting, size)
        _try_best_effort(step, size)
        _replace_one_by_one(step, size)


def _least_residual(step: Step, waiting: Iterable[Request]) -> float:
    """Return the least time left to a real-time token that can be in time; inf: to none.

    A prompt alone, a decode beside all that are more urgent: were one to count that they make late,
    steps would stay small for it, and ever more tokens were late.
    """
    cost = step.limits.cost
    rows = step.running.of(RT)
    due = step.budget.due
    rows = due.in_order(rows[step.running.schedulable[rows] > 0])
    due_s = due.of_rows(rows, due.residuals.due).tolist()
    contexts = np.cumsum(step.running.table.next_position[rows]).tolist()
    in_time = (
        residual_s
        for number, (residual_s, context) in enumerate(zip(due_s, contexts, strict=True), 1)
        if cost.seconds(StepShape().plus_decodes(number, context)) <= residual_s
    )
    least_s = float(next(in_time, math.inf))
    for request in waiting:
        residual_s = step.budget.due.of(request)
        shape = StepShape().plus(*step.found(request)[:2])
        if cost.seconds(shape) <= residual_s < least_s:
            least_s = residual_s
    return least_s


def _try_real_time(step: Step, waiting: Sequence[Request], size: int) -> None:
    """Try decodes and whole prompts in one order, until the first for which there is no time."""
    budget = step.budget
    running = step.sort_out(step.running.of(RT))
    decodes = budget.due.in_order(running.decodes)
    due_s = budget.due.of_rows(decodes, budget.due.residuals.due)
    prompts = merged(
        sorted(running.prompts, key=budget.due.of),
        iter(waiting),
        lambda newcomer, request: budget.due.of(newcomer) < budget.due.of(request),
    )
    num_done = 0
    for request in prompts:
        num_before = int(np.searchsorted(due_s, budget.due.of(request), side="right"))
        if num_before > num_done:
            _decode(step, decodes[num_done:num_before], size)
            num_done = num_before
        if _is_through(step) or budget.shape.num_requests >= size:
            return
        one_by_one(step, [request], is_whole=_fits(step))
        if _is_through(step):
            return
    _decode(step, decodes[num_done:], size)
    _is_through(step)


def _decode(step: Step, rows: Rows, size: int) -> None:
    step.decode(rows[: max(0, size - step.budget.shape.num_requests)])


def _is_through(step: Step) -> bool:
    """Return whether time or tokens have ended, and note whether it was time."""
    step.hits_limit |= step.has_run_out and not step.budget.is_full
    return step.has_run_out


def _fits(step: Step) -> Callable[[Request], bool]:
    """Return whether a step has room for all of a request's prompt, so that it is never cut.

    With all real-time decodes, each of which has just had a token, and no other prompt.
    """
    cost, table, rows = step.limits.cost, step.running.table, step.running.of(RT)
    rows = rows[step.running.schedulable[rows] == 1]
    decodes = StepShape().plus_decodes(len(rows), int(table.next_position[rows].sum()))
    longest_s = np.minimum(table.tpot_s[rows], table.mtpot_s[rows]).min(initial=math.inf)
    most_s = float(longest_s) / cost.guard

    def fits(request: Request) -> bool:
        num_tokens = request.num_known_tokens
        is_in_budget = num_tokens <= step.limits.max_num_batched_tokens
        return is_in_budget and cost.seconds(decodes.plus(0, num_tokens)) <= most_s

    return fits


def _try_best_effort(step: Step, size: int) -> None:
    """Try those that run, which are in the pool, then those that wait by what they load."""
    running = step.sort_out(step.running.of(BE))
    _decode(step, running.decodes, size)
    if step.has_run_out or step.waits_for_memory(RT):
        return
    waiting = iter(step.waiting.of(BE))
    oldest = list(itertools.islice(waiting, 1)) if step.limits.turn.is_of_oldest else []
    others = [
        *running.prompts,
        *oldest,
        *sorted(waiting, key=lambda request: step.found(request).num_loaded),
    ]
    not_too_many = itertools.takewhile(
        lambda _request: step.budget.shape.num_requests < size, others
    )
    one_by_one(step, not_too_many, is_whole=_fits(step))


def _replace_one_by_one(step: Step, size: int) -> None:
    """Try decodes of best-effort requests in place of real-time ones that can wait."""
    budget = step.budget
    left_out = step.sort_out(step.running.of(BE)).decodes[:MAX_REPLACED]
    is_full = step.has_run_out or budget.shape.num_requests >= size
    if not len(left_out) or not is_full or budget.is_full:
        return
    can_wait = budget.decodes_due_after(budget.seconds + step.limits.average_step_s)
    can_wait = can_wait[step.running.table.is_rt[can_wait]]
    least_urgent = budget.due.in_order(can_wait)[::-1]
    for number in range(min(len(left_out), len(least_urgent))):
        rows, instead = left_out[number : number + 1], least_urgent[number : number + 1]
        step.give_way(instead)
        step.decode(rows)
        if len(step.sort_out(rows).decodes):
            step.decode(instead)
            return
