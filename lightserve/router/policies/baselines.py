"""Policies to compare with: each is an order, under a static token budget."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from lightserve.router.policies.base import Step, in_turns
from lightserve.router.policies.pace import Pace
from lightserve.router.queue import MAX_CANDIDATES
from lightserve.router.request import WAITING, Request
from lightserve.router.request_table import NO_ROWS
from lightserve.types import BE, RT, RequestClass


class _ClassBlind:
    """Neither classes nor deadlines count."""

    is_class_aware = False
    meets_deadlines = False


def in_queue_order(step: Step) -> Iterator[Request]:
    """Yield requests that wait in the order of the queue, of a class as many as may start."""
    seen: set[Request] = set()
    for request in step.waiting if step.is_open(BE) else step.waiting.of(RT):
        seen.add(request)
        yield request
        if not step.is_open(BE):  # not through all of these
            yield from (r for r in step.waiting.of(RT) if r not in seen)
            return


class FcfsPolicy(_ClassBlind):
    """Whole prompts first, else decodes; never both in one step.

    First come, first served, prefill before decode, as early vLLM did: a baseline of BROS and
    AccelGen. A prompt longer than the budget runs alone.
    """

    def fill(self, step: Step) -> None:
        """Fill a step; `Policy.fill` says how."""
        step.take(newcomers=in_queue_order(step), is_whole=True)
        if step.budget.is_empty:
            step.run(step.of())


class ChunkedPolicy(_ClassBlind):
    """Decodes first, then chunks of prompts up to the budget (Sarathi-Serve)."""

    def fill(self, step: Step) -> None:
        """Fill a step; `Policy.fill` says how."""
        step.run(step.of())
        step.take(newcomers=in_queue_order(step))


class RoundRobinPolicy(_ClassBlind):
    """Two queues served in turn (BROS, section II-B: "RR"): real-time ones in even steps.

    A class that has nothing to do leaves its turn to the other.
    """

    def __init__(self, *, is_whole: bool = False) -> None:
        """`is_whole`: prompts are not cut, as there."""
        self._is_whole = is_whole

    def fill(self, step: Step) -> None:
        """Fill a step; `Policy.fill` says how."""
        for request_class in (RT, BE) if step.limits.step_number % 2 == 0 else (BE, RT):
            step.run(step.of(request_class), is_whole=self._is_whole)
            newcomers = step.waiting.of(request_class)
            step.take(newcomers=newcomers, classes=(request_class,), is_whole=self._is_whole)
            if not step.budget.is_empty:
                return


@dataclass
class PriorityPolicy:
    """Real-time requests before best-effort ones, which get what those leave of a step.

    The strict scheduler of two classes that the papers compare with (Echo's BS), and the tuned
    baseline of every table about both classes. While a real-time request that could start waits, no
    best-effort one runs. Within a class keys take turns.
    """

    is_class_aware: ClassVar[bool] = True
    meets_deadlines: ClassVar[bool] = False
    pace: Pace | None = None
    """The pace of real-time decodes without targets; None: they keep none."""

    def fill(self, step: Step) -> None:
        """Fill a step; `Policy.fill` says how."""
        real_time = step.of(RT)
        if self.pace is not None:
            step.decode(real_time.decodes)
            step.keep_pace(self.pace, ())
            real_time = real_time._replace(decodes=NO_ROWS)
        in_turns(step, real_time, self.newcomers(step), RT)
        if step.budget.is_full or step.leaves_waiting(RT):
            return
        step.budget.lend(step.budget.pace.best_effort_s)
        in_turns(step, step.of(BE), step.waiting.of(BE), BE)

    def newcomers(self, step: Step) -> Iterable[Request]:
        """Return real-time requests that wait, in the order in which they start."""
        return step.waiting.of(RT)


class SjfPolicy(PriorityPolicy):
    """Shortest prompt first: `priority`, with real-time newcomers in the order of their lengths.

    What is short waits least and counts as much as what is long, so that past capacity no order
    that knows deadlines alone meets more of them; long prompts then wait while shorter ones come.
    """

    def newcomers(self, step: Step) -> Iterable[Request]:
        """Return real-time requests that wait, those with least to compute first."""
        return sorted(step.waiting.of(RT), key=lambda request: step.found(request).num_left)


# Multi-level feedback queues over iterations (FastServe; a baseline of AccelGen).
#
# Five queues. A request is in the queue whose limit of service it has not reached; service is
# tokens, of prompt and output, and each queue's share of it twice the one's before:
#
#     queue             0     1     2      3      4
#     tokens        < 128  <384  <896  <1920   more
#
# So a long prompt joins a lower queue at once (FastServe's skip-join: its first iteration would
# use up the share of those above), and one that generates is demoted step by step. A step is filled
# from the top queue down, within a queue decodes first, then prompts in progress, then newcomers by
# priority and arrival. Against starvation one that was overtaken too often joins the top queue.

SERVICE_LIMITS = (128, 384, 896, 1920)
"""Tokens at which a request leaves a queue for the next one."""
MAX_OVERTAKEN = 64
"""A request that was overtaken this often joins the top queue."""


class MlfqPolicy(_ClassBlind):
    """Requests that have had least service go first."""

    def fill(self, step: Step) -> None:
        """Fill a step; `Policy.fill` says how."""
        newcomers = [
            request
            for request_class in RequestClass
            for request in itertools.islice(step.waiting.of(request_class), MAX_CANDIDATES)
        ]
        newcomers.sort(key=lambda request: (request.priority, request.arrival_number))
        step.take(
            sorted(step.running, key=_rank),
            sorted(newcomers, key=_rank),
            goes_before=lambda newcomer, request: _rank(newcomer) < _rank(request),
        )


def queue_of(request: Request) -> int:
    """Return the number of a request's queue, 0 … 4."""
    if request.num_overtaken >= MAX_OVERTAKEN:
        return 0
    return bisect_right(SERVICE_LIMITS, request.num_known_tokens)


def _rank(request: Request) -> tuple[int, int]:
    """Return a sort key; requests of equal rank stay in order."""
    is_waiting = request.state is WAITING
    return queue_of(request), 2 if is_waiting else request.num_schedulable_tokens > 1
