"""The link between a frontend and the router.

A frontend connects, says `FrontendHello`, and gets `RouterWelcome` as soon as the workers are
ready (again after each restart of the workers). Then `Submit` and `Abort` go one way,
`TokenDelta` (one frame for all tokens of a step) and `RouterStatus` (about once a second) the
other. Times never cross: `age_s` is a duration.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from lightserve.messages.common import Message, PromptSegment
from lightserve.types import FinishReason, FrontendId, RequestClass, RequestId, SamplingParams


class FrontendHello(Message, frozen=True):
    """First message of a frontend, to each router it is told of."""

    protocol_version: int
    boot_id: str
    """The router boot that the supervisor named to this frontend."""
    config_hash: str
    frontend_id: FrontendId
    generation: int
    """How often this frontend has been started, from 0 (`ChildSpec.generation`)."""


class Submit(Message, frozen=True):
    """A validated request. The router never sees text."""

    request_id: RequestId
    prompt: list[PromptSegment]
    """At least one token in all; with `max_tokens` at most the model's context."""
    max_tokens: int
    """>= 1."""
    eos_token_ids: list[int]
    """Any of these ends the request; it is the last token delivered, with STOP."""
    sampling: SamplingParams
    request_class: RequestClass
    age_s: float
    """Seconds since the frontend had the request's headers."""
    prediction_key: str = ""
    """Requests of a class with equal keys are expected to have outputs of like length."""


class Abort(Message, frozen=True):
    """Forget this request in whatever state it is; unknown ids are ignored."""

    request_id: RequestId


FrontendMessage = FrontendHello | Submit | Abort


class ErrorCode(StrEnum):
    """Why the router ended a request without its whole answer."""

    WORKER_LOST = "worker_lost"
    """The workers died after tokens had been sent, or twice."""
    NON_FINITE_LOGITS = "non_finite_logits"
    TOO_LARGE = "too_large"
    """Prompt plus max_tokens can never fit into the KV pool or the context."""
    QUEUE_FULL = "queue_full"


class RouterWelcome(Message, frozen=True):
    """The router and its workers can serve; also sent again after the workers were replaced."""

    boot_id: str
    num_kv_slots: int
    """Tokens that the KV pool holds: prompt + max_tokens may not exceed it."""


class RequestDelta(msgspec.Struct, frozen=True, array_like=True):
    """News of one request: tokens first, then perhaps its end."""

    request_id: RequestId
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    error: ErrorCode | None = None
    """Set exactly when `finish_reason` is ERROR."""


class TokenDelta(Message, frozen=True):
    """All of one step's news for one frontend."""

    requests: list[RequestDelta]


class RouterStatus(Message, frozen=True):
    """The router's pulse, about once a second and at each change of `workers_ready`."""

    workers_ready: bool
    num_waiting: int
    num_running: int
    num_steps: int
    """Steps finished since boot."""
    stalled_s: float
    """Seconds since the last finished step while work is in flight; 0 otherwise."""
    worker_busy_s: float
    """Cumulative execution time of rank 0."""
    worker_idle_s: float
    """Cumulative time rank 0 waited for a plan although requests could have advanced."""


RouterMessage = RouterWelcome | TokenDelta | RouterStatus
