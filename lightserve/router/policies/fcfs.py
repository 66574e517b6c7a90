"""First come, first served with whole prompts, prefill before decode (early vLLM, ORCA-like).

The baseline of BROS (B17) and AccelGen (A13): while a waiting prompt can start, a step is made
of whole prompts; otherwise all running requests decode. A prompt longer than the budget runs
alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from lightserve.router.admission.base import AdmissionRound
from lightserve.router.policies.base import StepLimits, Waiting, admissible, within_be_limit
from lightserve.router.reasons import Reason
from lightserve.router.request import Request
from lightserve.router.shares import Allotment


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
        if prompts := _prompts(running, waiting, limits, admission):
            limits.skips.note_all(running, Reason.ORDER)
            return prompts
        decodes = [Allotment(request, request.num_schedulable_tokens) for request in running]
        limits.skips.note_all((r for r, count in decodes if count == 0), Reason.BLOCKED)
        return [part for part in decodes if part.num_tokens > 0]


def _prompts(
    running: Collection[Request], waiting: Waiting, limits: StepLimits, admission: AdmissionRound
) -> list[Allotment]:
    chosen: list[Allotment] = []
    candidates = within_be_limit(waiting, running, limits, chosen)
    for request in admissible(_within(candidates, limits, chosen), admission, limits):
        chosen.append(Allotment(request, request.num_schedulable_tokens))
    limits.skips.stop_all(Reason.ORDER)  # if nothing else: it ended with one that may not be passed
    return chosen


def _within(
    waiting: Iterable[Request], limits: StepLimits, chosen: Sequence[Allotment]
) -> Iterator[Request]:
    """Yield waiting requests until rows or budget end; the first may exceed the budget."""
    for request in waiting:
        num_chosen = sum(part.num_tokens for part in chosen)
        num_tokens = num_chosen + request.num_schedulable_tokens
        is_full = len(chosen) == limits.num_free_rows
        if is_full or (chosen and num_tokens > limits.max_num_batched_tokens):
            reason = Reason.ROWS if is_full else Reason.TOKENS
            limits.skips.note_all([request], reason)
            limits.skips.stop_all(reason)
            return
        yield request
