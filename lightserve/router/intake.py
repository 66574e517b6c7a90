"""What may enter the queues: requests from messages, bounds per class, and when there is room."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lightserve.errors import ProtocolError
from lightserve.messages.common import Int32Array, unpack_int32
from lightserve.messages.frontend_router import Submit
from lightserve.router.queues import Backlog
from lightserve.router.request import Request
from lightserve.types import FrontendId, RequestClass, RequestKey

MIN_RETRY_S = 1.0
MAX_RETRY_S = 600.0
MIN_INTERVAL_S = 1e-6
"""What leaves within it counts as one."""
DRAIN_MEMORY_S = 30.0
"""Time constant of the average rate at which a queue drains."""


@dataclass(frozen=True)
class QueueLimits:
    """How much of one class may wait."""

    max_requests: int
    max_tokens: int
    """Prompt tokens; a request that has the queue for itself may be longer."""

    def has_room(self, backlog: Backlog, num_prompt_tokens: int) -> bool:
        """Whether a request may wait behind this backlog."""
        if backlog.num_requests == 0:
            return True
        return (
            backlog.num_requests < self.max_requests
            and backlog.num_tokens + num_prompt_tokens <= self.max_tokens
        )


class DrainRate:
    """How fast one class leaves its queue, in tokens per second; an exponential average."""

    def __init__(self) -> None:
        self._tokens_per_s = 0.0
        self._weight = 0.0
        self._num_tokens = 0
        self._since_s: float | None = None

    def start(self, now_s: float) -> None:
        """Say that the queue has become non-empty: time counts from here."""
        if self._since_s is None:
            self._since_s = now_s

    def leave(self, num_tokens: int, now_s: float, *, is_empty: bool) -> None:
        """Say that a request of `num_tokens` left to run, perhaps the last that waited."""
        if self._since_s is None:
            return
        self._num_tokens += num_tokens
        elapsed_s = now_s - self._since_s
        if elapsed_s < MIN_INTERVAL_S:
            return
        keep = np.exp(-elapsed_s / DRAIN_MEMORY_S)
        rate = self._num_tokens / elapsed_s
        self._tokens_per_s = keep * self._tokens_per_s + (1 - keep) * rate
        self._weight = keep * self._weight + (1 - keep)
        self._num_tokens = 0
        self._since_s = None if is_empty else now_s

    def retry_after_s(self, backlog: Backlog) -> float:
        """Return the seconds until half of the backlog is gone, at the rate seen so far."""
        if self._weight == 0.0:
            return MIN_RETRY_S
        rate = self._tokens_per_s / self._weight
        return float(np.clip(0.5 * backlog.num_tokens / rate, MIN_RETRY_S, MAX_RETRY_S))


class Intake:
    """Guards the queues: one bound and one rate per class."""

    def __init__(self, limits: Mapping[RequestClass, QueueLimits]) -> None:
        self._limits = dict(limits)
        self._rates = {request_class: DrainRate() for request_class in limits}

    def retry_after_s(self, request: Request, backlog: Backlog) -> float | None:
        """Return None if a new request may wait, else when to try again."""
        if self._limits[request.request_class].has_room(backlog, request.num_prompt_tokens):
            return None
        return self._rates[request.request_class].retry_after_s(backlog)

    def note_waiting(self, request: Request, now_s: float) -> None:
        """Say that a request waits."""
        self._rates[request.request_class].start(now_s)

    def note_started(self, request: Request, backlog: Backlog, now_s: float) -> None:
        """Say that a request was taken out to run; `backlog` is what is left of its class."""
        rate = self._rates[request.request_class]
        rate.leave(request.num_known_tokens, now_s, is_empty=backlog.num_requests == 0)


def request_of(
    frontend_id: FrontendId,
    submit: Submit,
    *,
    now_s: float,
    arrival_number: int,
    admission_limit: int | None,
) -> Request:
    """Return what the router keeps of a message.

    Raises:
        ProtocolError: it has no prompt or nothing to generate.
    """
    prompt = _prompt_of(submit)
    if len(prompt) == 0 or submit.max_tokens < 1:
        raise ProtocolError(f"request {submit.request_id} is empty")
    return Request(
        key=RequestKey(frontend_id, submit.request_id),
        prompt_token_ids=prompt,
        max_tokens=submit.max_tokens,
        eos_token_ids=frozenset(submit.eos_token_ids),
        sampling=submit.sampling,
        request_class=submit.request_class,
        arrival_s=now_s - submit.age_s,
        arrival_number=arrival_number,
        priority=submit.priority,
        slo=submit.slo,
        prediction_key=(submit.request_class, submit.prediction_key),
        constraint=submit.constraint,
        prefix_salt=submit.prefix_salt,
        num_acknowledged_tokens=0 if submit.needs_acknowledgement else None,
        admission_limit=min(submit.max_tokens, admission_limit or submit.max_tokens),
    )


def _prompt_of(submit: Submit) -> Int32Array:
    """Return the token ids, int32 [num_prompt_tokens]. Raises ProtocolError if they are none."""
    try:
        return np.concatenate([unpack_int32(segment.token_ids) for segment in submit.prompt])
    except ValueError as error:
        raise ProtocolError(f"request {submit.request_id}: not a prompt: {error}") from error
