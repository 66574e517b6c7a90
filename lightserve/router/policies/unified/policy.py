"""The order in which a step is filled; see the package."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from lightserve.router.admission.base import AdmissionRound
from lightserve.router.policies.base import (
    Allotment,
    StepLimits,
    Waiting,
    admissible,
    num_best_effort,
)
from lightserve.router.policies.unified import late_share
from lightserve.router.policies.unified.batch_order import BatchOrder
from lightserve.router.policies.unified.long_prompts import one_long_at_once
from lightserve.router.policies.unified.options import UnifiedOptions
from lightserve.router.policies.unified.promotion import promote
from lightserve.router.policies.unified.timed_step import TimedStep
from lightserve.router.reasons import Reason, Skips
from lightserve.router.request import Request
from lightserve.types import RequestClass

RT, BE = RequestClass.RT, RequestClass.BE


class UnifiedPolicy:
    """See the package's docstring."""

    is_class_aware = True
    meets_deadlines = True

    def __init__(self, options: UnifiedOptions = UnifiedOptions()) -> None:  # noqa: B008
        """`options` are frozen."""
        self._options = options

    def select(
        self,
        running: Collection[Request],
        waiting: Waiting,
        limits: StepLimits,
        admission: AdmissionRound,
    ) -> list[Allotment]:
        """See `Policy.select`."""
        step, skips = TimedStep(limits), limits.skips
        real_time = [r for r in running if r.request_class is RT]
        best_effort = [r for r in running if r.request_class is BE]
        promoted = promote(best_effort, waiting, limits)
        step.due_s = promoted.due_s
        best_effort = [r for r in best_effort if r not in promoted.running]
        urgent = _Urgent(
            [*real_time, *promoted.running], promoted.waiting, len(running) - len(real_time)
        )
        if self._real_time(step, urgent, waiting, limits, admission) and not step.is_full:
            step.lend(real_time, limits)
            self._best_effort(step, best_effort, waiting, limits, admission)
        else:
            reason = Reason.TOKENS if step.is_full else Reason.ORDER
            skips.note_all(best_effort, reason)
            skips.stop(BE, reason)
        skips.limit_s = step.deadline_s if math.isfinite(step.deadline_s) else None
        return step.chosen

    def _real_time(
        self,
        step: TimedStep,
        urgent: _Urgent,
        waiting: Waiting,
        limits: StepLimits,
        admission: AdmissionRound,
    ) -> bool:
        """Add what is urgent; whether none of it that could move or start was left out, or cut."""
        options, skips = self._options, limits.skips
        running = [r for r in urgent.running if r.request_class is RT]
        decodes, prompts = _sort_out(urgent.running, skips)
        step.add_decodes(decodes)
        step.limit_by_deadlines()
        prompts.sort(key=step.residual)
        late = [r for r in prompts if not step.can_be_in_time(r)]
        in_time = [r for r in prompts if r not in late]
        late_first: list[Request] = []
        is_turn_of_late = late_share.are_too_few_late(running, options.late_min_share)
        if is_turn_of_late and limits.step_number % round(1 / options.late_min_share) == 0:
            late_first, late = late, []
        newcomers = late_share.in_order(waiting, running, limits, late_first=is_turn_of_late)
        newcomers = one_long_at_once(
            newcomers, in_time, long_tokens=options.long_prompt_tokens, step=step, skips=skips
        )
        newcomers = admissible(newcomers, admission, skips)
        num_rows = limits.num_free_rows + limits.num_yielding_rows
        newcomers = step.while_rows(newcomers, num_rows, RT)
        jobs = admissible(urgent.jobs, admission, skips)
        num_be_rows = limits.max_be_seqs - urgent.num_best_effort
        jobs = step.while_rows(jobs, min(limits.num_free_rows, num_be_rows), BE)
        in_order = _by_residual(_by_residual(in_time, jobs, step), newcomers, step)
        for some in (late_first, in_order, late):
            if not step.add_chunks(some):
                skips.note_all(prompts, step.full_of)
                skips.stop(RT, step.full_of)
                return False
        return not _any_left(waiting, step.chosen)

    def _best_effort(
        self,
        step: TimedStep,
        running: Sequence[Request],
        waiting: Waiting,
        limits: StepLimits,
        admission: AdmissionRound,
    ) -> None:
        """Fill the rest of the step."""
        skips = limits.skips
        started = {request for request, _ in step.chosen}
        num_urgent = num_best_effort(started)
        num_kept = len(running) - max(0, step.num_started - limits.num_free_rows)
        skips.note_all(running[num_kept:], Reason.ROWS)
        decodes, prompts = _sort_out(running[:num_kept], skips)
        step.add_while_in_time(decodes)
        num_rows = min(
            limits.num_free_rows - step.num_started, limits.max_be_seqs - num_kept - num_urgent
        )
        others = (r for r in waiting.of(BE) if r not in started)
        best_first = BatchOrder(step, limits).best_first(others)
        newcomers = step.while_rows(admissible(best_first, admission, skips), num_rows, BE)
        if not step.add_chunks(prompts) or not step.add_chunks(newcomers):
            skips.note_all(prompts, step.full_of)
            skips.stop(BE, step.full_of)


class _Urgent(NamedTuple):
    """Real-time requests, and the best-effort jobs that go with them."""

    running: list[Request]
    jobs: list[Request]
    """They wait; real-time ones that do are not here."""
    num_best_effort: int
    """That run, urgent or not."""


class _SortedOut(NamedTuple):
    decodes: list[Request]
    prompts: list[Request]


def _sort_out(running: Iterable[Request], skips: Skips) -> _SortedOut:
    """Return the decodes and the prompts among requests; the rest have nothing to do."""
    sorted_out = _SortedOut([], [])
    for request in running:
        num_tokens = request.num_schedulable_tokens
        if num_tokens == 1:
            sorted_out.decodes.append(request)
        elif num_tokens > 1:
            sorted_out.prompts.append(request)
        else:
            skips.note(request, Reason.BLOCKED)
    return sorted_out


def _by_residual(
    in_time: Iterable[Request], newcomers: Iterator[Request], step: TimedStep
) -> Iterator[Request]:
    """Merge prompts in progress, by residual, with newcomers; late ones of these come last."""
    newcomer = next(newcomers, None)
    for request in in_time:
        while newcomer is not None and _goes_before(newcomer, request, step):
            yield newcomer
            newcomer = next(newcomers, None)
        yield request
    if newcomer is not None:
        yield newcomer
    yield from newcomers


def _goes_before(newcomer: Request, request: Request, step: TimedStep) -> bool:
    return step.residual(newcomer) < step.residual(request) and step.can_be_in_time(newcomer)


def _any_left(waiting: Waiting, chosen: Sequence[Allotment]) -> bool:
    """Return whether a real-time request that could start is not among the chosen."""
    started = {request for request, _ in chosen}
    return any(
        request not in started and request.num_schedulable_tokens > 0 for request in waiting.of(RT)
    )
