"""Two scheduling policies of your own: one of two lines, and one that knows deadlines and prefixes.

    PYTHONPATH=examples lightserve serve --policy own_policy:DeadlinesFirst
    PYTHONPATH=examples lightserve simulate --rt poisson:16 --rt-lengths uniform:64-512,16-256 \\
        --be closed:32 --be-lengths uniform:512-1024,32-128 --duration-s 20 --margin-s 5 \\
        --compare own_policy:DeadlinesFirst,own_policy:ShortAnswersFirst,unified

A policy is an order: it tries requests, and as much of them joins the step as time, tokens, rows
and memory allow. It sees lengths and limits, never text, and changes nothing: it may be asked
several times for one step. docs/scheduling.md lists what a policy can read and call.
"""

from lightserve.router.policies.base import Step
from lightserve.router.request import Request
from lightserve.types import BE, RT


class DeadlinesFirst:
    """Real time by deadlines, then best effort by the length of the cached prefix."""

    is_class_aware = True
    meets_deadlines = True

    def fill(self, step: Step) -> None:
        """Try the requests of each class: decodes, prompts in progress, requests that wait."""
        by_deadline, by_prefix = step.budget.due.of, lambda request: -step.found(request).start
        for of, rank in ((RT, by_deadline), (BE, by_prefix)):
            running, waiting = step.of(of), step.waiting.of(of)
            step.decode(running.decodes)
            step.take(sorted(running.prompts, key=rank), sorted(waiting, key=rank), classes=(of,))


class ShortAnswersFirst:
    """All decodes, then prompts up to the token budget: real time first, short answers first."""

    is_class_aware = False  # memory is never taken from best-effort requests for real-time ones
    meets_deadlines = False  # targets are measured, but not planned for

    def fill(self, step: Step) -> None:
        """Try what runs, then what waits."""
        step.run(step.of())
        step.take(newcomers=sorted(step.waiting, key=_rank))  # equal ones: as they came


def _rank(request: Request) -> tuple[bool, int]:
    return request.request_class is BE, request.max_tokens
