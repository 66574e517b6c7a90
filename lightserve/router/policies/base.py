"""What a policy is: in which order requests are tried for a step; and the pace that steps leave."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from lightserve.router.arrivals import NO_OUTLOOK, Outlook, TimeShare, is_tight
from lightserve.router.queue import MAX_CANDIDATES, Turn
from lightserve.router.request import WAITING, Request
from lightserve.router.request_table import NO_ROWS, Rows
from lightserve.router.seats import Seats, had_of, has_had_less
from lightserve.router.slo import RESERVE_SHARE
from lightserve.router.step import ALL_CLASSES, Reason
from lightserve.router.step_cost import StepCost, StepGuard, StepShape
from lightserve.types import RT, RequestClass

if TYPE_CHECKING:
    from lightserve.router.policies.step_budget import StepBudget

NO_LIMIT = 1 << 30
LOOK_AHEAD = 8
"""Requests that are looked at in one step where another than the first may be the better choice:
best-effort ones that are compared, or passed over as a smaller one behind them may fit now; urgent
ones that wait."""


@dataclass(frozen=True)
class StepLimits:
    """What a step may use."""

    max_num_batched_tokens: int
    num_free_rows: int
    """For newcomers of this step, of which there may be no more than `planner.MAX_NEWCOMERS`."""
    num_yielding_rows: int = 0
    """Rows of others, which real-time newcomers get beyond these."""
    max_be_seqs: int = NO_LIMIT
    """Most best-effort requests that run at once."""
    step_number: int = 0
    """Steps that were planned before this one."""
    num_slots: int = 0
    """Size of the KV pool."""
    num_free_slots: int = 0
    """Slots of it that hold nothing, cached KV counting as something."""
    num_cached_slots: int = 0
    """Slots of it whose KV no request reads."""
    num_wanted_slots: int = 0
    """Those of them that some request waits for."""
    num_steps_in_time: int = 0
    """Steps before this one since one that `StepBudget.hits_limit`."""
    start_s: float = 0.0
    """When the step will start, as predicted, on the router's clock."""
    cost: StepCost = field(default_factory=StepCost)
    """Predicts what it takes."""
    best_effort_time: TimeShare = field(default_factory=TimeShare)
    """What best-effort requests got of the time while they wanted more."""
    average_step_s: float = 0.0
    """Execution time of recent steps, on average."""
    guard: StepGuard | None = None
    """How far steps may be filled up to a deadline, to be read; None: all of it."""
    load_seconds: Callable[[int], float] = lambda _num_tokens: 0.0
    """Predicts the time that it waits for loads of so many tokens."""
    ahead_seconds: Callable[[int], float] = lambda _num_tokens: 0.0
    """Predicts the time of loads that it does not wait for; 0: unknown."""
    overlaps_copies: bool = False
    """Whether these are made beside it; otherwise they follow it."""
    outlook: Outlook = NO_OUTLOOK
    """What real-time requests ask for."""
    turn: Turn = field(default_factory=Turn)
    """Whose turn it is among best-effort requests that wait."""
    seats: Seats = field(default_factory=Seats)
    """Which requests that wait are owed a seat."""
    num_owed_be_rows: int = 0
    """Rows of others of their class that best-effort newcomers get beyond free ones."""

    @property
    def num_available_slots(self) -> int:
        """Slots that no request holds."""
        return self.num_free_slots + self.num_cached_slots


class Waiting(Protocol):
    """The waiting requests, those that were paused or preempted before those that never ran."""

    def __iter__(self) -> Iterator[Request]:
        """Iterate over all of them in the order of the queue."""

    def of(self, request_class: RequestClass) -> Iterator[Request]:
        """Iterate over those of one class, in the order in which they should start.

        Best-effort ones are not all of them: the few that are worth asking.
        """

    def jobs(self) -> Iterator[Request]:
        """Iterate over best-effort requests with a completion time, those to end first before."""

    def lines(self) -> Iterator[Request]:
        """Iterate over lines of batches, those that are due first before others."""

    def late(self) -> Iterable[Request]:
        """Return the real-time ones that never ran and are late; `of` has them at its end."""

    def is_prefix_in_flight(self, request: Request) -> bool:
        """Whether it should wait for a prefix that another is just computing."""


class Phase(NamedTuple):
    """A group of requests to be tried for a step, in this order.

    A prompt is cut where time or tokens end, and that ends the phase. A newcomer that may not start
    ends the search for newcomers (of its class, where the policy knows classes); a best-effort one
    may be passed for want of memory, `LOOK_AHEAD` of them in a phase.
    """

    gives_way: Rows = NO_ROWS
    """Decodes in the step that leave it before anything is tried."""
    decodes: Rows = NO_ROWS
    """Rows that compute one token, tried together."""
    prompts: Iterable[Request] = ()
    """Requests that run and compute more."""
    newcomers: Iterable[Request] = ()
    """Requests that wait; read as far as needed."""
    classes: tuple[RequestClass, ...] = ALL_CLASSES
    """Of `newcomers`."""
    goes_before: Callable[[Request, Request], bool] | None = None
    """Whether a newcomer is tried before a prompt; None: after all of them."""
    is_whole: bool = False
    """Whether prompts are not cut; one that is longer than the budget is a step of its own."""
    leaves_room: bool = False
    """Whether prompts of real-time requests that have time leave some of it to arrivals."""
    num_tokens: int = 0
    """Where not 0, each gets so many tokens, whatever time and budget are left (simulated workers
    decode on by themselves)."""


def merged(
    first: Iterable[Request],
    second: Iterator[Request],
    goes_before: Callable[[Request, Request], bool] | None,
) -> Iterator[Request]:
    """Yield both in their own orders, one of `second` before one of `first` where that is said.

    Without `goes_before` all of `second` comes last, and is not asked for anything before.
    """
    if goes_before is not None:
        other = next(second, None)
        for request in first:
            while other is not None and goes_before(other, request):
                yield other
                other = next(second, None)
            yield request
        first = () if other is None else (other,)
    yield from first
    yield from second


def in_turns(
    step: StepBudget, running: Phase, newcomers: Iterable[Request], request_class: RequestClass
) -> Iterator[Phase]:
    """Yield requests of a class that run, then those that start.

    Where several accounts have some, prompts of the account that has had least come first, be they
    in progress or not: one that starts does not wait for the ends of others' prompts.
    """
    if not (step.limits.seats.is_shared and running.prompts):
        yield running
        yield Phase(newcomers=newcomers, classes=(request_class,))
        return
    yield running._replace(prompts=())
    yield Phase(
        prompts=sorted(running.prompts, key=had_of),
        newcomers=newcomers,
        classes=(request_class,),
        goes_before=has_had_less,
    )


def heads_of_real_time(waiting: Waiting) -> list[Request]:
    """Return the real-time requests that wait and come into question, late ones first."""
    heads = (waiting.late(), waiting.of(RT))
    return list(dict.fromkeys(r for head in heads for r in itertools.islice(head, MAX_CANDIDATES)))


def leaves_waiting(step: StepBudget, request_class: RequestClass) -> bool:
    """Return whether a request of a class could have started by now, and is left out."""
    if step.skips.stopped_by.get(request_class) in (Reason.KV_NOW, Reason.BYTES):
        return False
    return any(
        request not in step.started and request.num_schedulable_tokens > 0
        for request in step.waiting.of(request_class)
    )


def one_by_one(
    step: StepBudget,
    requests: Iterable[Request],
    *,
    is_whole: Callable[[Request], bool] = lambda _request: False,
) -> Iterator[Phase]:
    """Yield requests, those that run and those that wait in one order, until time runs out.

    Each is a phase, so that the next may be chosen by what the step then is. Those that wait are
    left out once one of their class may not start, or too many are short of memory.
    """
    num_refused = dict.fromkeys(ALL_CLASSES, 0)
    for request in requests:
        of = request.request_class
        if request.state is not WAITING:
            yield Phase(prompts=(request,), classes=(), is_whole=is_whole(request))
        elif of not in step.skips.stopped_by and num_refused[of] <= LOOK_AHEAD:
            yield Phase(newcomers=(request,), classes=(of,), is_whole=is_whole(request))
            num_refused[of] += request not in step.started and request.num_schedulable_tokens > 0
        if step.has_run_out:
            return


# How far others may slow real-time decodes that have no target: the pace.
#
# Without a limit a step with a long prompt lasts as long as its tokens take, and all streams beside
# it stand still. So where real-time requests decode, the tokens of which have no target, a step
# lasts, as predicted, with `decodes` for the time of its real-time decodes alone,
#
#     with real-time prompts     max(2 x decodes, pace) at most, a tenth of the pace left
#     with best-effort work      be_stretch x decodes at most
#
# A tenth is for steps that take longer than predicted: the guard would have prompts crawl where a
# machine is noisy, and nothing is missed here. Twice the decodes, as a prompt would have no time at
# all where these take as long as the pace. The first prompt of a step gets `MIN_CHUNK` tokens in
# any case, with the padding that they bring, and best-effort work what is lent without a pace in
# one step of `EVERY_BEST_EFFORT` in which nothing of it would fit. A stream whose grammar has to
# see each token decodes in every other step: both together keep the pace.
#
# It is no target. Nothing is refused, counted or judged by it, and what has a target stands above
# it: a prompt may take the time that deadlines leave while it would need more than half of its own
# at the pace, together with the prompts that are due before it: less than half is tight. One that
# is late already keeps the pace. While nothing is known of what steps take there is none.

EVERY_BEST_EFFORT = 128
"""So rare that the 99th percentile of gaps does not show it."""


class Pace(NamedTuple):
    """What `--pace-ms` and `--be-stretch` set."""

    seconds: float = 0.033
    be_stretch: float = 1.5


class PaceLimits(NamedTuple):
    """Most predicted seconds of a step; infinite: there is no limit."""

    prompts_s: float = math.inf
    """With real-time prompts."""
    best_effort_s: float = math.inf
    """With best-effort work."""


def pace_limits(pace: Pace, decodes_s: float, *, steps_per_token: int = 1) -> PaceLimits:
    """Return the limits of a step.

    Args:
        pace: as set.
        decodes_s: predicted time of its real-time decodes alone.
        steps_per_token: steps between two tokens of the slowest stream.
    """
    prompts_s = max(2.0 * decodes_s, (1.0 - RESERVE_SHARE) * pace.seconds) / steps_per_token
    return PaceLimits(prompts_s, pace.be_stretch * decodes_s)


@dataclass(slots=True)
class StepPace:
    """The pace of one step that is being filled."""

    limits: PaceLimits = field(default_factory=PaceLimits)
    is_limit: bool = False
    """Whether the limit that was asked for last is one of these."""
    _may_be_exceeded: bool = False
    """Whether prompts that can be in time do not keep it."""

    def keep(self, pace: Pace, step: StepBudget, prompts: Iterable[Request]) -> None:
        """Find the limits of a step; there are none without a stream that keeps a pace.

        Such a stream has no target for its tokens, and decodes, in this step or (its grammar has to
        see the token before it) in the next one.

        Args:
            pace: as set.
            step: with its real-time decodes and nothing else.
            prompts: those that may be tried next.
        """
        running, cost = step.running, step.limits.cost
        table, rows = running.table, running.of(RT)
        num_generated = table.num_output[rows] + table.inflight_samples[rows]
        is_stream = (num_generated > 0) & (num_generated < table.max_tokens[rows])
        is_stream &= ~table.is_timed[rows] & (running.schedulable[rows] <= 1)
        streams = rows[is_stream]
        if not len(streams) or not cost.is_known:
            return
        together = np.union1d(step.decode_rows, streams)
        shape = StepShape().plus_decodes(len(together), int(table.next_position[together].sum()))
        steps_per_token = 2 if table.awaits_grammar[streams].any() else 1
        self.limits = pace_limits(pace, cost.seconds(shape), steps_per_token=steps_per_token)
        done_s, step_s = 0.0, self.limits.prompts_s
        for request in sorted(prompts, key=step.residual):
            if 0.0 < (due_s := step.residual(request)) < math.inf:
                rest = request.num_schedulable_tokens
                chunk = cost.tokens_within(shape, step_s, request.next_position + rest // 2, rest)
                done_s += math.ceil(rest / max(1, chunk)) * step_s
                self._may_be_exceeded |= is_tight(due_s - done_s, due_s)

    def limit(self, limit_s: float, prompt: Request | None = None, due_s: float = 0.0) -> float:
        """Return how long a step may take in which a prompt is, and note what limits it.

        Args:
            limit_s: the limit by all other rules; that of best-effort work is in it already.
            prompt: None: none that keeps the pace.
            due_s: seconds until its next token is due.
        """
        if limit_s > self.limits.prompts_s and prompt and prompt.request_class is RT:
            may_exceed = self._may_be_exceeded and 0.0 < due_s < math.inf
            if not (may_exceed or prompt.is_whole):
                limit_s = self.limits.prompts_s
        self.is_limit = limit_s < math.inf and limit_s in self.limits
        return limit_s


class Policy(Protocol):
    """Says in which order requests are tried; the planner's loop fills the step."""

    @property
    def is_class_aware(self) -> bool:
        """Whether real-time requests may take the memory of best-effort ones."""

    @property
    def meets_deadlines(self) -> bool:
        """Whether it looks at requests' deadlines."""

    def phases(self, step: StepBudget) -> Iterator[Phase]:
        """Yield what is to be tried, in order.

        When the next phase is asked for, what fitted of those before is in `step`, which also has
        the requests that run and wait, and the step's limits. Each request is tried once at most; a
        policy changes nothing but the time limits of the step.
        """
