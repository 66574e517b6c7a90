"""What may enter the queues: requests from messages, and bounds per class."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightserve.errors import ProtocolError
from lightserve.messages.common import Int32Array, unpack_int32
from lightserve.messages.frontend_router import Submit
from lightserve.router.plan_bytes import parameter_bytes
from lightserve.router.queues import Backlog
from lightserve.router.request import Request
from lightserve.types import FrontendId, RequestKey


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
        num_parameter_bytes=parameter_bytes(
            submit.sampling, submit.eos_token_ids, submit.constraint
        ),
        num_acknowledged_tokens=0 if submit.needs_acknowledgement else None,
        admission_limit=min(submit.max_tokens, admission_limit or submit.max_tokens),
    )


def _prompt_of(submit: Submit) -> Int32Array:
    """Return the token ids, int32 [num_prompt_tokens]. Raises ProtocolError if they are none."""
    try:
        return np.concatenate([unpack_int32(segment.token_ids) for segment in submit.prompt])
    except ValueError as error:
        raise ProtocolError(f"request {submit.request_id}: not a prompt: {error}") from error
