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
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from lightserve.router.policies.base import Phase, heads_of_real_time, merged, one_by_one
from lightserve.router.policies.step_budget import StepBudget
from lightserve.router.policies.step_loads import num_loaded_by
from lightserve.router.request import Request
from lightserve.router.request_table import Rows
from lightserve.router.step_cost import StepShape
from lightserve.types import BE, RT

BASE_BATCH = 128
MAX_DOUBLINGS = 12
MAX_REPLACED = 16


class BrosPolicy:
    """See the module."""

    is_class_aware = True
    meets_deadlines = True

    def phases(self, step: StepBudget) -> Iterator[Phase]:
        """See `Policy.phases`."""
        size = BASE_BATCH << min(step.limits.num_steps_in_time, MAX_DOUBLINGS)
        waiting = heads_of_real_time(step.waiting)
        waiting.sort(key=lambda request: (request.priority, step.residual(request)))
        limit_s = _least_residual(step, waiting)
        step.lend(limit_s / step.limits.cost.guard)
        for phase in _real_time(step, waiting, size):
            yield phase
            step.hits_limit |= step.has_run_out and not step.is_full
        yield from _best_effort(step, size)
        yield from _replacements(step, size)


def _least_residual(step: StepBudget, waiting: Iterable[Request]) -> float:
    """Return the least time left to a real-time token that can be in time; inf: to none.

    A prompt alone, a decode beside all that are more urgent: were one to count that they make late,
    steps would stay small for it, and ever more tokens were late.
    """
    cost = step.limits.cost
    rows = step.running.of(RT)
    rows = step.due.in_order(rows[step.running.schedulable[rows] > 0])
    due_s = step.due.of_rows(rows, step.due.residuals.due).tolist()
    contexts = np.cumsum(step.running.table.next_position[rows]).tolist()
    in_time = (
        residual_s
        for number, (residual_s, context) in enumerate(zip(due_s, contexts, strict=True), 1)
        if cost.seconds(StepShape().plus_decodes(number, context)) <= residual_s
    )
    least_s = float(next(in_time, math.inf))
    for request in waiting:
        residual_s = step.residual(request)
        shape = StepShape().plus(request.next_position, request.num_schedulable_tokens)
        if cost.seconds(shape) <= residual_s < least_s:
            least_s = residual_s
    return least_s


def _real_time(step: StepBudget, waiting: Sequence[Request], size: int) -> Iterator[Phase]:
    """Yield decodes and whole prompts in one order, until the first for which there is no time."""
    running = step.phase_of(step.running.of(RT))
    decodes = step.due.in_order(running.decodes)
    due_s = step.due.of_rows(decodes, step.due.residuals.due)
    prompts = merged(
        sorted(running.prompts, key=step.residual),
        iter(waiting),
        lambda newcomer, request: step.residual(newcomer) < step.residual(request),
    )
    num_done = 0
    for request in prompts:
        num_before = int(np.searchsorted(due_s, step.residual(request), side="right"))
        if num_before > num_done:
            yield _decodes(step, decodes[num_done:num_before], size)
            num_done = num_before
            if step.has_run_out:
                return
        if step.num_requests >= size:
            return
        yield from one_by_one(step, [request], is_whole=_fits(step))
        if step.has_run_out:
            return
    yield _decodes(step, decodes[num_done:], size)


def _decodes(step: StepBudget, rows: Rows, size: int) -> Phase:
    return Phase(decodes=rows[: max(0, size - step.num_requests)], classes=())


def _fits(step: StepBudget) -> Callable[[Request], bool]:
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


def _best_effort(step: StepBudget, size: int) -> Iterator[Phase]:
    """Yield those that run, which are in the pool, then those that wait by what they load."""
    running = step.phase_of(step.running.of(BE))
    yield _decodes(step, running.decodes, size)
    if step.has_run_out or step.waits_for_memory(RT):
        return
    waiting = iter(step.waiting.of(BE))
    oldest = list(itertools.islice(waiting, 1)) if step.limits.turn.is_of_oldest else []
    others = [*running.prompts, *oldest, *sorted(waiting, key=num_loaded_by)]
    not_too_many = itertools.takewhile(lambda _request: step.num_requests < size, others)
    yield from one_by_one(step, not_too_many, is_whole=_fits(step))


def _replacements(step: StepBudget, size: int) -> Iterator[Phase]:
    """Yield decodes of best-effort requests in place of real-time ones that can wait."""
    left_out = step.phase_of(step.running.of(BE)).decodes[:MAX_REPLACED]
    if not len(left_out) or (not step.has_run_out and step.num_requests < size) or step.is_full:
        return
    can_wait = step.decodes_due_after(step.seconds + step.limits.average_step_s)
    can_wait = can_wait[step.running.table.is_rt[can_wait]]
    least_urgent = step.due.in_order(can_wait)[::-1]
    for number in range(min(len(left_out), len(least_urgent))):
        rows, instead = left_out[number : number + 1], least_urgent[number : number + 1]
        yield Phase(gives_way=instead)
        yield Phase(decodes=rows, classes=())
        if len(step.not_in_it(rows)):
            yield Phase(decodes=instead, classes=())
            return
