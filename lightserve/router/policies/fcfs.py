"""First come, first served with whole prompts, prefill before decode (early vLLM, ORCA-like).

The baseline of BROS (B17) and AccelGen (A13): while a waiting prompt can start, a step is made
of whole prompts; otherwise all running requests decode. A prompt longer than the budget runs
alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from lightserve.router.admission.base import AdmissionRound
from lightserve.router.policies.base import Allotment, StepLimits
from lightserve.router.request import Request


class FcfsPolicy:
    """Whole prompts first, else decodes; never both in one step."""

    def select(
        self,
        running: Collection[Request],
        waiting: Iterable[Request],
        limits: StepLimits,
        admission: AdmissionRound,
    ) -> list[Allotment]:
        """See `Policy.select`."""
        return _prompts(waiting, limits, admission) or [
            Allotment(request, request.num_schedulable_tokens)
            for request in running
            if request.num_schedulable_tokens > 0
        ]


def _prompts(
    waiting: Iterable[Request], limits: StepLimits, admission: AdmissionRound
) -> list[Allotment]:
    chosen: list[Allotment] = []
    budget = limits.max_num_batched_tokens
    for request in waiting:
        num_tokens = request.num_schedulable_tokens
        if len(chosen) == limits.num_free_rows or (chosen and num_tokens > budget):
            break
        if not admission.admit(request):
            break
        chosen.append(Allotment(request, num_tokens))
        budget -= num_tokens
    return chosen
