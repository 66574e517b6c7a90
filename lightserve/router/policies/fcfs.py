"""First come, first served with whole prompts, prefill before decode (early vLLM, ORCA-like).

The baseline of BROS (B17) and AccelGen (A13): while a waiting prompt can start, a step is made
of whole prompts; otherwise all running requests decode. A prompt longer than the budget runs
alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from lightserve.router.admission.base import AdmissionRound
from lightserve.router.policies.base import StepLimits, Waiting, admissible, within_be_limit
from lightserve.router.reasons import Reason
from lightserve.router.request import Request
from lightserve.router.request_table import Decodes, Running
from lightserve.router.shares import Allotment, Share


class FcfsPolicy:
    """Whole prompts first, else decodes; never both in one step."""

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
        if prompts := _prompts(running, waiting, limits, admission):
            limits.skips.note_rows(running.rows, Reason.ORDER)
            return prompts
        decodes, started, blocked = running.sort_out(running.rows)
        limits.skips.note_rows(blocked, Reason.BLOCKED)
        chosen: list[Share] = [Decodes(running.table, decodes)] if len(decodes) else []
        return [*chosen, *(Allotment(r, r.num_schedulable_tokens) for r in started)]


def _prompts(
    running: Running, waiting: Waiting, limits: StepLimits, admission: AdmissionRound
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
