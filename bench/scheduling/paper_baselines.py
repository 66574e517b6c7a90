"""A policy that one of the papers compares with, and that lightserve has no other use for."""

from __future__ import annotations

from lightserve.router.policies.base import Step
from lightserve.router.policies.baselines import in_queue_order


class LongestWait:
    """What has waited longest since its last step goes next (BROS, section II-B and figure 2).

    A step is made of whole prompts or of decodes, as in the server that the paper has changed:
    which of the two, the longest wait says. The others keep their memory while there is any.
    """

    is_class_aware = False
    meets_deadlines = False

    def fill(self, step: Step) -> None:
        """See `Policy.fill`."""
        waiting = sorted(in_queue_order(step), key=lambda request: request.arrival_s)
        running, table = step.of(), step.running.table
        is_in_flight = table.inflight_steps[running.decodes] > 0  # in the step before: no wait
        last_s = table.last_s[running.decodes]
        last_s[is_in_flight] = step.limits.start_s
        oldest = running._replace(decodes=running.decodes[last_s.argsort(kind="stable")])
        is_prompt_first = bool(waiting) and (
            len(last_s) == 0 or waiting[0].arrival_s <= float(last_s.min())
        )
        for is_prompt in (is_prompt_first, not is_prompt_first):
            if is_prompt:
                step.take(newcomers=waiting, is_whole=True)
            else:
                step.run(oldest)
            if not step.budget.is_empty:
                return
