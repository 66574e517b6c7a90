"""The link between a frontend and the router.

A frontend connects, says `FrontendHello`, and gets `RouterWelcome` as soon as the workers are
ready (again after each restart of the workers). Then `Submit`, `Abort`, `Acknowledge`, `Finish` and
`BatchDue` go one way, `TokenDelta` (one frame for all tokens of a step) and `RouterStatus` (about
once a second) the other; `MaySubmit` is answered by `Verdict`, `DescribeKV` by `KVMap`. Times never
cross: `age_s` is a duration.

Stop strings are text, which the router never sees: a request that has some sets
`needs_acknowledgement`, runs at most MAX_UNACKNOWLEDGED_TOKENS past the last acknowledgement, and
ends by `Finish` at the token that completed one.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from lightserve.messages.common import (
    MAX_FRAME_BYTES,
    Constraint,
    DeviceFacts,
    Int32Array,
    Message,
    PromptSegment,
    Thinking,
    TokenLogprob,
    pack_int32,
    unpack_int32,
    unpack_int64,
)
from lightserve.messages.images import MAX_PIXEL_BYTES, Image
from lightserve.types import (
    NO_SLO,
    SLO,
    FinishReason,
    FrontendId,
    RequestClass,
    RequestId,
    RequestOutput,
    SamplingParams,
    StepId,
)

MAX_UNACKNOWLEDGED_TOKENS = 16
"""How far a request with stop strings runs ahead of what its frontend has looked at."""


class FrontendHello(Message, frozen=True):
    """First message of a frontend, to each router it is told of."""

    protocol_version: int
    boot_id: str
    """The router boot that the supervisor named to this frontend."""
    config_hash: str
    frontend_id: FrontendId
    incarnation: int
    """How often this frontend has been started, from 0 (`ChildSpec.incarnation`)."""
    session: int
    """A number that no other hello has; the router's status repeats it."""


class Client(msgspec.Struct, frozen=True, array_like=True):
    """Whose a request is: those of a class share the engine evenly (`router.accounts`)."""

    key: str = ""
    """Stands for the API key that it came with; empty: none is needed."""
    fairness_id: str = ""
    """Behind the key of a gateway: stands for whose it is there."""
    requests_per_minute: int = 0
    """Quotas of the key; 0: it has none."""
    tokens_per_minute: int = 0


NO_CLIENT = Client()


class Submit(Message, frozen=True):
    """A validated request. The router never sees text."""

    MAX_BYTES: ClassVar[int] = MAX_FRAME_BYTES + MAX_PIXEL_BYTES

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
    priority: int = 0
    """Within its class, lower ones start first."""
    slo: SLO = NO_SLO
    """Targets of the request, the server's own included."""
    prediction_key: str = ""
    """Requests of a class with equal keys are expected to have outputs of like length."""
    prefix_salt: str = ""
    """Only requests with equal salts may share KV of equal prefixes."""
    num_retained_tokens: int = 0
    """So many at the beginning of the prompt should stay longer in the prefix cache."""
    retention_s: float = 0.0
    """How long, at most, from when they have been computed."""
    client: Client = NO_CLIENT
    batch: int = 0
    """Lines of a batch have its number, and are due together, by `slo.completion_s` of the last one
    or by `BatchDue`; 0: it is none."""
    is_first: bool = True
    """Whether it is the first of its HTTP request: it counts as a request, and may be refused for a
    quota."""
    needs_acknowledgement: bool = False
    constraint: Constraint | None = None
    names: tuple[str, ...] = ()
    """Names that the client knows: the answer's id, its X-Request-Id. For the decision log."""
    output: RequestOutput = RequestOutput.TOKENS
    """With a vector, `max_tokens` is 1."""
    thinking: Thinking | None = None
    """Reasoning with which the output may begin; None: there is none that is known."""
    prediction: bytes = b""
    """int32, see `pack_int32`: output that the client expects; empty: none."""
    images: tuple[Image, ...] = ()
    """Images of the prompt, in order; their tokens there are place-holders."""


class MaySubmit(Message, frozen=True):
    """From a frontend: answer with `Verdict`, as if this came now; nothing is kept of it.

    So pictures of a request that is refused need not be decoded.
    """

    query_id: int
    submit: Submit
    """The first of its choices, with images whose pixels and digests mean nothing."""


class Progress(NamedTuple):
    """How far the frontend has looked at a request's output."""

    request_id: RequestId
    num_tokens: int


class Acknowledge(Message, frozen=True):
    """These outputs have no stop string so far; unknown ids are ignored."""

    progress: list[Progress]


class Finish(Message, frozen=True):
    """A request's output ends after `num_tokens` tokens: a stop string was complete there.

    Tokens after it are discarded; nothing more is sent of the request. Unknown ids are ignored.
    """

    request_id: RequestId
    num_tokens: int
    """>= 1."""


class Abort(Message, frozen=True):
    """Forget this request in whatever state it is; unknown ids are ignored."""

    request_id: RequestId


class BatchDue(Message, frozen=True):
    """All lines of a batch that are here should end by then; no effect if there are none."""

    batch: int
    due_in_s: float
    """Negative: they should have ended."""


class SentSoFar(Message, frozen=True):
    """Answers each status of this session, so that the router knows what did not arrive."""

    num_messages: int
    """Sent since the hello, without that and without these."""


class ErrorCode(StrEnum):
    """Why the router ended a request without its whole answer."""

    WORKER_LOST = "worker_lost"
    """The workers died after tokens had been sent, or twice."""
    NON_FINITE_LOGITS = "non_finite_logits"
    CONSTRAINT_FAILED = "constraint_failed"
    """The grammar of its constraint went beyond its limits."""
    TOO_LARGE = "too_large"
    """Prompt plus max_tokens can never fit into the KV pool or the context."""
    QUEUE_FULL = "queue_full"
    REQUEST_QUOTA = "request_quota"
    TOKEN_QUOTA = "token_quota"
    """The key's tokens per minute are used up."""
    INVALID = "invalid"
    """Its message says what no frontend may say."""


class Verdict(Message, frozen=True):
    """From the router: the answer to `MaySubmit`."""

    query_id: int
    error: ErrorCode | None = None
    """The reason of a refusal; None: the request may come."""
    retry_after_s: float = 0.0
    """This and what follows are as in `RequestDelta`."""
    max_tokens: int = 0


class RouterWelcome(Message, frozen=True):
    """The router and its workers can serve; also sent again after the workers were replaced."""

    boot_id: str
    num_kv_slots: int
    """Tokens of one request that the KV pool holds: prompt + max_tokens may not exceed it."""
    device: DeviceFacts | None = None
    """Device of rank 0."""


NOTHING_PREDICTED = (0, 0)


class RequestDelta(msgspec.Struct, frozen=True, array_like=True):
    """News of one request: tokens first, then perhaps its end."""

    request_id: RequestId
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    error: ErrorCode | None = None
    """Set exactly when `finish_reason` is ERROR."""
    retry_after_s: float = 0.0
    """With QUEUE_FULL: when there will be room, as far as the router can tell. With a quota: when
    there will be some of it again."""
    num_cached_tokens: int = 0
    """With the first token: prompt tokens whose KV was found, not computed."""
    logprobs: list[TokenLogprob] = []
    """One for each of `token_ids` if the request asked for them."""
    prompt_logprobs: list[TokenLogprob] = []
    """The next ones of the prompt's tokens 1 …, in order; all come before the first token."""
    scheduled_slo: SLO | None = None
    """With the first token: what the request is scheduled by, where the router had to raise some
    of its targets to what an idle server can do."""
    max_tokens: int = 0
    """With TOO_LARGE: how many tokens prompt and output may have together."""
    vector: bytes = b""
    """float32 [hidden_size], with the one token of a request for a vector."""
    predicted: tuple[int, int] = NOTHING_PREDICTED
    """Tokens of its prediction that were guessed since the last news: right ones, wrong ones."""


class TokenDelta(Message, frozen=True):
    """All of one step's news for one frontend: a request is in its columns or in its list."""

    request_ids: bytes = b""
    """int64, see `pack_int64`: those of which the only news is one token each."""
    token_ids: bytes = b""
    """int32, see `pack_int32`: these tokens, in the same order."""
    requests: list[RequestDelta] = msgspec.field(default_factory=list)
    """All other news: ends, errors, log-probabilities, several tokens."""

    def each(self) -> list[RequestDelta]:
        """Return the news of all requests one by one, those of the columns first."""
        ids = unpack_int64(self.request_ids).tolist()
        tokens = unpack_int32(self.token_ids).tolist()
        plain = [
            RequestDelta(RequestId(request_id), [token_id])
            for request_id, token_id in zip(ids, tokens, strict=True)
        ]
        return [*plain, *self.requests]


class ClassLoad(msgspec.Struct, frozen=True, array_like=True):
    """Requests and tokens of one class in the router."""

    num_waiting: int
    num_waiting_tokens: int
    """Prompt tokens, and output tokens generated before, that have yet to be computed."""
    num_running: int


class RouterStatus(Message, frozen=True):
    """The router's pulse, about once a second and at each change of `workers_ready`."""

    workers_ready: bool
    load: dict[RequestClass, ClassLoad]
    """Every class."""
    num_used_slots: int
    num_kv_slots: int
    """0 while there are no workers."""
    num_steps: int
    """Steps finished since boot."""
    stalled_s: float
    """Seconds since the last finished step while work is in flight; 0 otherwise."""
    worker_busy_s: float
    """Cumulative execution time of rank 0."""
    worker_idle_s: float
    """Cumulative time rank 0 waited for a plan although requests could have advanced."""
    prompt_token_s: float = 0.0
    output_token_s: float = 0.0
    """Seconds per token on an idle engine, in full steps; 0: not known yet."""
    session: int = 0
    """Session of the hello that the router heard last under this frontend's name."""
    num_deltas: int = 0
    """`TokenDelta`s sent since. With another number than arrived, some are lost."""
    num_lost: int = 0
    """Messages of this session that had not arrived when its last `SentSoFar` did."""
    num_state_slots: int = 0
    """Slots of `num_kv_slots` that each request takes beside those of its tokens."""
    num_snapshot_slots: int = 0
    """Slots that hold snapshots of the states of prefixes."""


# ----------------------------------------------------------------------
# What the slots of the KV pool hold: how a frontend asks the router, and what it is told.
#
# Part of the link between a frontend and the router. A map is a picture of one moment for people
# (GET /debug/kv); nothing is decided by it.


UInt8Array = npt.NDArray[np.uint8]

MAX_SLOTS_BYTES = MAX_FRAME_BYTES - 1024 * 1024
"""Largest `PackedKinds`: the rest of a frame is for the figures."""


class DescribeKV(Message, frozen=True):
    """From a frontend: answer with `KVMap`."""

    query_id: int


class PackedKinds(msgspec.Struct, frozen=True, array_like=True):
    """Kind of each slot, from slot 0 on, as runs of equal ones; see `pack_kinds`."""

    kinds: bytes
    """uint8 [num_runs], each a `SlotKind`."""
    lengths: bytes
    """int32 [num_runs], slots in each run; empty: each run is one slot."""


class KindRuns(NamedTuple):
    """`PackedKinds`, read; consecutive runs may be of one kind."""

    kinds: UInt8Array
    """uint8 [num_runs]."""
    lengths: Int32Array
    """int32 [num_runs], >= 1."""


class ClassSlots(msgspec.Struct, frozen=True, array_like=True):
    """The pool's slots of one class; a slot of both classes counts as real-time."""

    num_requests: int
    """Running and paused ones that hold slots."""
    num_slots: int
    num_checkpointed_slots: int
    """Slots that are CHECKPOINTED."""


class KVPool(msgspec.Struct, frozen=True, kw_only=True):
    """The KV pool at one moment."""

    num_slots: int
    block_size: int
    """Slots of a block; the last block may be shorter."""
    num_slots_of_kind: list[int]
    """By `SlotKind`."""
    classes: dict[RequestClass, ClassSlots]
    """Every class."""
    num_free_blocks: int
    """All of whose slots are free."""
    num_shared_blocks: int
    """In which both classes have slots."""
    mean_run_length: float
    """Mean number of consecutive slots, ascending or descending, that a request holds; 0.0 if
    there is no request."""
    num_host_slots: int
    """Tokens that the host pool holds."""
    num_used_host_slots: int
    num_prefix_host_slots: int
    """Tokens of prefixes that it may hold besides now."""
    num_used_prefix_host_slots: int
    slots: PackedKinds | None
    """None: more than MAX_SLOTS_BYTES, which takes a fragmented pool of over 15 million slots."""


class StepNote(msgspec.Struct, frozen=True, kw_only=True):
    """A step in short; of each class, what it has none of is left out."""

    step_id: StepId
    age_s: float
    """Since it was sent."""
    predicted_s: float
    limit_s: float | None
    """The policy's time limit, if it set one."""
    exec_s: float | None
    """None: it still runs."""
    num_requests: dict[RequestClass, int]
    """That advance."""
    num_tokens: dict[RequestClass, int]
    """That they compute."""
    num_paused: int
    num_preempted: int
    left_out: dict[RequestClass, dict[str, int]]
    """Requests that were considered and left out, by reason."""
    unseen: dict[RequestClass, dict[str, int]]
    """Requests that were not considered, by what had stopped the search."""


class KVMap(Message, frozen=True):
    """From the router: the answer to `DescribeKV`."""

    query_id: int
    pool: KVPool | None
    """None: there are no workers."""
    steps: list[StepNote] = msgspec.field(default_factory=list)
    """The last ones, oldest first; noted only for some seconds after such a question."""


def pack_kinds(kinds: UInt8Array) -> PackedKinds | None:
    """Encode `SlotKind`s of all slots, uint8 [num_slots]; None if they need over MAX_SLOTS_BYTES.

    As runs where that is shorter, so that it is never longer than a byte per slot.
    """
    if len(kinds) == 0:
        return PackedKinds(b"", b"")
    starts = np.concatenate([[0], 1 + np.flatnonzero(kinds[1:] != kinds[:-1])])
    if 5 * len(starts) < len(kinds):
        lengths = np.diff(starts, append=len(kinds)).astype(np.int32)
        packed = PackedKinds(kinds[starts].tobytes(), pack_int32(lengths))
    else:
        packed = PackedKinds(kinds.tobytes(), b"")
    return packed if len(packed.kinds) + len(packed.lengths) <= MAX_SLOTS_BYTES else None


def unpack_kinds(packed: PackedKinds) -> KindRuns:
    """Decode `pack_kinds`.

    Raises:
        ValueError: there is not one length for each kind.
    """
    kinds = np.frombuffer(packed.kinds, dtype=np.uint8)
    if not packed.lengths:
        return KindRuns(kinds, np.ones(len(kinds), dtype=np.int32))
    lengths = unpack_int32(packed.lengths)
    if len(lengths) != len(kinds):
        raise ValueError(f"{len(kinds)} runs with {len(lengths)} lengths")
    return KindRuns(kinds, lengths)


# What became of a request: how a frontend asks the router, and what it is told.


class DescribeRequest(Message, frozen=True):
    """From a frontend: answer with `RequestTimeline`."""

    query_id: int
    name: str
    """One of `Submit.names`."""
    client_key: str | None
    """`Client.key` of the client that asks, and is told of its own alone; None: of any."""


class Stretch(msgspec.Struct, frozen=True, kw_only=True):
    """Steps in a row in which the same happened to a request."""

    what: str
    """`computes`, or the reason for which it was left out or not considered."""
    at_s: float
    """Since its frontend had it."""
    seconds: float
    num_steps: int
    num_tokens: int
    """That it computed."""
    tokens_of_others: dict[RequestClass, int]
    """That others computed meanwhile."""
    predicted_s: float
    observed_s: float
    """Observed time of the steps meanwhile."""


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """Something that a step did with a request once."""

    what: str
    """`starts`: it is first scheduled; `paused`; `checkpointed`: it loses the end of its KV, saved
    on the host; `preempted`: it loses all of it; `resumes`; `loads`: as it starts or resumes."""
    at_s: float
    """Since its frontend had it."""
    num_tokens: int
    """That it computes, loses, or gets back from the host; 0: none, or all."""


class RequestLife(msgspec.Struct, frozen=True, kw_only=True):
    """The story of a request; times in seconds since its frontend had it."""

    request_class: RequestClass
    slo: SLO
    age_s: float
    """Up to its end, or now."""
    end: str | None
    """A finish reason, an error code, abort or frontend_gone; None: it lives."""
    first_token_s: float | None
    max_gap_s: float
    token_span_s: float
    """From its first token to the last one so far."""
    num_output_tokens: int
    before_first_token: dict[str, float]
    """Seconds by what happened, see `Stretch.what`."""
    after_first_token: dict[str, float]
    stretches: list[Stretch]
    moments: list[Moment] = []


class RequestTimeline(Message, frozen=True):
    """From the router: the answer to `DescribeRequest`."""

    query_id: int
    lives: list[RequestLife]
    """Stories of all completions of that name, in their order; empty: the name is unknown."""


FrontendMessage = (
    FrontendHello
    | Submit
    | MaySubmit
    | Acknowledge
    | Finish
    | Abort
    | BatchDue
    | DescribeKV
    | DescribeRequest
    | SentSoFar
)
RouterMessage = RouterWelcome | TokenDelta | RouterStatus | KVMap | RequestTimeline | Verdict
