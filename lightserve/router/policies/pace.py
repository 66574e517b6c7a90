"""How far others may slow real-time decodes that have no target: the pace.

Without a limit a step with a long prompt lasts as long as its tokens take, and all streams beside
it stand still. So where real-time requests decode, the tokens of which have no target, a step
lasts, as predicted, with `decodes` for the time of its real-time decodes alone,

    with real-time prompts     max(2 x decodes, pace) at most, a tenth of the pace left
    with best-effort work      be_stretch x decodes at most

A tenth is for steps that take longer than predicted: the guard would have prompts crawl where a
machine is noisy, and nothing is missed here. Twice the decodes, as a prompt would have no time at
all where these take as long as the pace. The first prompt of a step gets `MIN_CHUNK` tokens in
any case, with the padding that they bring, and best-effort work what is lent without a pace in
one step of `EVERY_BEST_EFFORT` in which nothing of it would fit. A stream whose grammar has to
see each token decodes in every other step: both together keep the pace.

It is no target. Nothing is refused, counted or judged by it, and what has a target stands above
it: a prompt may take the time that deadlines leave while it would need more than half of its own
at the pace, together with the prompts that are due before it: less than half is tight. One that
is late already keeps the pace. While nothing is known of what steps take there is none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from lightserve.router.arrivals import is_tight
from lightserve.router.encoding import NO_ENCODING, Encoding
from lightserve.router.request import FoundOf, Request
from lightserve.router.request_table import DueTimes, Rows, Running
from lightserve.router.slo import RESERVE_SHARE
from lightserve.router.step_cost import StepCost, StepShape
from lightserve.types import BE, RT

EVERY_BEST_EFFORT = 128
"""So rare that the 99th percentile of gaps does not show it."""


class Pace(NamedTuple):
    """The values of `--pace-ms`, in seconds, and of `--be-stretch`."""

    seconds: float = 0.033
    be_stretch: float = 1.5


class PaceLimits(NamedTuple):
    """Most predicted seconds of a step; infinite: there is no limit."""

    prompts_s: float = math.inf
    """With real-time prompts."""
    best_effort_s: float = math.inf
    """With best-effort work."""
    may_be_exceeded: bool = False
    """Whether prompts that can be in time do not keep it."""

    def limit(self, limit_s: float, prompt: Request, due_s: float) -> float:
        """Return how long a step may take in which a prompt is that is due in `due_s`.

        `limit_s`: by all other rules; that of best-effort work is in it already.
        """
        if limit_s <= self.prompts_s or prompt.request_class is BE or prompt.is_whole:
            return limit_s
        may_exceed = self.may_be_exceeded and 0.0 < due_s < math.inf
        return limit_s if may_exceed else self.prompts_s

    def sets(self, limit_s: float) -> bool:
        """Whether a limit is one of these."""
        return limit_s < math.inf and limit_s in self[:2]


NO_PACE = PaceLimits()


def pace_limits(pace: Pace, decodes_s: float, *, steps_per_token: int = 1) -> PaceLimits:
    """Return the limits of a step whose real-time decodes alone take so long.

    `steps_per_token`: steps between two tokens of the slowest stream.
    """
    prompts_s = max(2.0 * decodes_s, (1.0 - RESERVE_SHARE) * pace.seconds) / steps_per_token
    return PaceLimits(prompts_s, pace.be_stretch * decodes_s)


def kept_pace(
    pace: Pace,
    running: Running,
    prompts: Iterable[Request],
    *,
    decodes: Rows,
    due: DueTimes,
    found: FoundOf,
    cost: StepCost,
    encoding: Encoding = NO_ENCODING,
) -> PaceLimits:
    """Return the limits of a step; there are none without a stream that keeps a pace.

    Such a stream has no target for its tokens, and decodes, in this step or (its grammar has to
    see the token before it) in the next one. The step has nothing but `decodes` of real-time
    requests; `prompts` may be tried next.
    """
    table, rows = running.table, running.of(RT)
    num_generated = table.num_output[rows] + table.inflight_samples[rows]
    is_stream = (num_generated > 0) & (num_generated < table.max_tokens[rows])
    is_stream &= ~table.is_timed[rows] & (running.schedulable[rows] <= 1)
    streams = rows[is_stream]
    if not len(streams) or not cost.is_known:
        return NO_PACE
    together = np.union1d(decodes, streams)
    shape = StepShape().plus_decodes(len(together), int(table.next_position[together].sum()))
    steps_per_token = 2 if table.awaits_grammar[streams].any() else 1
    limits = pace_limits(pace, cost.seconds(shape), steps_per_token=steps_per_token)
    done_s, step_s, may_be_exceeded = 0.0, limits.prompts_s, False
    for request in sorted(prompts, key=due.of):
        if 0.0 < (due_s := due.of(request)) < math.inf:
            start, rest = found(request)[:2]
            chunk = cost.tokens_within(shape, step_s, start + rest // 2, rest)
            done_s += math.ceil(rest / max(1, chunk)) * step_s
            done_s += encoding.seconds_left(request, start)
            may_be_exceeded |= is_tight(due_s - done_s, due_s)
    return limits._replace(may_be_exceeded=may_be_exceeded)
