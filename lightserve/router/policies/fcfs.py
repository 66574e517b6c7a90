"""First come, first served with whole prompts, prefill before decode (early vLLM, ORCA-like).

The baseline of BROS (B17) and AccelGen (A13): while a waiting prompt can start, a step is made
of whole prompts; otherwise all running requests decode. A prompt longer than the budget runs
alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from lightserve.router.admission.base import AdmissionRound
from lightserve.router.policies.base import (
    Allotment,
    StepLimits,
    Waiting,
    admissible,
    within_be_limit,
)
from lightserve.router.request import Request


class FcfsPolicy:
    """Whole prompts first, else decodes; never both in one step."""

    is_class_aware = False
    meets_deadlines = False

    def select(
        self,
        running: Collection[Request],
        waiting: Waiting,
        limits: StepLimits,
        admission: AdmissionRound,
    ) -> list[Allotment]:
        """See `Policy.select`."""
        return _prompts(running, waiting, limits, admission) or [
            Allotment(request, request.num_schedulable_tokens)
            for request in running
            if request.num_schedulable_tokens > 0
        ]


def _prompts(
    running: Collection[Request], waiting: Waiting, limits: StepLimits, admission: AdmissionRound
) -> list[Allotment]:
    chosen: list[Allotment] = []
    candidates = within_be_limit(waiting, running, limits, chosen)
    for request in admissible(_within(candidates, limits, chosen), admission):
        chosen.append(Allotment(request, request.num_schedulable_tokens))
    return chosen


def _within(
    waiting: Iterable[Request], limits: StepLimits, chosen: Sequence[Allotment]
) -> Iterator[Request]:
    """Yield waiting requests until rows or budget end; the first may exceed the budget."""
    for request in waiting:
        num_chosen = sum(part.num_tokens for part in chosen)
        num_tokens = num_chosen + request.num_schedulable_tokens
        if len(chosen) == limits.num_free_rows:
            return
        if chosen and num_tokens > limits.max_num_batched_tokens:
            return
        yield request
