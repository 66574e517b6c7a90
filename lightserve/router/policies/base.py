"""Who advances in a step: the interface of a policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lightserve.router.admission.base import AdmissionRound
from lightserve.router.demand import NO_OUTLOOK, Outlook, TimeShare
from lightserve.router.queue import Turn
from lightserve.router.request import WAITING, Request
from lightserve.router.request_table import Decodes, Running
from lightserve.router.shares import Reason, Share, Skips
from lightserve.router.step_cost import StepCost, StepGuard
from lightserve.types import BE, RT, RequestClass

NO_LIMIT = 1 << 30


@dataclass(frozen=True)
class StepLimits:
    """What a step may use."""

    max_num_batched_tokens: int
    num_free_rows: int
    """For newcomers of this step, of which there may be no more than `planning.MAX_NEWCOMERS`."""
    num_yielding_rows: int = 0
    """Rows of best-effort requests, which real-time newcomers get beyond these."""
    max_be_seqs: int = NO_LIMIT
    """Most best-effort requests that run at once."""
    step_number: int = 0
    """Steps that were planned before this one."""
    num_slots: int = 0
    """Size of the KV pool."""
    num_free_slots: int = 0
    """Slots of it that hold nothing, cached KV counting as something."""
    start_s: float = 0.0
    """When the step will start, as predicted, on the router's clock."""
    cost: StepCost | None = None
    """Predicts what it takes; None: nobody asks."""
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
    skips: Skips = field(default_factory=Skips)
    """Where the policy says whom it leaves out, and why."""


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

    def late(self) -> Iterable[Request]:
        """Return the real-time ones that never ran and are late; `of` has them at its end."""


LOOK_AHEAD = 8
"""Best-effort requests that may be passed over in one step."""


def admissible(
    waiting: Iterable[Request], admission: AdmissionRound, limits: StepLimits
) -> Iterator[Request]:
    """Yield waiting requests that may start, in order, each already counted by `admission`.

    A real-time request that may not start ends the search. A best-effort one may be passed
    over: the order of batch work is free, and a smaller one behind it may fit now; but where it is
    the turn of the oldest, it is that one or none. `limits.skips` is told of those who are passed,
    and what ended the search of the class that it ended with.
    """
    skips, turn = limits.skips, limits.turn
    num_passed = 0
    for request in waiting:
        if request.num_schedulable_tokens == 0:
            skips.note(request, Reason.BLOCKED)
            continue  # preempted, and its frontend has not caught up with it yet
        is_best_effort = request.request_class is BE
        if is_best_effort and not turn.allows(request):
            skips.note(request, Reason.ORDER)
            skips.stop(BE, Reason.ORDER)
            return
        if admission.admit(request):
            if is_best_effort:
                turn.note(request)
            yield request
            continue
        skips.note(request, Reason.KV_FUTURE)
        if not is_best_effort or num_passed == LOOK_AHEAD:
            skips.stop(request.request_class, Reason.KV_FUTURE)
            return
        num_passed += 1


def within_be_limit(
    waiting: Waiting,
    running: Running,
    limits: StepLimits,
    chosen: Sequence[Share],
) -> Iterator[Request]:
    """Yield the waiting in the order of the queue, of best-effort ones as many as may run.

    For policies that know no classes. `chosen` grows while this goes on: newcomers in it count.
    Once the limit is reached, the other class alone is gone through.
    """
    num_left = limits.max_be_seqs - len(running.of(BE))
    num_counted = 0
    seen: set[Request] = set()
    if num_left <= 0:
        limits.skips.stop(BE, Reason.ROWS)
    for request in waiting if num_left > 0 else waiting.of(RT):
        num_left -= num_best_effort(
            part.request
            for part in chosen[num_counted:]
            if not isinstance(part, Decodes) and _is_new(part.request)
        )
        num_counted = len(chosen)
        if request.request_class is BE and num_left <= 0:
            limits.skips.stop(BE, Reason.ROWS)
            yield from (r for r in waiting.of(RT) if r not in seen)
            return
        seen.add(request)
        yield request


def num_best_effort(requests: Iterable[Request]) -> int:
    """Return how many of these are best-effort."""
    return sum(request.request_class is BE for request in requests)


def _is_new(request: Request) -> bool:
    return request.state is WAITING


class Policy(Protocol):
    """Chooses the rows of a step. Changes nothing; the core commits what was chosen."""

    @property
    def is_class_aware(self) -> bool:
        """Whether real-time requests may take the memory of best-effort ones."""

    @property
    def meets_deadlines(self) -> bool:
        """Whether it looks at requests' deadlines."""

    def select(
        self,
        running: Running,
        waiting: Waiting,
        limits: StepLimits,
        admission: AdmissionRound,
    ) -> Sequence[Share]:
        """Return who advances, each request at most once, each by 1 … num_schedulable_tokens.

        A paused request may instead load some of its KV beside the step, if anybody advances.

        `running` comes in order of admission, without ended requests; `waiting` in the order
        of the queue. A waiting request may be chosen if `admission` admits it and a row is free.

        Everybody running who is not chosen is named in `limits.skips`, and everybody waiting who
        was looked at; where some of a class were not, what stopped the search is.
        """
