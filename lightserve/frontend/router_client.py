"""The frontend's table of live requests and its connection to the router: the one owner of both.

A request is live from `submit` until its end has come, or until it is aborted; one with stop
strings, which the router keeps until it is told where the output ended, until that is said. News
that are not read yet are merged into one pending delta per request, so a slow reader costs no more
than its tokens. Everything runs on the event loop; nothing here waits except `next_delta`.

    starting ──attach──► connected, not ready ──RouterWelcome──► ready
       ▲                        ▲   workers lost (RouterStatus) ◄──┘ │
       └────────detach──────────┴────────────────────────────────────┘
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lightserve.channels.base import AsyncLink
from lightserve.errors import ChannelFull, FrameTooLarge, InvalidRequest, ProtocolError
from lightserve.frontend.columns import LogprobColumns
from lightserve.frontend.errors import (
    ClientGone,
    RequestFailed,
    from_router,
    not_ready,
    overloaded,
    router_lost,
    too_large_to_submit,
)
from lightserve.frontend.kv_query import KVQuery
from lightserve.messages.common import Constraint, TokenLogprob, TokenSegment, pack_int32
from lightserve.messages.device import DeviceFacts
from lightserve.messages.frontend_router import (
    Abort,
    Acknowledge,
    ErrorCode,
    Finish,
    FrontendMessage,
    Progress,
    RequestDelta,
    RouterMessage,
    RouterStatus,
    RouterWelcome,
    SentSoFar,
    Submit,
    TokenDelta,
)
from lightserve.messages.kv_map import KVMap, KVPool
from lightserve.types import (
    NO_SLO,
    SLO,
    FinishReason,
    RequestClass,
    RequestId,
    SamplingParams,
)

log = logging.getLogger(__name__)

RouterLink = AsyncLink[FrontendMessage, RouterMessage]

MAX_TOKENS_PER_TURN = 128
"""Of one completion: even 128 completions at a time keep the event loop for some 50 ms only."""

MAX_TOKEN_ID = 2**31 - 1

MAX_FOREIGN = 3
"""Statuses of another session, about a second apart, after which this one is given up."""


@dataclass(frozen=True, kw_only=True)
class NewRequest:
    """A validated request."""

    prompt_token_ids: Sequence[int]
    max_tokens: int
    eos_token_ids: tuple[int, ...]
    """Any of these ends the output …"""
    sampling: SamplingParams
    request_class: RequestClass
    arrival_s: float
    """Monotonic time at which the headers were there."""
    slo: SLO = NO_SLO
    """The server's targets included."""
    priority: int = 0
    """Within its class, lower ones start first."""
    prediction_key: str = ""
    """As in `Submit`: requests with equal keys are expected to have outputs of like length."""
    prefix_salt: str = ""
    """As in `Submit`: set by the response, from whoever asks."""
    num_retained_tokens: int = 0
    """As in `Submit`: of the prompt, to stay longer in the prefix cache."""
    retention_s: float = 0.0
    stop_strings: tuple[str, ...] = ()
    """Any of these ends the output where it is complete."""
    includes_stop: bool = False
    """Whether the output shows the stop string that ended it."""
    constraint: Constraint | None = None
    names: tuple[str, ...] = ()
    """As in `Submit`: set by the response."""
    stop_token_ids: frozenset[int] = frozenset()
    """… of which these do so only because the request says it."""
    discards_output: bool = False
    """Only the prompt's log-probabilities are wanted: the one token that is drawn is dropped."""


@dataclass
class Delta:
    """News of a request since the last time it was asked."""

    token_ids: array[int] = field(default_factory=lambda: array("i"))
    finish_reason: FinishReason | None = None
    logprobs: LogprobColumns | None = None
    """One for each of `token_ids`, if asked for."""
    prompt_logprobs: LogprobColumns | None = None
    """The next ones of the prompt's tokens 1 …"""
    num_cached_tokens: int = 0
    scheduled_slo: SLO | None = None
    """As in `RequestDelta`."""
    num_read: int = 0
    """Of the tokens, by `next_part`."""

    def next_part(self) -> Delta:
        """Return what can be worked on in one turn of the event loop, at best all of it."""
        start, num_tokens = self.num_read, len(self.token_ids)
        most = MAX_TOKENS_PER_TURN
        if self.logprobs is not None:
            most = min(most, max(4, self.logprobs.tokens_per_piece // 8))
        self.num_read = stop = min(start + most, num_tokens)
        if stop - start == num_tokens:
            return self
        is_first, is_last = start == 0, stop == num_tokens
        return Delta(
            self.token_ids[start:stop],
            self.finish_reason if is_last else None,
            None if self.logprobs is None else self.logprobs.part(start, stop),
            self.prompt_logprobs if is_first else None,
            self.num_cached_tokens if is_first else 0,
            self.scheduled_slo if is_first else None,
        )

    @property
    def num_bytes(self) -> int:
        """Of memory, without the prompt's log-probabilities."""
        num_bytes = 4 * len(self.token_ids)
        return num_bytes + (0 if self.logprobs is None else self.logprobs.num_bytes)

    @property
    def is_read(self) -> bool:
        """Whether there are no further parts."""
        return self.num_read == len(self.token_ids)


class LiveRequest:
    """A request's news; made by `RouterClient.submit`, read by one task."""

    def __init__(self, request_id: RequestId, client: RouterClient, request: NewRequest) -> None:
        self.request_id = request_id
        self._client = client
        self._has_stop_strings = bool(request.stop_strings)
        self._num_logprobs = request.sampling.num_logprobs
        self._num_prompt_logprobs = request.sampling.num_prompt_logprobs
        self._num_prompt_left = 0
        """Of the prompt's log-probabilities, those that have not come."""
        if self._num_prompt_logprobs is not None:
            self._num_prompt_left = len(request.prompt_token_ids) - 1
        self._has_tokens = False
        self.on_unread: Callable[[], None] | None = None
        """Called when the reader falls behind."""
        self._pending = Delta()
        self._reading: Delta | None = None
        """News that have been read in part."""
        self._is_finished = False
        self._failure: InvalidRequest | RequestFailed | ClientGone | None = None
        self._news = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """Whether no more news will come."""
        return self._is_finished or self._failure is not None

    @property
    def num_unread_bytes(self) -> int:
        """Of news that have not been read to their end."""
        return self._pending.num_bytes + (self._reading.num_bytes if self._reading else 0)

    @property
    def is_kept_by_router(self) -> bool:
        """Whether the router still has it: it waits for `finish` or `abort`."""
        return self._failure is None and (self._has_stop_strings or not self._is_finished)

    async def next_delta(self) -> Delta:
        """Wait for news and take them, a long backlog in parts.

        Raises:
            InvalidRequest, RequestFailed: the request ended without the rest of its answer;
                tokens that came before are delivered first.
            ClientGone: it was aborted.
        """
        if self._reading is None:
            await self._news.wait()
            self._news.clear()
            self._reading, self._pending = self._pending, Delta()
        else:
            await asyncio.sleep(0)  # between the parts, others have their turn
        news = self._reading.next_part()
        if self._reading.is_read:
            self._reading = None
        if self._failure is None:
            return news
        if news.token_ids and not isinstance(self._failure, ClientGone):
            self._news.set()
            return news
        raise self._failure

    def acknowledge(self, num_tokens: int) -> None:
        """Say that the first `num_tokens` of the output have no stop string."""
        self._client.acknowledge(self.request_id, num_tokens)

    def finish(self, num_tokens: int) -> None:
        """End a request with stop strings after `num_tokens`, also if it is over by itself."""
        self._is_finished = True
        self._client.finish(self.request_id, num_tokens)

    def abort(self) -> None:
        """End the request here and in the router; no effect once both have its end."""
        if self.is_over:
            self._client.abort(self.request_id)
        else:
            self.end(ClientGone())

    def end(self, failure: InvalidRequest | RequestFailed | ClientGone) -> None:
        """The same with a failure to be told; no effect once it is over."""
        if not self.is_over:
            self.fail(failure)
            self._client.abort(self.request_id)

    def fail(self, failure: InvalidRequest | RequestFailed | ClientGone) -> None:
        """End the request with a failure."""
        self._failure = failure
        self._news.set()

    def append(self, delta: RequestDelta) -> None:
        """Merge news from the router; none after the end.

        Raises:
            ProtocolError: the router may not say that of this request, which has to be ended.
        """
        if self.is_over:
            return
        pending = self._pending
        self._check(delta)
        pending.token_ids.extend(delta.token_ids)
        if self._num_logprobs is not None and delta.logprobs:
            pending.logprobs = _with(pending.logprobs, delta.logprobs)
        if self._num_prompt_logprobs is not None and delta.prompt_logprobs:
            pending.prompt_logprobs = _with(pending.prompt_logprobs, delta.prompt_logprobs)
        pending.num_cached_tokens += delta.num_cached_tokens
        pending.scheduled_slo = delta.scheduled_slo or pending.scheduled_slo
        if delta.error is not None:
            self._failure = from_router(
                delta.error, retry_after_s=delta.retry_after_s, max_tokens=delta.max_tokens
            )
        else:
            pending.finish_reason = delta.finish_reason
            self._is_finished = delta.finish_reason is not None
        self._news.set()
        if self.on_unread is not None and len(pending.token_ids) > MAX_TOKENS_PER_TURN:
            self.on_unread()

    def _check(self, delta: RequestDelta) -> None:
        """Check what readers rely on; raises ProtocolError."""
        _check_ids(delta.token_ids)
        if (delta.error is not None) != (delta.finish_reason is FinishReason.ERROR):
            raise ProtocolError(f"finish reason {delta.finish_reason} with error {delta.error}")
        if self._num_logprobs is not None:
            if len(delta.logprobs) != len(delta.token_ids):
                what = f"{len(delta.logprobs)} log-probabilities"
                raise ProtocolError(f"{what} for {len(delta.token_ids)} tokens")
            _check_logprobs(delta.logprobs, self._num_logprobs)
        if self._num_prompt_logprobs is not None:
            _check_logprobs(delta.prompt_logprobs, self._num_prompt_logprobs)
            self._num_prompt_left -= len(delta.prompt_logprobs)
        self._has_tokens |= bool(delta.token_ids)
        if self._num_prompt_left < 0 or (self._has_tokens and self._num_prompt_left):
            raise ProtocolError("another number of log-probabilities than the prompt has tokens")
        if not delta.token_ids and delta.error is None and delta.finish_reason is not None:
            raise ProtocolError("an end without a token")


def _check_ids(token_ids: Sequence[int]) -> None:
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) <= MAX_TOKEN_ID:
        raise ProtocolError(f"token ids from {min(token_ids)} to {max(token_ids)}")


def _check_logprobs(logprobs: Sequence[TokenLogprob], num_top: int) -> None:
    for logprob in logprobs:
        if not len(logprob.top_token_ids) == len(logprob.top_logprobs) == num_top:
            raise ProtocolError(f"not {num_top} most probable tokens: {logprob}")
        _check_ids(logprob.top_token_ids)


def _with(columns: LogprobColumns | None, logprobs: Sequence[TokenLogprob]) -> LogprobColumns:
    columns = columns or LogprobColumns()
    for logprob in logprobs:
        columns.append(logprob)
    return columns


@dataclass
class _Connection:
    """What is known about the router at the other end of the link."""

    link: RouterLink
    boot_id: str
    heard_s: float
    """Monotonic time of its last message."""
    num_kv_slots: int = 0
    device: DeviceFacts | None = None
    workers_ready: bool = False
    session: int = 0
    """Of the hello that was said to it."""
    num_foreign: int = 0
    """Statuses in a row that were for another session."""
    num_deltas: int | None = None
    """That have come in this session; None: before its first status."""
    num_sent: int = 0
    """Messages since the hello."""
    is_out_of_step: bool = False
    status: RouterStatus | None = None
    unsent: list[Abort | Finish] = field(default_factory=list)
    """Ends that found the queue full; sent again with the next message that arrives."""
    progress: dict[RequestId, int] = field(default_factory=dict)
    """Acknowledgements to be sent with the next turn of the loop, or the next message."""

    def send(self, message: FrontendMessage) -> None:
        """Send a message, and count it. Raises ChannelFull, FrameTooLarge."""
        self.link.send(message)
        self.num_sent += 1


def _on_status(connection: _Connection, status: RouterStatus) -> None:
    """Take in a status: it says all that matters anew, so that a lost welcome does no harm."""
    if status.session != connection.session:
        connection.num_foreign += 1  # as a rule it left before this session's hello came
        connection.is_out_of_step |= connection.num_foreign >= MAX_FOREIGN
        return
    connection.num_foreign = 0
    if connection.num_deltas is None:
        connection.num_deltas = status.num_deltas
    connection.is_out_of_step |= connection.num_deltas != status.num_deltas
    connection.is_out_of_step |= status.num_lost != 0
    with contextlib.suppress(ChannelFull):  # the next status asks again
        connection.link.send(SentSoFar(num_messages=connection.num_sent))
    connection.status = status
    connection.num_kv_slots = status.num_kv_slots or connection.num_kv_slots
    connection.workers_ready = status.workers_ready and connection.num_kv_slots > 0


class RouterClient:
    """See the module."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._connection: _Connection | None = None
        self._disconnected_s = clock()
        self._last_heard: tuple[str, float] | None = None
        """The boot detached from, and when it was last heard of."""
        self._live: dict[RequestId, LiveRequest] = {}
        self._next_id = 0
        self._kv_query = KVQuery()
        self.num_rejected = 0
        """News that may not be said of their requests."""

    # ------------------------------------------------------------------ state

    @property
    def is_ready(self) -> bool:
        """Whether requests can be submitted."""
        return self._connection is not None and self._connection.workers_ready

    def check_ready(self) -> None:
        """Raise RequestFailed unless requests can be submitted."""
        self._ready_connection()

    @property
    def device(self) -> DeviceFacts | None:
        """What the workers compute on, as far as they have said."""
        return None if self._connection is None else self._connection.device

    @property
    def num_kv_slots(self) -> int:
        """Tokens that the KV pool holds. Raises RequestFailed while not ready."""
        return self._ready_connection().num_kv_slots

    @property
    def num_live(self) -> int:
        """Requests that the router has."""
        return len(self._live)

    @property
    def status(self) -> RouterStatus | None:
        """The router's last pulse."""
        return None if self._connection is None else self._connection.status

    @property
    def silent_s(self) -> float | None:
        """Seconds since the connected router was last heard of; None while there is none."""
        return None if self._connection is None else self._clock() - self._connection.heard_s

    @property
    def disconnected_s(self) -> float | None:
        """Seconds since there was a router; None while there is one."""
        return None if self._connection is not None else self._clock() - self._disconnected_s

    def _ready_connection(self) -> _Connection:
        if self._connection is None or not self._connection.workers_ready:
            raise not_ready()
        return self._connection

    async def describe_kv(self) -> KVPool:
        """Return what the slots of the KV pool are for, as the router sees it.

        Raises:
            RequestFailed: there is no ready router, it is lost meanwhile or does not answer.
        """
        return await self._kv_query.ask(self._ready_connection().send)

    # ------------------------------------------------------------------ the link

    @property
    def is_out_of_step(self) -> bool:
        """Whether messages of the router are lost, or it takes another process for this one.

        A new hello, after `detach`, brings both back together.
        """
        return self._connection is not None and self._connection.is_out_of_step

    def attach(self, link: RouterLink, boot_id: str, session: int = 0) -> None:
        """Use this link from now on; requests are taken once its router says that it is ready.

        A router attached again is as silent as before: only what it says shows that it lives.
        """
        assert self._connection is None, "detach first"
        heard_s = self._clock()
        if self._last_heard is not None and self._last_heard[0] == boot_id:
            heard_s = self._last_heard[1]
        self._connection = _Connection(link, boot_id, heard_s, session=session)

    def detach(self) -> None:
        """Forget the router: all live requests fail. No effect while there is none."""
        if self._connection is not None:
            self._last_heard = (self._connection.boot_id, self._connection.heard_s)
            self._connection = None
            self._disconnected_s = self._clock()
            self.fail_all(router_lost())
            self._kv_query.fail(router_lost())

    def on_message(self, message: RouterMessage) -> None:
        """Take in what the router says."""
        connection = self._connection
        if connection is None:
            return
        connection.heard_s = self._clock()
        if isinstance(message, TokenDelta):
            if connection.num_deltas is not None:
                connection.num_deltas += 1
            for delta in message.requests:
                self._on_delta(delta)
        elif isinstance(message, RouterStatus):
            _on_status(connection, message)
        elif isinstance(message, RouterWelcome) and message.boot_id == connection.boot_id:
            connection.num_kv_slots = message.num_kv_slots
            connection.device = message.device
            connection.workers_ready = message.num_kv_slots > 0
        elif isinstance(message, KVMap):
            self._kv_query.on_map(message)
        unsent, connection.unsent = connection.unsent, []
        for end in unsent:
            self._send_end(end)
        self._send_progress()

    def _on_delta(self, delta: RequestDelta) -> None:
        request = self._live.get(delta.request_id)
        if request is None:
            return  # aborted while the news were on their way
        try:
            request.append(delta)
        except ProtocolError as error:
            self.num_rejected += 1
            log.error("request %d failed: the router said %s", delta.request_id, error)
            request.end(from_router(ErrorCode.INVALID))
            return
        if not request.is_kept_by_router:
            self._live.pop(delta.request_id, None)  # it may have been given up meanwhile

    # ------------------------------------------------------------------ requests

    def submit(self, request: NewRequest) -> LiveRequest:
        """Send a request to the router.

        Raises:
            InvalidRequest: it is larger than the router takes.
            RequestFailed: there is no ready router, or its queue is full.
        """
        connection = self._ready_connection()
        request_id = RequestId(self._next_id)
        self._next_id += 1
        message = Submit(
            request_id=request_id,
            prompt=[TokenSegment(token_ids=pack_int32(request.prompt_token_ids))],
            max_tokens=request.max_tokens,
            eos_token_ids=list(request.eos_token_ids),
            sampling=request.sampling,
            request_class=request.request_class,
            age_s=max(0.0, self._clock() - request.arrival_s),
            priority=request.priority,
            slo=request.slo,
            prediction_key=request.prediction_key,
            prefix_salt=request.prefix_salt,
            num_retained_tokens=request.num_retained_tokens,
            retention_s=request.retention_s,
            needs_acknowledgement=bool(request.stop_strings),
            constraint=request.constraint,
            names=request.names,
        )
        try:
            connection.send(message)
        except ChannelFull:
            raise overloaded() from None
        except FrameTooLarge as error:
            raise too_large_to_submit(error.num_bytes, error.max_bytes) from None
        live = LiveRequest(request_id, self, request)
        self._live[request_id] = live
        return live

    def fail_all(self, failure: RequestFailed) -> None:
        """End every live request with a failure, here and (if it is there) in the router."""
        live, self._live = self._live, {}
        for request_id, request in live.items():
            if not request.is_over:
                request.fail(failure)
            self._send_end(Abort(request_id=request_id))

    def abort(self, request_id: RequestId) -> None:
        """Forget a live request, here and in the router; no effect on others."""
        if self._live.pop(request_id, None) is not None:
            self._send_end(Abort(request_id=request_id))

    def finish(self, request_id: RequestId, num_tokens: int) -> None:
        """Tell the router after how many tokens an output with stop strings ended."""
        self._live.pop(request_id, None)
        self._send_end(Finish(request_id=request_id, num_tokens=num_tokens))

    def acknowledge(self, request_id: RequestId, num_tokens: int) -> None:
        """Tell the router, with this turn's others, how far an output has been looked at."""
        connection = self._connection
        if connection is None:
            return
        if not connection.progress:
            asyncio.get_running_loop().call_soon(self._send_progress)
        connection.progress[request_id] = num_tokens

    def _send_progress(self) -> None:
        connection = self._connection
        if connection is None or not connection.progress:
            return
        progress = [Progress(*item) for item in connection.progress.items()]
        with contextlib.suppress(ChannelFull):  # it stays, for the next message that arrives
            connection.send(Acknowledge(progress=progress))
            connection.progress.clear()

    def _send_end(self, end: Abort | Finish) -> None:
        if self._connection is None:
            return
        self._connection.progress.pop(end.request_id, None)
        try:
            self._connection.send(end)
        except ChannelFull:
            self._connection.unsent.append(end)
