"""The parts of a step: requests that advance, requests left out with reasons, changes to memory."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightserve.cost.model import StepShape, chunk_pairs
from lightserve.messages.images import EncodeOrder
from lightserve.router.accounts import Computed
from lightserve.router.request import Found, FoundOf, Request, progress
from lightserve.router.request_table import Decodes, RequestTable, Rows
from lightserve.types import RequestClass, StepId


class Scheduled(NamedTuple):
    """A request's part of a step: its next `num_tokens` tokens."""

    request: Request
    num_tokens: int


class Loading(NamedTuple):
    """A request's part of the copies beside a step: so much more of its KV comes back.

    It is paused and stays so; it runs in a later step.
    """

    request: Request
    num_tokens: int


class Checkpointed(NamedTuple):
    """The last tokens that a paused request holds, to be taken from it."""

    request: Request
    num_tokens: int


def each_scheduled(parts: Iterable[Decodes | Scheduled]) -> Iterator[Scheduled]:
    """Iterate over the requests of parts, one by one."""
    for part in parts:
        if isinstance(part, Decodes):
            yield from (Scheduled(request, 1) for request in part.requests)
        else:
            yield part


def decodes_and_chunks(
    table: RequestTable, parts: Iterable[Decodes | Scheduled]
) -> tuple[Decodes, tuple[Scheduled, ...]]:
    """Return all decodes of a step together, and the rest of it, both in order."""
    rows: list[Rows] = []
    chunks: list[Scheduled] = []
    for part in parts:
        if isinstance(part, Decodes):
            rows.append(part.rows)
        elif part.num_tokens == 1 and part.request.is_decoding:
            rows.append(np.array([part.request.row], dtype=np.int64))
        else:
            chunks.append(part)
    all_rows = np.concatenate([np.empty(0, dtype=np.int64), *rows]) if len(rows) != 1 else rows[0]
    return Decodes(table, all_rows).kept(), tuple(chunks)


def shape_of(parts: Iterable[Decodes | Scheduled], found: FoundOf = progress) -> StepShape:
    """Return a step's shape, before its requests have moved."""
    num_new = decode_context = chunk_context = pairs = num_decodes = num_chunks = 0
    for part in parts:
        if isinstance(part, Decodes):
            num_new += len(part.rows)
            num_decodes += len(part.rows)
            decode_context += part.num_context_tokens
            continue
        request, num_tokens = part
        start = found(request).start
        num_new += num_tokens
        if num_tokens == 1:
            decode_context += start
            num_decodes += 1
        else:
            pairs += chunk_pairs(start, num_tokens)
            chunk_context += start
            num_chunks += 1
    return StepShape(num_new, decode_context, pairs, num_decodes, num_chunks, chunk_context)


def nums_of_samples(parts: Sequence[Scheduled], found: FoundOf = progress) -> tuple[int, ...]:
    """Return how many new tokens the next tokens of each request yield.

    None before its last known token, one with it, and one more for each step that it runs on
    by itself (simulated workers only).
    """
    ends = [found(r).start + count for r, count in parts]
    known = [
        r.num_prompt_tokens + len(r.output_token_ids) + r.num_inflight_samples for r, _ in parts
    ]
    return tuple(
        [
            end - num_known + 1 if end >= num_known else 0
            for end, num_known in zip(ends, known, strict=True)
        ]
    )


# Why requests do not advance in a step.
#
# Every request that was considered and left out has one reason, the first that was found; those
# that were not looked at are one record per class: how many, and what ended the search.

ALL_CLASSES = tuple(RequestClass)


class Reason(StrEnum):
    """Reasons that keep a request out of a step."""

    TIME = "time"
    """The step would take longer than its limit."""
    PACE = "pace"
    """The step would be longer than the pace of real-time decodes without targets allows."""
    TOKENS = "tokens"
    """The token budget of the step is used up."""
    BYTES = "bytes"
    """The plan already holds as much of newcomers' tokens and parameters as it may."""
    ROWS = "rows"
    """No row is free, or as many best-effort requests run as may, or as many requests begin in this
    step as may."""
    KV_NOW = "kv_now"
    """Memory: not enough slots for this step, or they were taken from it."""
    KV_FUTURE = "kv_future"
    """Memory: admission expects the pool to run out."""
    ORDER = "order"
    """Another request goes first: an earlier one waits, or a better one took its place."""
    LOADING = "loading"
    """Its KV is on its way back from the host, or waits for the link."""
    ENCODING = "encoding"
    """An image of its prompt is being encoded, or waits for others."""
    BLOCKED = "blocked"
    """The request has nothing to compute: its frontend is to catch up with its output, its last
    token is in flight, or another request is just computing its prefix."""

    __hash__ = str.__hash__  # see `RequestClass`


Skipped = tuple[Request, Reason]
"""A request that was considered and left out."""

_REASONS = tuple(Reason)
_CODES = {reason: code for code, reason in enumerate(_REASONS, start=1)}
"""In columns of reasons; 0: none."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Requests that a step leaves out, and why."""

    waiting: Mapping[Request, Reason]
    requests: Sequence[Request] = ()
    """Some that run."""
    codes: Sequence[int] = ()
    """Reasons of `requests`, as `count` reads them."""

    def __bool__(self) -> bool:
        return bool(self.waiting or self.requests)

    def each(self) -> tuple[Skipped, ...]:
        """Return them one by one."""
        running = zip(self.requests, self.codes, strict=True)
        return (*((r, _REASONS[code - 1]) for r, code in running), *self.waiting.items())

    def count(self) -> dict[RequestClass, Counter[Reason]]:
        """Return how many of each class have which reason."""
        counts: dict[RequestClass, Counter[Reason]] = {of: Counter() for of in ALL_CLASSES}
        for request, reason in self.each():
            counts[request.request_class][reason] += 1
        return counts


NOTHING_LEFT_OUT = LeftOut({})


class Unseen(NamedTuple):
    """Requests of a class that wait and were not looked at."""

    num_requests: int
    stopped_by: Reason | None
    """Reason that ended the search; None: no request was unseen."""


class Skips:
    """Requests that a step leaves out; the first reason of a request stays."""

    def __init__(self, table: RequestTable) -> None:
        """`table` is that of the requests that run."""
        self._table = table
        self._waiting: dict[Request, Reason] = {}
        """Reasons of requests without a row."""
        self._codes: npt.NDArray[np.int8] | None = None
        """Reason codes of running requests by row; None: no code yet."""
        self.stopped_by: dict[RequestClass, Reason] = {}
        """Reason that ended the search for newcomers of a class."""

    def note(self, request: Request, reason: Reason) -> None:
        """Say why a request is left out."""
        if request.row is None:
            self._waiting.setdefault(request, reason)
        elif self._of_rows[request.row] == 0:
            self._of_rows[request.row] = _CODES[reason]

    def note_rows(self, rows: Rows, reason: Reason) -> None:
        """Say the same of requests that run."""
        if len(rows):
            codes = self._of_rows
            codes[rows[codes[rows] == 0]] = _CODES[reason]

    def lose(self, request: Request, reason: Reason) -> None:
        """Say that a running request stops for another: this stands over what was said before."""
        assert request.row is not None
        self._of_rows[request.row] = _CODES[reason]

    def reason_of(self, request: Request) -> Reason | None:
        """Return what was said of a request."""
        if request.row is None:
            return self._waiting.get(request)
        code = 0 if self._codes is None else int(self._codes[request.row])
        return _REASONS[code - 1] if code else None

    def stop(self, request_class: RequestClass, reason: Reason) -> None:
        """Say why no further request of a class that waits was looked at; the first stays."""
        self.stopped_by.setdefault(request_class, reason)

    def of_step(self, decodes: Decodes, chunks: Iterable[Scheduled]) -> LeftOut:
        """Return what a step leaves out that moves these."""
        for request, _ in chunks:
            if request.row is None:
                self._waiting.pop(request, None)
            elif self._codes is not None:
                self._codes[request.row] = 0
        if self._codes is None:
            return LeftOut(self._waiting)
        self._codes[decodes.rows] = 0
        rows = np.flatnonzero(self._codes)
        return LeftOut(self._waiting, self._table.of(rows), self._codes[rows].tolist())

    @property
    def _of_rows(self) -> npt.NDArray[np.int8]:
        if self._codes is None:
            self._codes = np.zeros(self._table.num_rows, dtype=np.int8)
        return self._codes


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step that could be sent now: what it moves by how much. `commit` makes the message."""

    step_id: StepId
    decodes: Decodes
    """Rows that compute one token and sample the next."""
    chunks: tuple[Scheduled, ...]
    """All others: prompts, those that begin or resume."""
    num_samples: tuple[int, ...]
    """Tokens that each of `chunks` can yield at most."""
    paused: tuple[Request, ...]
    """Running requests to pause before the plan is sent; only ever with nothing in flight."""
    checkpointed: tuple[Checkpointed, ...]
    """KV to take from requests that are paused then, copied to the host where it is saved."""
    preempted: tuple[Request, ...]
    """Requests, paused then, that lose all their KV."""
    planned_at_s: float
    shape: StepShape
    predicted_s: float
    """Predicted execution time."""
    loaded: tuple[Loading, ...] = ()
    """KV of paused requests that comes back beside the step."""
    found: Mapping[Request, Found] = field(default_factory=dict)
    """The state that each newcomer, and each of `loaded`, goes on from."""
    urgent: Collection[Request] = ()
    """Urgent jobs: they start whatever the turn of best-effort requests."""
    seats_given: tuple[Request, ...] = ()
    """Requests of `paused` whose seats others are owed."""
    left_out: LeftOut = NOTHING_LEFT_OUT
    """Requests that were considered and do not advance."""
    unseen: Mapping[RequestClass, Unseen] = field(default_factory=dict)
    """Per class, what waits and was not considered; with `scheduled` and `left_out` they are all
    live requests."""
    limit_s: float | None = None
    """The nearest deadline that the policy keeps to, from the start of the step."""
    encodes: tuple[EncodeOrder, ...] = ()
    """Layers of images that requests left out are waiting for."""
    encode_s: Mapping[RequestClass, float] = field(default_factory=dict)
    """Predicted time of all images that it encodes, at least in part, of each class with some."""
    hits_limit: bool = False
    """Whether a policy left out a real-time request for want of time."""
    best_effort_s: float | None = None
    """Time that best-effort requests add to the step, where they are owed a share and want more."""
    forecast_peak: int | None = None
    """Slots that the batch is expected to need at its peak, if the step starts a request."""
    headroom: int = 0
    """Slots that best-effort newcomers had to leave free."""

    @property
    def scheduled(self) -> list[Scheduled]:
        """Every request that advances, one by one: for logs and tests."""
        counts = self.decodes.num_tokens.tolist()
        decodes = zip(self.decodes.requests, counts, strict=True)
        return [*itertools.starmap(Scheduled, decodes), *self.chunks]

    def computed(self) -> Iterator[Computed]:
        """Iterate over what it computes for each request."""
        for request in self.decodes.requests:
            yield Computed(request.account, request.budget, 0, 1)
        for (request, num_tokens), num_samples in zip(self.chunks, self.num_samples, strict=True):
            yield Computed(request.account, request.budget, num_tokens, num_samples)


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Nothing to send now; ask again at `at_s`, or (None) after the next event or result."""

    at_s: float | None
