"""The order in which a step is filled; see the package."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from lightserve.router.admission.base import AdmissionRound
from lightserve.router.policies.base import Allotment, StepLimits, Waiting, admissible
from lightserve.router.policies.unified.options import UnifiedOptions
from lightserve.router.policies.unified.timed_step import TimedStep
from lightserve.router.reasons import Reason, Skips
from lightserve.router.request import Request
from lightserve.types import RequestClass

RT, BE = RequestClass.RT, RequestClass.BE
LATE_POOL_SHARE = 0.8
"""Beyond their share of time late requests start while real-time ones hold less of the pool."""


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
        step = TimedStep(limits)
        self._fill(step, running, waiting, limits, admission)
        limits.skips.limit_s = step.deadline_s if math.isfinite(step.deadline_s) else None
        return step.chosen

    def _fill(
        self,
        step: TimedStep,
        running: Collection[Request],
        waiting: Waiting,
        limits: StepLimits,
        admission: AdmissionRound,
    ) -> None:
        """Fill a step; see the package."""
        skips = limits.skips
        real_time = [r for r in running if r.request_class is RT]
        best_effort = [r for r in running if r.request_class is BE]
        num_started = self._real_time(step, real_time, waiting, limits, admission)
        if num_started is None or step.is_full:
            reason = Reason.TOKENS if step.is_full else Reason.ORDER
            skips.note_all(best_effort, reason)
            skips.stop(BE, reason)
            return
        step.lend(real_time, limits)
        num_kept = len(best_effort) - max(0, num_started - limits.num_free_rows)
        skips.note_all(best_effort[num_kept:], Reason.ROWS)
        best_effort = best_effort[:num_kept]
        decodes, prompts = _sort_out(best_effort, skips)
        step.add_while_in_time(decodes)
        if not step.add_chunks(prompts):
            skips.stop(BE, step.full_of)
            return
        num_rows = min(limits.num_free_rows - num_started, limits.max_be_seqs - len(best_effort))
        step.start(admissible(waiting.of(BE), admission, skips), num_rows, BE)

    def _real_time(
        self,
        step: TimedStep,
        real_time: Sequence[Request],
        waiting: Waiting,
        limits: StepLimits,
        admission: AdmissionRound,
    ) -> int | None:
        """Add what is real-time; return how many of them start, None: somebody was left out."""
        skips = limits.skips
        decodes, prompts = _sort_out(real_time, skips)
        step.add_decodes(decodes)
        step.limit_by_deadlines()
        prompts.sort(key=step.residual)
        late = [r for r in prompts if not step.can_be_in_time(r)]
        prompts = [r for r in prompts if r not in late]
        are_late_first = self._are_late_first(real_time)
        if are_late_first and limits.step_number % round(1 / self._options.late_min_share) == 0:
            prompts, late = late + prompts, []
        if not step.add_chunks(prompts):
            skips.note_all(late, step.full_of)
            skips.stop(RT, step.full_of)
            return None
        num_rows = limits.num_free_rows + limits.num_yielding_rows
        newcomers = self._newcomers(step, real_time, waiting, limits, late_first=are_late_first)
        num_started = step.start(admissible(newcomers, admission, skips), num_rows, RT)
        if not step.add_chunks(late) or _any_left(waiting, step.chosen):
            return None
        return num_started

    def _are_late_first(self, real_time: Sequence[Request]) -> bool:
        """Whether fewer late requests decode than should at least."""
        num_late = sum(map(_is_first_token_late, real_time))
        return num_late < self._options.late_min_share * len(real_time)

    def _newcomers(
        self,
        step: TimedStep,
        real_time: Sequence[Request],
        waiting: Waiting,
        limits: StepLimits,
        *,
        late_first: bool,
    ) -> Iterable[Request]:
        """Return those who wait and may start, in order: late ones first, last, or not at all."""
        if late_first and (late := next(iter(waiting.late()), None)) is not None:
            return itertools.chain([late], (r for r in waiting.of(RT) if r is not late))
        num_held = sum(request.num_held_tokens for request in real_time)
        if num_held < LATE_POOL_SHARE * limits.num_slots:
            return waiting.of(RT)
        return _until_late(waiting, limits.skips)


def _until_late(waiting: Waiting, skips: Skips) -> Iterator[Request]:
    """Yield those who can be in time, or have started before; late ones, who come last, wait."""
    first_late = next(iter(waiting.late()), None)
    for request in waiting.of(RT):
        if request is first_late:
            skips.stop(RT, Reason.ORDER)
            return
        yield request


def _is_first_token_late(request: Request) -> bool:
    return request.deadlines is not None and request.deadlines.kept.is_first_met is False


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


def _any_left(waiting: Waiting, chosen: Sequence[Allotment]) -> bool:
    """Return whether a real-time request that could start is not among the chosen."""
    started = {request for request, _ in chosen}
    return any(
        request not in started and request.num_schedulable_tokens > 0 for request in waiting.of(RT)
    )
