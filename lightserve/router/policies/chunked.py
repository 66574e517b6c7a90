"""Chunked prefill under a static token budget (Sarathi-Serve; baseline of AccelGen, A13).

Every decode advances in every step; what is left of the budget goes to prompts in order of
arrival, the last of them cut where the budget ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightserve.router.admission.base import AdmissionRound
from lightserve.router.policies.base import StepLimits, Waiting, within_be_limit
from lightserve.router.policies.budget import BudgetedStep
from lightserve.router.request_table import Running
from lightserve.router.shares import Share


class ChunkedPolicy:
    """Decodes first, then chunks of prompts up to `max_num_batched_tokens`."""

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
        step = BudgetedStep(limits)
        step.advance(running)
        newcomers = within_be_limit(waiting, running, limits, step.chosen)
        step.start(newcomers, admission, limits.num_free_rows)
        return step.chosen
