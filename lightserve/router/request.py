"""A request inside the router: its tokens, its progress, its place.

There are no phases: `num_computed_tokens` chases `num_known_tokens`, and prefill, chunked
prefill, decode and recompute are the same move. With one plan ahead a request
has confirmed progress and progress in flight:

    0 ......... num_computed_tokens ......... next_position ......... num_known_tokens
    └ confirmed ─────────────────┘└ num_inflight_tokens ─┘└ may be scheduled ─┘

`num_known_tokens` counts tokens that are sampled in flight: their values are known only to the
worker, which is enough to schedule the step after.

A *paused* request waits again, without a row, but keeps KV: what is left of it in the pool, a
prefix, and (where memory was taken from it) the rest on the host:

    0 ......... num_held_tokens ............... host.end
    └ in the pool ────────────┘
                host.start ...................┘
                └ copied to the host ─────────┘   (both: clean, could be taken at no cost)

What it would not have to compute if it started now is what `KVStore.look_up` finds: a value that
belongs to one plan (`Found`). A request changes when a plan is committed, never before.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from lightserve.messages.common import NO_INT32, Constraint, Int32Array, Thinking, TokenLogprob
from lightserve.messages.frontend_router import MAX_UNACKNOWLEDGED_TOKENS
from lightserve.messages.images import Image, ImageSums
from lightserve.router.accounts import Account, Budget
from lightserve.router.kv.prefix_node import Hit, Lease, PrefixNode
from lightserve.router.slo import DeadlineTracker, TokenDeadlines
from lightserve.types import (
    BE,
    NO_SLO,
    RT,
    SLO,
    FinishReason,
    RequestClass,
    RequestKey,
    RequestOutput,
    RowId,
    SamplingParams,
)


class RequestState(Enum):
    """Where a request is: WAITING -> RUNNING -> ENDED; RUNNING -> WAITING when it is paused."""

    WAITING = "waiting"
    RUNNING = "running"
    """The request has a row and holds slots."""
    ENDED = "ended"
    """Finished, failed or aborted; keeps row and slots until no plan in flight names them."""


WAITING, RUNNING, ENDED = RequestState.WAITING, RequestState.RUNNING, RequestState.ENDED
"""For loops over requests, see `types.RT`."""


@dataclass(slots=True, eq=False)
class HostRange:
    """Consecutive positions of one request that are, or will be with the next plan, on the host."""

    start: int
    slots: Int32Array
    """int32 [n], host slots of positions start … start+n-1."""

    @property
    def end(self) -> int:
        """First position behind it."""
        return self.start + len(self.slots)

    def slots_from(self, position: int) -> Int32Array:
        """Return the host slots of positions `position` … end-1; `position` is in the range."""
        return self.slots[position - self.start :]


def _no_slots() -> Int32Array:
    return NO_INT32


@dataclass(slots=True, eq=False)
class Recurrent:
    """A request's state in recurrent layers, beside its KV; int32 [num_slots] or empty each.

    Its state is that behind `next_position` tokens, those in flight included.
    """

    num_slots: int = 0
    """Slots of the pool that one state takes; 0: the model has none."""
    slots: Int32Array = field(default_factory=_no_slots)
    """Its state in the pool."""
    host_slots: Int32Array = field(default_factory=_no_slots)
    """Its state on the host, while it is paused; never both."""
    spare: Int32Array = field(default_factory=_no_slots)
    """While its grammar may still be compiling: a second place, see `States.keep_for_retry`."""
    snapshots: list[tuple[int, Int32Array]] = field(default_factory=list)
    """Positions, in order, and slots of snapshots whose tokens are not in the prefix tree yet."""


@dataclass(slots=True, eq=False)
class Parameters:
    """Large parts of a request besides its prompt; its choices share them."""

    allowed_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    eos_token_ids: frozenset[int] = frozenset()
    constraint: Constraint | None = None
    thinking: Thinking | None = None
    prediction: bytes = b""
    """See `Submit`."""
    images: tuple[Image, ...] = ()
    image_sums: ImageSums = field(default_factory=ImageSums)
    num_bytes: int = 0
    """Memory that it takes."""
    num_plan_bytes: int = 0
    """Bytes in a plan."""
    num_holders: int = 0
    """Requests of the router that have it."""

    def num_reasoning(self, token_ids: Sequence[int]) -> int | None:
        """Return how many tokens an output has before its answer; None: none, or it is not known.

        That goes by the usual tokens of the ending: where it is spelled in others, none is found.
        """
        ending = () if self.thinking is None else self.thinking.ending
        for end, token_id in enumerate(token_ids if ending else (), 1):
            if token_id == ending[-1] and tuple(token_ids[end - len(ending) : end]) == ending:
                return end
        return None


@dataclass(slots=True, eq=False)
class Request:
    """One request. Only `Scheduler` and the parts it owns write to it."""

    key: RequestKey
    prompt_token_ids: Int32Array
    max_tokens: int
    eos_token_ids: frozenset[int]
    sampling: SamplingParams
    request_class: RequestClass
    arrival_s: float
    """On the router's clock; the frontend's waiting time is already taken off."""
    arrival_number: int = 0
    """How many requests came before it; stands for it where randomness must be repeatable."""
    priority: int = 0
    """Within its class, lower ones start first."""
    slo: SLO = NO_SLO
    """Targets that the client asked for."""
    batch: int = 0
    """Lines with equal numbers, of one frontend, are due together; 0: it is none."""
    scheduled_slo: SLO | None = None
    """Targets of the schedule, where an idle server could not meet some of `slo`."""
    prediction_key: Hashable = None
    """Requests with equal keys are expected to have outputs of like length."""
    constraint: Constraint | None = None
    awaits_grammar: bool = False
    """Whether the workers may still be compiling its constraint: no token since it (re)started."""
    output: RequestOutput = RequestOutput.TOKENS
    is_first: bool = True
    """Whether it is the first choice of an HTTP request."""
    prefix_salt: str = ""
    num_retained_tokens: int = 0
    """So many at the beginning of the prompt are to stay longer in the prefix cache."""
    retention_s: float = 0.0
    """How much longer, from when they have been computed."""
    deadlines: DeadlineTracker | None = None
    """When its next token is due; None under policies that do not ask."""
    account: Account | None = None
    """Whose it is; None: all requests are one's."""
    budget: Budget | None = None
    """Quotas that it counts against; None: its key has none."""
    parameters: Parameters = field(default_factory=Parameters)
    """Where its large parameters are counted."""
    num_acknowledged_tokens: int | None = None
    """Output tokens that the frontend found free of stop strings; None: it has none to look for."""

    admission_limit: int = 0
    """Output tokens that admission believes it can reach: `max_tokens` unless set."""
    num_overtaken: int = 0
    """Requests behind it in the queue that were admitted before it."""
    num_prompt_tokens: int = field(init=False)
    state: RequestState = WAITING
    output_token_ids: list[int] = field(default_factory=list)
    """Confirmed tokens; all of them have been sent to the frontend. See `add_output`."""
    row: RowId | None = None
    cells: Mapping[str, array[Any]] | None = None
    """While it has a row: the columns of the table, see `RequestTable`."""
    slots: Int32Array | None = None
    """While it runs or is paused: int32 [max_known_tokens], valid at 0 … num_held_tokens-1."""
    recurrent: Recurrent = field(default_factory=Recurrent)
    _next_position: int = field(default=0, init=False)
    _place: int = field(default=-1, init=False)
    """`row`, while it has one."""
    num_replays: int = 0
    was_evicted: bool = False
    """Whether memory was ever taken from it for others."""
    gave_seat_s: float = -math.inf
    """When it was last paused for another key's request (`seats`)."""
    num_requeues: int = 0
    """How often it went back to waiting after it had started."""
    num_prompt_logprobs_sent: int = 0
    lease: Lease | None = None
    """While it runs or is paused, and prefixes are cached: its hold on shared KV."""
    num_paused_tokens: int = 0
    """While it is paused: leading positions whose KV is in the pool."""
    host: HostRange | None = None
    """Positions whose KV is on the host."""
    is_prompt_shared: bool = False
    """Whether its prompt was offered to the prefix tree since it started or resumed."""
    num_cached_tokens: int | None = None
    """Prompt tokens that were not computed when it first started."""
    keeps_kv: bool = True
    """Whether its KV may become cache: it has been finite so far."""
    expected: PrefixNode | None = None
    """While it waits and has no KV: where the prefix tree counts it as a future user."""

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.admission_limit = self.admission_limit or self.max_tokens

    def enter(self, cells: Mapping[str, array[Any]], row: RowId) -> None:
        """Put the progress into a row of a table's columns, where it then is."""
        cells["next_position"][row] = self._next_position
        cells["num_prompt"][row] = self.num_prompt_tokens
        cells["num_output"][row] = len(self.output_token_ids)
        cells["max_tokens"][row] = self.max_tokens
        cells["admission_limit"][row] = self.admission_limit
        cells["arrival_number"][row] = self.arrival_number
        for name in ("inflight_tokens", "inflight_samples", "inflight_steps"):
            cells[name][row] = 0
        cells["frontend_id"][row], cells["request_id"][row] = self.key
        slo = self.slo
        cells["is_rt"][row] = self.request_class is RT
        cells["is_timed"][row] = (slo.tpot_ms, slo.mtpot_ms, slo.completion_s) != (None,) * 3
        cells["awaits_grammar"][row] = self.awaits_grammar
        cells["wants_logprobs"][row] = self.sampling.num_logprobs is not None
        self.row, self._place, self.cells = row, row, cells
        self._set_stop()

    def leave(self) -> None:
        """Take the progress back from the row; what is in flight is no more."""
        assert self.cells is not None and self.row is not None
        self._next_position = self.cells["next_position"][self._place]
        if isinstance(self.deadlines, TokenDeadlines):
            self.deadlines.load(self.cells, self.row)
        self.row = self.cells = None

    def pause(self) -> None:
        """Give up the row; nothing is in flight, and all KV stays."""
        assert self.num_inflight_steps == 0
        self.state = WAITING
        self.num_requeues += 1
        self.num_paused_tokens = self.num_computed_tokens

    def lose_kv(self) -> None:
        """Wait as if it had never started: its known tokens are to be computed again."""
        self.state = WAITING
        self.slots = self.lease = self.host = self.expected = None
        self.recurrent = Recurrent(self.recurrent.num_slots)
        self.is_prompt_shared = False
        self.num_paused_tokens = self.next_position = 0

    def add_output(self, token_ids: list[int]) -> None:
        """Confirm tokens."""
        self.output_token_ids.extend(token_ids)
        if self.cells is not None:
            self.cells["num_output"][self._place] = len(self.output_token_ids)

    def take_prompt_logprobs(
        self, start_position: int, logprobs: list[TokenLogprob]
    ) -> list[TokenLogprob]:
        """Return the log-probabilities that have not been sent yet, and count them as sent.

        `logprobs` are those of prompt tokens start_position+1 …; a preempted request computes some
        of them twice.
        """
        num_known = self.num_prompt_logprobs_sent - start_position
        news = logprobs[max(0, num_known) :]
        self.num_prompt_logprobs_sent += len(news)
        return news

    def acknowledge(self, num_tokens: int) -> None:
        """Learn how much of the output has no stop string; older news change nothing."""
        if self.num_acknowledged_tokens is not None:
            self.num_acknowledged_tokens = max(self.num_acknowledged_tokens, num_tokens)
            self._set_stop()

    def set_awaits_grammar(self, awaits: bool) -> None:
        """Say whether the sample of a step may give no token."""
        self.awaits_grammar = awaits
        if self.cells is not None:
            self.cells["awaits_grammar"][self._place] = awaits

    def _set_stop(self) -> None:
        if self.cells is not None:
            self.cells["stop_at"][self._place] = self._stop_at

    @property
    def _stop_at(self) -> int:
        """Output tokens, those in flight included, with which it is not scheduled."""
        if self.num_acknowledged_tokens is None:
            return self.max_tokens
        return min(self.max_tokens, self.num_acknowledged_tokens + MAX_UNACKNOWLEDGED_TOKENS)

    @property
    def next_position(self) -> int:
        """First position that no plan has computed or is computing."""
        return (
            self._next_position if self.cells is None else self.cells["next_position"][self._place]
        )

    @next_position.setter
    def next_position(self, position: int) -> None:
        if self.cells is None:
            self._next_position = position
        else:
            self.cells["next_position"][self._place] = position

    @property
    def num_inflight_tokens(self) -> int:
        """Tokens that plans in flight compute."""
        return 0 if self.cells is None else self.cells["inflight_tokens"][self._place]

    @num_inflight_tokens.setter
    def num_inflight_tokens(self, num_tokens: int) -> None:
        assert self.cells is not None
        self.cells["inflight_tokens"][self._place] = num_tokens

    @property
    def num_inflight_samples(self) -> int:
        """Output tokens that they yield."""
        return 0 if self.cells is None else self.cells["inflight_samples"][self._place]

    @num_inflight_samples.setter
    def num_inflight_samples(self, num_tokens: int) -> None:
        assert self.cells is not None
        self.cells["inflight_samples"][self._place] = num_tokens

    @property
    def num_inflight_steps(self) -> int:
        """Plans in flight that name it."""
        return 0 if self.cells is None else self.cells["inflight_steps"][self._place]

    @num_inflight_steps.setter
    def num_inflight_steps(self, num_steps: int) -> None:
        assert self.cells is not None
        self.cells["inflight_steps"][self._place] = num_steps

    @property
    def num_known_tokens(self) -> int:
        """Tokens that exist or will exist once the plans in flight have run."""
        return self.num_prompt_tokens + len(self.output_token_ids) + self.num_inflight_samples

    @property
    def num_computed_tokens(self) -> int:
        """Leading positions that are computed, or will not have to be."""
        return self.next_position - self.num_inflight_tokens

    @num_computed_tokens.setter
    def num_computed_tokens(self, num_tokens: int) -> None:
        self.next_position = num_tokens + self.num_inflight_tokens

    @property
    def num_schedulable_tokens(self) -> int:
        """Tokens that the next plan may compute.

        0 once the last output token is in flight, and while the frontend has too much to look at.
        """
        return self.num_left_from(self.next_position)

    def num_left_from(self, start: int) -> int:
        """Return the tokens that the next plan may compute if those before `start` have KV."""
        num_inflight = self.num_inflight_samples
        num_generated = len(self.output_token_ids) + num_inflight
        if num_generated >= self._stop_at or (self.awaits_grammar and num_inflight):
            return 0  # or the sample in flight may give no token
        return self.num_prompt_tokens + num_generated - start

    @property
    def is_whole(self) -> bool:
        """Whether one step has to compute its prompt, without KV of others and for no others."""
        return self.output is RequestOutput.WHOLE_VECTOR

    @property
    def takes_prefixes(self) -> bool:
        """Whether KV that is there need not be computed: not where all tokens are looked at."""
        return self.sampling.num_prompt_logprobs is None and not self.is_whole

    def wants_prompt_logprobs(self, start: int) -> bool:
        """Whether a plan that computes from `start` on tells how probable prompt tokens are."""
        return (
            self.sampling.num_prompt_logprobs is not None
            and start < self.num_prompt_tokens - 1
            and self.num_prompt_logprobs_sent < self.num_prompt_tokens - 1
        )

    @property
    def is_decoding(self) -> bool:
        """Whether its next move is one token that yields one token."""
        is_running = self.state is RUNNING  # and not about to start all but there
        return (
            is_running
            and self.num_schedulable_tokens == 1
            and self.num_known_tokens > self.num_prompt_tokens
        )

    @property
    def max_known_tokens(self) -> int:
        """Most tokens it can ever have, prompt and output together."""
        return self.num_prompt_tokens + self.max_tokens

    @property
    def num_shared_tokens(self) -> int:
        """Leading positions whose slots belong to the prefix tree."""
        return 0 if self.lease is None else self.lease.num_tokens

    @property
    def is_paused(self) -> bool:
        """Whether it waits and keeps KV."""
        return self.state is WAITING and self.slots is not None

    @property
    def num_held_tokens(self) -> int:
        """Leading positions whose KV is in the pool, or will be after the plans in flight."""
        if self.slots is None:
            return 0
        return self.num_paused_tokens if self.is_paused else self.next_position

    @property
    def num_kept_tokens(self) -> int:
        """Leading positions whose KV exists, in the pool or on the host."""
        return max(self.num_held_tokens, 0 if self.host is None else self.host.end)

    @property
    def num_own_slots(self) -> int:
        """Slots that no other request can read."""
        return self.num_held_tokens - self.num_shared_tokens

    @property
    def held_slots(self) -> Int32Array:
        """Slots of positions 0 … num_held_tokens-1, in order."""
        return NO_INT32 if self.slots is None else self.slots[: self.num_held_tokens]

    def known_token_ids(self) -> Int32Array:
        """Prompt and confirmed output, int32 [num_prompt_tokens + len(output)]."""
        if not self.output_token_ids:
            return self.prompt_token_ids
        output = np.asarray(self.output_token_ids, dtype=np.int32)
        return np.concatenate([self.prompt_token_ids, output])


class Found(NamedTuple):
    """The state that a request would go on from, as one plan found it. Immutable."""

    start: int
    """First position that is to be computed."""
    num_left: int
    """Tokens from there on that the plan may compute."""
    num_loaded: int = 0
    """Tokens before `start` that would come back from the host, and the slots of its state."""
    num_pinned: int = 0
    """Cached slots that starting it would keep from being evicted, less copies of its own there."""
    hit: Hit | None = None
    """The part of it in the prefix tree, if that is more than it holds itself."""
    num_state_slots: int = 0
    """Slots among `num_loaded` that are its state."""

    @property
    def num_there(self) -> int:
        """Leading positions whose KV is in the pool."""
        return self.start - self.num_loaded + self.num_state_slots


FoundOf = Callable[[Request], Found]
"""Returns what a plan found of a request; while it is made, the same each time."""


def progress(request: Request) -> Found:
    """Return the state of a request that runs, or of one of which nothing was looked up."""
    start = request.next_position
    return Found(start, request.num_left_from(start))


# When a request ends, and whether it survives the death of its workers. Pure.

MAX_REPLAYS = 1
"""A request that was in flight at one more death than this gets an error: it is the poison."""


def until_end(request: Request, token_ids: list[int]) -> tuple[list[int], FinishReason | None]:
    """Return those of a request's next tokens that count, and why it ends with the last of them.

    Workers give several at a time where drafts were right.
    """
    num_left = request.max_tokens - len(request.output_token_ids)
    if num_left < len(token_ids):
        token_ids = token_ids[:num_left]
    if not request.eos_token_ids.isdisjoint(token_ids):
        end = next(i for i, token_id in enumerate(token_ids) if token_id in request.eos_token_ids)
        return token_ids[: end + 1], FinishReason.STOP
    if len(token_ids) >= num_left:
        return token_ids, FinishReason.LENGTH
    return token_ids, None


def can_replay(request: Request, *, was_in_flight: bool) -> bool:
    """Best-effort requests go on where they were; a real-time one only if nothing was sent.

    One that was not in flight, since a suspect ran alone, had no part in the death and goes on.
    """
    if not was_in_flight:
        return True
    if request.num_replays >= MAX_REPLAYS:
        return False
    return request.request_class is BE or not request.output_token_ids
