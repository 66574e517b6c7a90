"""How long a class's backlog waits: what a client that is refused is told as `Retry-After`.

The answer is the time until everything of the class that waits now has begun: when a request that
were let in at the end of the queue would begin, and when one that comes back finds it empty unless
others came. It is predicted from what is known of the work, and corrected by what was seen.

    wait = work(prompt tokens, decodes) / pace

*Work* is in seconds of a full server, by the cost model: prompt tokens of the backlog (less the
share that is found in the cache), the encoding of their images, what running prompts have left of
both, and the decodes until the last waiting request finds a place. In a steady state each place is
free again after one output, so these are the outputs of those that wait; where the batch is young
(its outputs have not come half-way on average) or has free places, more or less. Outputs are as
long as those of the class have been, at most what clients declared.

*Pace* is the work done for the class per second, over the time in which some of it waited: it has
the other class's share, admission's caution and the model's errors in it. Before anything was
seen it is 1. While no step times are known, work is in tokens, and the pace what was seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from lightserve.router.arrivals import MEMORY_S, NEWEST_WEIGHT, NUM_PRIOR
from lightserve.router.kv.cache import KVStore
from lightserve.router.output_lengths import expected_output
from lightserve.router.pipeline import Pipeline
from lightserve.router.queue import Backlog, WaitingQueue
from lightserve.router.request import Request
from lightserve.router.request_table import RequestTable
from lightserve.router.step_cost import StepShape
from lightserve.types import BE, RT, RequestClass

if TYPE_CHECKING:
    from lightserve.router.config import SchedulerConfig
    from lightserve.router.step import PlannedStep

MIN_RETRY_S = 1.0
MAX_RETRY_S = 600.0
PRIOR_S = 1.0
"""Seconds after which observations count as much as the cost model."""
FULL_SHARE = 0.9
"""A step with less of its token budget left over had no room for more of a prompt."""


class Work(NamedTuple):
    """Tokens to compute, or computed."""

    num_prompt: float = 0.0
    """In rows of several, known tokens that are computed again included."""
    num_decodes: float = 0.0
    """In rows of one, with accepted drafts."""
    encode_s: float = 0.0
    """Seconds in which images are encoded, as predicted."""

    def plus(self, other: Work, keep: float = 1.0) -> Work:
        """Return what is kept of this, and all of another."""
        return Work(*[keep * own + more for own, more in zip(self, other, strict=True)])


class _Average:
    """Mean and variance: of all at first, then exponential."""

    def __init__(self, prior: float) -> None:
        self.mean = prior
        self.variance = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        self.count += 1
        weight = max(NEWEST_WEIGHT, 1 / self.count)
        off = value - self.mean
        self.mean += weight * off
        self.variance = (1 - weight) * (self.variance + weight * off * off)


class _OfClass:
    """Observations of one class."""

    def __init__(self) -> None:
        self.num_output = _Average(0.0)
        """Tokens of an output."""
        self.uncached_share = _Average(1.0)
        """Share of known tokens that starting requests have to compute."""
        self.seen_s = 0.0
        """Time in which some of it waited; this and the work done then fade."""
        self.seen = Work()
        self.is_waiting = False
        """Whether some of it waited when the step before ended."""
        self.is_held = False
        """Whether the last step had room for more prompt tokens although some of it waited, and
        encoded no image of it."""

    def see(self, work: Work, seconds: float) -> None:
        keep = math.exp(-seconds / MEMORY_S)
        self.seen_s = keep * self.seen_s + seconds
        self.seen = self.seen.plus(work, keep)


class QueueDelay:
    """Predicts waiting times. Told of steps and requests by the core and its booking."""

    def __init__(
        self, config: SchedulerConfig, waiting: WaitingQueue, rows: RequestTable, pipeline: Pipeline
    ) -> None:
        self._waiting = waiting
        self._rows = rows
        self._pipeline = pipeline
        self._max_num_seqs = config.max_num_seqs
        self._max_be_seqs = config.max_be_seqs
        self._is_class_aware = config.policy.is_class_aware
        self._clock_s = 0.0
        self._of = {c: _OfClass() for c in RequestClass}
        self.computed = {c: Work() for c in RequestClass}
        """Since boot."""

    # ---------------------------------------------------------------- what happens

    def note_step(
        self, planned: PlannedStep, shape: StepShape, accepted: Sequence[tuple[Request, int]] = ()
    ) -> None:
        """Learn of a step that has finished and of accepted drafts, before others are booked."""
        done = work_of(planned, shape)
        for request, count in accepted:
            done[request.request_class] = done[request.request_class].plus(Work(0.0, count))
        clock_s = self._pipeline.busy_s + self._pipeline.idle_s
        seconds, self._clock_s = clock_s - self._clock_s, clock_s
        for request_class, work in done.items():
            known = self._of[request_class]
            self.computed[request_class] = self.computed[request_class].plus(work)
            waits_now = self._waiting.backlog(request_class).num_requests > 0
            has_waited, known.is_waiting = known.is_waiting and waits_now, waits_now
            if has_waited:
                known.see(work, seconds)
            has_room = shape.num_new < FULL_SHARE * self._pipeline.max_num_batched_tokens
            known.is_held = has_waited and has_room and request_class not in planned.encode_s

    def note_started(self, request: Request, num_there: int) -> None:
        """Learn how many tokens of a request that starts are not computed."""
        known = self._of[request.request_class]
        known.uncached_share.add(1.0 - num_there / request.num_known_tokens)

    def note_length(self, request: Request, num_tokens: int) -> None:
        """Learn how long an output has become."""
        self._of[request.request_class].num_output.add(num_tokens)

    # ---------------------------------------------------------------- what will be

    def mean_output(self, request_class: RequestClass) -> float:
        """Return how long outputs of a class have been on average; 0: none has ended."""
        return self._of[request_class].num_output.mean

    def retry_after_s(self, request_class: RequestClass, kv: KVStore | None) -> float:
        """Return what a refused client is told; `kv` is None while there are no workers."""
        return min(MAX_RETRY_S, max(MIN_RETRY_S, self.seconds(request_class, kv)))

    def seconds(self, request_class: RequestClass, kv: KVStore | None) -> float:
        """Return the predicted time until all of a class that waits has begun; 0: unknown."""
        backlog = self._waiting.backlog(request_class)
        if backlog.num_requests == 0:
            return 0.0
        known = self._of[request_class]
        output = self._output(known, backlog)
        context = backlog.num_tokens / backlog.num_requests + output.mean / 2
        running = self._rows.of(self._rows.rows)
        own = [r for r in running if r.request_class is request_class]
        num_state = 0 if kv is None else kv.states.num_slots
        num_free = self._num_free_places(request_class, running, kv, context + num_state)
        batch = _Batch(max(1, len(own) + num_free), context)
        num_prompt = known.uncached_share.mean * backlog.num_tokens
        num_prompt += sum(max(0, r.num_prompt_tokens - r.next_position) for r in running)
        encoding = self._pipeline.encoding
        encode_s = known.uncached_share.mean * encoding.seconds_of(backlog.images)
        encode_s += sum(encoding.seconds_left(r, r.next_position) for r in running)
        num_decodes = 0.0
        if known.is_held:
            num_free = 0
        if backlog.num_requests > num_free:
            num_decodes = output.mean * (backlog.num_requests - num_free) + output.young * num_free
            num_decodes += sum(max(0.0, output.young - len(r.output_token_ids)) for r in own)
        work_s = self._seconds(Work(num_prompt, num_decodes, encode_s), batch)
        seen_s, pace = known.seen_s, self._seconds(known.seen, batch)
        if self._pipeline.cost.is_known:
            seen_s, pace = seen_s + PRIOR_S, pace + PRIOR_S
        return work_s * seen_s / pace if pace > 0.0 else 0.0

    def _num_free_places(
        self,
        request_class: RequestClass,
        running: Sequence[Request],
        kv: KVStore | None,
        num_slots: float,
    ) -> int:
        """Return how many more requests of a class could run, each with so many slots.

        Real-time ones get those of best-effort ones where the policy knows classes.
        """
        num_available, num_rows = 0 if kv is None else kv.num_available, self._max_num_seqs
        if self._is_class_aware and request_class is RT:
            yielding = [r for r in running if r.request_class is BE]
            num_available += sum(r.num_held_tokens + len(r.recurrent.slots) for r in yielding)
            num_rows += len(yielding)
        elif request_class is BE:
            num_be = sum(r.request_class is BE for r in running)
            num_rows = min(num_rows, self._max_be_seqs + len(running) - num_be)
        return max(0, min(int(num_available / num_slots), num_rows - len(running)))

    def _output(self, known: _OfClass, backlog: Backlog) -> _Output:
        """Return what is expected of the outputs of those that wait.

        What is left of an output at a random time is (1 + cv^2) / 2 of a mean one, cv being the
        coefficient of variation: half where all are as long, all of it where lengths have no
        memory, which is also what is assumed before any was seen.
        """
        limit = backlog.num_output_tokens / backlog.num_requests
        lengths = known.num_output
        prior = expected_output(limit)
        if lengths.count == 0:
            return _Output(prior, 0.0)
        share = lengths.count / (lengths.count + NUM_PRIOR)
        mean = share * min(lengths.mean, limit) + (1 - share) * prior
        evenness = max(0.0, 0.5 - 0.5 * lengths.variance / lengths.mean**2)
        return _Output(mean, share * evenness * mean)

    def _seconds(self, work: Work, batch: _Batch) -> float:
        """Return the time of so much work on a full server; while no times are known, in tokens,
        with no images.

        Each step has at most a decode for each request of the batch, and at most so many tokens
        as the budget has.
        """
        num_tokens = work.num_prompt + work.num_decodes
        num_steps = max(
            num_tokens / self._pipeline.max_num_batched_tokens,
            work.num_decodes / batch.num_requests,
        )
        if not self._pipeline.cost.is_known:
            return num_tokens
        if num_steps == 0.0:
            return work.encode_s
        num_decodes, chunk = work.num_decodes / num_steps, work.num_prompt / num_steps
        shape = StepShape(
            num_new=round(num_decodes),
            num_decodes=round(num_decodes),
            decode_context=round(num_decodes * batch.context),
        )
        if chunk >= 2:
            shape = shape.plus(round(batch.context / 2), round(chunk))
        return num_steps * self._pipeline.cost.seconds(shape) + work.encode_s


class _Output(NamedTuple):
    """Mean output of waiting requests."""

    mean: float
    """Tokens."""
    young: float
    """Tokens left to a request that has just begun, beyond the mean of running ones."""


class _Batch(NamedTuple):
    """A full one."""

    num_requests: int
    context: float
    """Tokens of each, on average."""


def work_of(planned: PlannedStep, shape: StepShape) -> dict[RequestClass, Work]:
    """Return what a step of some shape computes for each class, drafts left out."""
    of_be = [num_tokens for request, num_tokens in planned.chunks if request.request_class is BE]
    num_decodes = of_be.count(1)
    be_prompt = sum(of_be) - num_decodes
    num_decodes += planned.decodes.count(BE)
    be = Work(be_prompt, num_decodes, planned.encode_s.get(BE, 0.0))
    num_prompt = shape.num_new - shape.num_decodes - shape.num_drafts
    encode_s = planned.encode_s.get(RT, 0.0)
    rt = Work(num_prompt - be.num_prompt, shape.num_decodes - num_decodes, encode_s)
    return {RT: rt, BE: be}
