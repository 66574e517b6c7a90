"""Every request by its own targets, prompts cut to fill time and memory at once (AccelGen).

Section 4 of the paper, each step, with T the time of the largest step:

    time left   of a request: until its token is due, less T for each chunk that it still needs
                (section 4.3). A job with a completion time has its time shared out over the tokens
                to come, which are estimated anew as they come (`router.slo.CompletionLedger`)
    urgent      are those with no more than T left: they join first, by time left; where time,
                tokens or memory end, the ones with most time left stay out
    limit       the tightest of their deadlines: the token budget of equation 6 is the inverse of
                the cost model there (section 4.2)
    decodes     all others that run stay
    selection   of the rest, those within GAMMA_S of the most urgent: one after the other, the one
                nearest to what is left of compute and of KV memory, both as shares of all there is
                (Algorithm 2); the last one is cut where the step ends (dynamic chunking)
    long ones   one long prompt is in progress at once (exclusive allocation, section 4.2), unless
                another is urgent

What cannot be in time any more, even alone, waits behind all that can: the paper does not say.
Parts can be left out, as in its section 6.3: `--without`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from lightserve.config import ServeConfig
from lightserve.config.options import split_names
from lightserve.router.policies.base import Step, one_by_one
from lightserve.router.policies.step_budget import LOOK_AHEAD
from lightserve.router.queue import MAX_CANDIDATES, MIN_CHUNK
from lightserve.router.request import WAITING, Request
from lightserve.router.step import Reason
from lightserve.router.step_cost import StepShape
from lightserve.types import BE, RT, RequestClass

GAMMA_S = 0.75


class AccelGenPolicy:
    """AccelGen (section 4), as the module describes it."""

    is_class_aware = True
    meets_deadlines = True

    def __init__(
        self, *, long_prompt_tokens: int = 4096, left_out: Collection[str] = frozenset()
    ) -> None:
        """`left_out` are parts as `--without` has them."""
        self._long_tokens = 0 if "exclusive" in left_out else long_prompt_tokens
        self._left_out = left_out

    @classmethod
    def of_config(cls, config: ServeConfig) -> AccelGenPolicy:
        """Return the policy with what `--long-prompt-tokens` and `--without` say."""
        return cls(
            long_prompt_tokens=config.long_prompt_tokens, left_out=split_names(config.without)
        )

    def fill(self, step: Step) -> None:
        """Fill a step; `Policy.fill` says how."""
        is_ordered = "ordering" not in self._left_out
        order = _Order(step, self._long_tokens, self._left_out)
        running, due = step.of(), step.budget.due
        decodes = due.in_order(running.decodes)
        due_s = due.of_rows(decodes, due.residuals.due)
        num_urgent = len(decodes)
        if is_ordered:
            num_urgent = int(np.searchsorted(due_s, 2 * order.step_s, side="right"))
        step.decode(decodes[:num_urgent])
        step.budget.limit_by_deadlines()
        rest = [*running.prompts, *_waiting(step, RT), *_waiting(step, BE)]
        urgent = sorted(filter(order.is_urgent, rest), key=order.rank) if is_ordered else []
        if urgent:
            step.urgent = {r for r in urgent if r.state is WAITING and r.request_class is BE}
            one_by_one(step, urgent, is_whole=order.is_whole)
            rest = [request for request in rest if request not in urgent]
        has_run_out = step.has_run_out
        step.decode(decodes[num_urgent:])
        if not (has_run_out or step.has_run_out):
            rest = [r for r in rest if r.state is not WAITING or _has_its_turn(step, r)]
            selected = order.selected(rest, order.has_long([*running.prompts, *urgent]))
            one_by_one(step, selected, is_whole=order.is_whole)


def _waiting(step: Step, request_class: RequestClass) -> list[Request]:
    """Return requests of a class that wait, jobs with a completion time before others of theirs."""
    waiting = step.waiting.of(request_class)
    if request_class is RT:
        return list(itertools.islice(waiting, MAX_CANDIDATES))
    oldest = itertools.islice(waiting, 1 if step.limits.turn.is_of_oldest else 0)
    jobs = itertools.islice(step.waiting.queue.jobs(), LOOK_AHEAD)
    found = dict.fromkeys(itertools.chain(oldest, jobs, waiting))
    return list(itertools.islice(found, MAX_CANDIDATES))


def _has_its_turn(step: Step, request: Request) -> bool:
    return request.request_class is RT or step.limits.turn.allows(request)


class _Order:
    """The order of requests that could join a step; times left are found once per step."""

    def __init__(self, step: Step, long_tokens: int, left_out: Collection[str]) -> None:
        limits = step.limits
        self._step, self._cost, self._left_out = step, limits.cost, left_out
        self._long_tokens = long_tokens
        self._budget = limits.max_num_batched_tokens
        self.step_s = self._cost.seconds(StepShape().plus(0, self._budget))
        """Predicted time of the largest step."""
        num_decodes = len(step.of().decodes)
        self._chunk = max(MIN_CHUNK, self._budget - num_decodes)
        """Tokens that decodes leave to a prompt in an average step."""
        self._ranks: dict[Request, _Rank] = {}
        self._left = (-1, 0, 0)
        """Tokens in the step, and what was left then of its compute and of the pool."""

    def rank(self, request: Request) -> _Rank:
        """Return its place: by what can be said of it, by priority, by the time that is left."""
        if (rank := self._ranks.get(request)) is None:
            rank = self._ranks[request] = self._rank(request)
        return rank

    def _rank(self, request: Request) -> _Rank:
        if "ordering" in self._left_out:
            return _Rank(_Prospect.IN_TIME, request.priority, 0.0)
        start, rest = self._step.found(request)[:2]
        residual_s = self._step.budget.due.of(request)
        alone = StepShape().plus(start, min(rest, self._budget))
        prospect = _Prospect.IN_TIME
        if residual_s < self._cost.seconds(alone):
            prospect = _Prospect.LATE
        elif residual_s == math.inf and request.request_class is BE:
            prospect = _Prospect.BACKGROUND
        num_chunks = math.ceil(rest / self._chunk)
        return _Rank(prospect, request.priority, residual_s - num_chunks * self.step_s)

    def is_urgent(self, request: Request) -> bool:
        """Whether it has to be in this step, and can be in time."""
        rank = self.rank(request)
        return rank.prospect is _Prospect.IN_TIME and rank.time_left_s <= self.step_s

    def is_whole(self, request: Request) -> bool:
        """Whether it is not cut."""
        del request
        return "chunking" in self._left_out

    def has_long(self, requests: list[Request]) -> bool:
        """Whether a long prompt is among requests."""
        return any(map(self._is_long, requests))

    def selected(self, requests: list[Request], has_long: bool) -> Iterator[Request]:
        """Yield requests, those alike in urgency by what they use of what is left.

        `has_long`: a long prompt is in progress, so that no other is to begin.
        """
        rest = requests
        if "ordering" not in self._left_out:
            rest = sorted(requests, key=self.rank)
        while rest:
            window = self._alike(rest)
            rest = rest[len(window) :]
            while window:
                request = window[0]
                if "batching" not in self._left_out:
                    request = min(window, key=self._distance)
                window.remove(request)
                if request.state is WAITING and self._is_long(request):
                    if has_long:
                        self._step.skips.note(request, Reason.ORDER)
                        continue
                    yield request
                    has_long = request in self._step.started
                else:
                    yield request

    def _alike(self, requests: list[Request]) -> list[Request]:
        """Return those at the head of a list that are as urgent as the first."""
        first = self.rank(requests[0])
        last = first._replace(time_left_s=first.time_left_s + GAMMA_S)
        return list(itertools.takewhile(lambda request: self.rank(request) <= last, requests))

    def _is_long(self, request: Request) -> bool:
        num_found = request.num_cached_tokens or 0
        if request.state is WAITING:
            num_found = self._step.found(request).start
        return 0 < self._long_tokens <= request.num_known_tokens - num_found

    def _distance(self, request: Request) -> float:
        """Return how far what it takes is from what is left, of compute and of the pool."""
        num_in_step = self._step.budget.shape.num_new
        if self._left[0] != num_in_step:
            compute = self._step.budget.num_tokens_in_time(request, self._budget)
            pool = self._step.limits.pool
            memory = max(0, pool.num_free + pool.num_cached - num_in_step)
            self._left = num_in_step, compute, memory
        _, compute, memory = self._left
        taken = self._step.found(request).num_left
        if self._is_long(request):
            taken = min(taken, compute, memory)
        num_slots = max(1, self._step.limits.pool.num_slots)
        return math.hypot((compute - taken) / self._budget, (memory - taken) / num_slots)


class _Prospect(IntEnum):
    IN_TIME = 0
    LATE = 1
    """Even alone."""
    BACKGROUND = 2
    """Nothing is due of it, and it is best effort."""


class _Rank(NamedTuple):
    prospect: _Prospect
    priority: int
    time_left_s: float
