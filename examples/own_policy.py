"""A scheduling policy of your own: real time before best effort, short answers first.

    PYTHONPATH=examples lightserve serve --policy own_policy:ShortAnswersFirst
    PYTHONPATH=examples lightserve simulate --rt poisson:16 --rt-lengths uniform:64-512,16-256 \\
        --be closed:32 --be-lengths uniform:512-1024,32-128 --duration-s 20 --margin-s 5 \\
        --compare own_policy:ShortAnswersFirst,chunked,unified

A policy says who advances in the next step, and by how many tokens. It sees lengths and limits,
never text, and changes nothing: it may be asked several times for one step. docs/scheduling.md has
what is built in, docs/contributing.md how a policy becomes part of lightserve.
"""

from collections.abc import Sequence

from lightserve.router.admission.base import AdmissionRound
from lightserve.router.policies.base import StepLimits, Waiting
from lightserve.router.policies.budget import BudgetedStep
from lightserve.router.request import Request
from lightserve.router.request_table import Running
from lightserve.router.shares import Share
from lightserve.types import BE


class ShortAnswersFirst:
    """All decodes, then prompts up to the token budget."""

    is_class_aware = False  # memory is never taken from best-effort requests for real-time ones
    meets_deadlines = False  # targets are measured, but not planned for

    def select(
        self,
        running: Running,
        waiting: Waiting,
        limits: StepLimits,
        admission: AdmissionRound,
    ) -> Sequence[Share]:
        """Return who advances; the step notes why the others do not."""
        step = BudgetedStep(limits)
        step.advance(running)
        newcomers = sorted(waiting, key=_rank)  # equal ones: as they came
        step.start(newcomers, admission, limits.num_free_rows)
        return step.chosen


def _rank(request: Request) -> tuple[bool, int]:
    return request.request_class is BE, request.max_tokens
