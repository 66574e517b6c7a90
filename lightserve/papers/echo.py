"""Online requests in order, offline ones by what they gain for what they take (Echo).

Sections 4 and 6 of the paper, each step:

    online      decodes, whose tightest deadline limits the step (section 5.1), then prompts, first
                come, first served
    offline     only once all online requests that wait are in. The step before is taken over with
                small changes (section 4.1):
                - its offline decodes stay; where time is short those go whose loss gains most of
                  it, the ones with the longest contexts
                - offline decodes that were left out before come back: their KV is there
                - one request after the other is picked, the one that gains most tokens per second,
                  less those that it throws out of the cache and that others wait for (section 3.1)

Offline requests wait in a pool by length and prefix (`router.queue`); what of the cache goes first,
by how many wait for it, is `kv.prefix_node.task_aware`; what stays free for bursts of online
requests is `router.arrivals`. The paper does not say whether prompts are cut; here they are.
"""

from __future__ import annotations

import numpy as np

from lightserve.config import ServeConfig
from lightserve.router.policies.base import Step, heads_of_real_time
from lightserve.router.policies.batch_order import BatchOrder
from lightserve.router.request import Request
from lightserve.router.request_table import Rows
from lightserve.types import BE, RT


class EchoPolicy:
    """Echo (sections 4 and 6), as the module describes them."""

    is_class_aware = True
    meets_deadlines = True

    def __init__(self, *, best_first: bool = True) -> None:
        """`best_first`: offline requests start by what they gain, not as the queue has them."""
        self._best_first = best_first

    @classmethod
    def of_config(cls, config: ServeConfig) -> EchoPolicy:
        """Return the policy with the order of best-effort requests that is configured."""
        return cls(best_first=config.be_by_sharing())

    def fill(self, step: Step) -> None:
        """Fill a step; `Policy.fill` says how."""
        online = step.of(RT)
        step.decode(online.decodes)
        step.budget.limit_by_deadlines()
        prompts = sorted(online.prompts, key=_by_arrival)
        newcomers = sorted(heads_of_real_time(step.waiting), key=_by_arrival)
        step.take(prompts, newcomers, classes=(RT,))
        if step.has_run_out or step.leaves_waiting(RT):
            return
        running = step.of(BE)
        is_kept = step.running.table.inflight_steps[running.decodes] > 0
        for decodes in (running.decodes[is_kept], running.decodes[~is_kept]):
            step.decode(_shortest_first(step, decodes))
        if step.has_run_out:
            return
        step.take(running.prompts, classes=())
        if step.has_run_out or step.waits_for_memory(RT):
            return
        offline = step.waiting.of(BE)
        if self._best_first:
            offline = BatchOrder(step, spares_wanted=True).best_first(offline)
        step.take(newcomers=offline, classes=(BE,))


def _by_arrival(request: Request) -> tuple[int, int]:
    return request.priority, request.arrival_number


def _shortest_first(step: Step, decodes: Rows) -> Rows:
    positions = step.running.table.next_position[decodes]
    in_order: Rows = decodes[np.argsort(positions, kind="stable")]
    return in_order
