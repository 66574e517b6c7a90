"""Two FCFS queues, real-time and best-effort, served in turn (BROS, section II-B: "RR"; B17).

Every second step belongs to one class: its decodes, then chunks of its prompts in order of
arrival, under a static token budget. A class that has nothing to do leaves its turn to the other.
Memory is the same for both: nobody gives any up for a newcomer.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightserve.router.admission.base import AdmissionRound
from lightserve.router.policies.base import StepLimits, Waiting
from lightserve.router.policies.budget import BudgetedStep
from lightserve.router.reasons import Reason
from lightserve.router.request_table import Running
from lightserve.router.shares import Share
from lightserve.types import BE, RT, RequestClass


class RoundRobinPolicy:
    """Real-time requests in even steps, best-effort ones in odd steps."""

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
        turns = (RT, BE)
        tried: list[RequestClass] = []
        for request_class in turns if limits.step_number % 2 == 0 else turns[::-1]:
            step = BudgetedStep(limits)
            step.advance(running, running.of(request_class))
            num_rows = limits.num_free_rows
            if request_class is BE:
                num_rows = min(num_rows, limits.max_be_seqs - len(running.of(BE)))
            step.start(waiting.of(request_class), admission, num_rows, [request_class])
            tried.append(request_class)
            if step.chosen:
                for other in set(turns) - set(tried):
                    limits.skips.note_rows(running.of(other), Reason.ORDER)
                limits.skips.stop_all(Reason.ORDER)
                return step.chosen
        return []
