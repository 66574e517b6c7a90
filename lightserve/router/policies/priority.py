"""Real-time before best-effort, under a static token budget.

The order of a step: real-time decodes, real-time prompts in progress, real-time newcomers;
then best-effort decodes, prompts in progress, those that resume, newcomers. Prompts are cut where
the budget ends, as in `chunked`.

While a real-time prompt waits, no best-effort request runs: none is in a step in which some
real-time request could have started, but does not (for want of budget, rows or memory). One that
starts in this very step does not wait, and neither does one whose frontend has to catch up.

The strict two-class scheduler that the papers compare with (Echo's BS, E13), and the *tuned
baseline* of every target about both classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightserve.router.admission.base import AdmissionRound
from lightserve.router.policies.base import StepLimits, Waiting
from lightserve.router.policies.budget import BudgetedStep
from lightserve.router.reasons import Reason
from lightserve.router.request import Request
from lightserve.router.request_table import Decodes, Running
from lightserve.router.shares import Share
from lightserve.types import BE, RT


class PriorityPolicy:
    """Best-effort requests get what real-time ones leave of a step."""

    is_class_aware = True
    meets_deadlines = False

    def select(
        self,
        running: Running,
        waiting: Waiting,
        limits: StepLimits,
        admission: AdmissionRound,
    ) -> Sequence[Share]:
        """See `Policy.select`."""
        best_effort = running.of(BE)
        step = BudgetedStep(limits)
        step.advance(running, running.of(RT))
        num_rows = limits.num_free_rows + limits.num_yielding_rows
        num_started = step.start(self.newcomers(waiting), admission, num_rows, [RT])
        if step.budget == 0 or _keeps_waiting(waiting, step.chosen):
            reason = Reason.TOKENS if step.budget == 0 else Reason.ORDER
            limits.skips.note_rows(best_effort, reason)
            limits.skips.stop(BE, reason)
            return step.chosen
        # Rows that are not free come from the best-effort requests that were admitted last.
        num_yielded = max(0, num_started - limits.num_free_rows)
        num_kept = len(best_effort) - num_yielded
        step.advance(running, best_effort[:num_kept])
        limits.skips.note_rows(best_effort[num_kept:], Reason.ROWS)
        num_rows = min(limits.num_free_rows - num_started, limits.max_be_seqs - len(best_effort))
        step.start(waiting.of(BE), admission, num_rows, [BE])
        return step.chosen

    def newcomers(self, waiting: Waiting) -> Iterable[Request]:
        """Return real-time requests that wait, in the order in which they start."""
        return waiting.of(RT)


def _keeps_waiting(waiting: Waiting, chosen: Sequence[Share]) -> bool:
    """Return whether a real-time request that could start is not among the chosen."""
    started = {part.request for part in chosen if not isinstance(part, Decodes)}
    return any(
        request not in started and request.num_schedulable_tokens > 0 for request in waiting.of(RT)
    )
