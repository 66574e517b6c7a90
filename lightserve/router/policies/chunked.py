"""Chunked prefill under a static token budget (Sarathi-Serve; baseline of AccelGen, A13).

Every decode advances in every step; what is left of the budget goes to prompts in order of
arrival, the last of them cut where the budget ends.
"""

from __future__ import annotations

from collections.abc import Collection

from lightserve.router.admission.base import AdmissionRound
from lightserve.router.policies.base import (
    Allotment,
    StepLimits,
    Waiting,
    admissible,
    within_be_limit,
)
from lightserve.router.request import Request


class ChunkedPolicy:
    """Decodes first, then chunks of prompts up to `max_num_batched_tokens`."""

    is_class_aware = False

    def select(
        self,
        running: Collection[Request],
        waiting: Waiting,
        limits: StepLimits,
        admission: AdmissionRound,
    ) -> list[Allotment]:
        """See `Policy.select`."""
        budget = limits.max_num_batched_tokens
        chosen: list[Allotment] = []
        prefilling: list[Request] = []
        for request in running:
            num_tokens = request.num_schedulable_tokens
            if num_tokens == 1 and budget > 0:
                chosen.append(Allotment(request, 1))
                budget -= 1
            elif num_tokens > 0:
                prefilling.append(request)
        for request in prefilling:
            if budget == 0:
                return chosen
            chunk = min(request.num_schedulable_tokens, budget)
            chosen.append(Allotment(request, chunk))
            budget -= chunk
        num_free_rows = limits.num_free_rows
        newcomers = admissible(within_be_limit(waiting, running, limits, chosen), admission)
        while budget > 0 and num_free_rows > 0 and (newcomer := next(newcomers, None)):
            chunk = min(newcomer.num_schedulable_tokens, budget)
            chosen.append(Allotment(newcomer, chunk))
            budget -= chunk
            num_free_rows -= 1
        return chosen
