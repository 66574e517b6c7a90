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
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import msgspec

from lightserve.channels import AsyncLink
from lightserve.errors import ChannelFull, FrameTooLarge, ProtocolError
from lightserve.frontend.errors import (
    RequestFailed,
    from_router,
    not_ready,
    queue_full,
    router_lost,
    too_large_to_submit,
)
from lightserve.frontend.news import LiveRequest, Reader
from lightserve.frontend.request_options import OutputOptions
from lightserve.messages.common import DeviceFacts, unpack_int32, unpack_int64
from lightserve.messages.frontend_router import (
    Abort,
    Acknowledge,
    BatchDue,
    DescribeKV,
    DescribeRequest,
    ErrorCode,
    Finish,
    FrontendMessage,
    KVMap,
    KVPool,
    MaySubmit,
    Progress,
    RequestDelta,
    RequestLife,
    RequestTimeline,
    RouterMessage,
    RouterStatus,
    RouterWelcome,
    SentSoFar,
    StepNote,
    Submit,
    TokenDelta,
    Verdict,
)
from lightserve.types import RequestId

log = logging.getLogger(__name__)

T = TypeVar("T")
RouterLink = AsyncLink[FrontendMessage, RouterMessage]


MAX_READ_S = 0.002
"""How long news that are not urgent may be read at a time."""

MAX_FOREIGN = 3
"""Statuses of another session, about a second apart, after which this one is given up."""


@dataclass
class _Connection:
    """State of the router at the other end of the link."""

    link: RouterLink
    boot_id: str
    heard_s: float
    """Monotonic time of its last message."""
    num_kv_slots: int = 0
    device: DeviceFacts | None = None
    workers_ready: bool = False
    session: int = 0
    """Session of the hello that was sent to it."""
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
    num_kv_slots = status.num_kv_slots - status.num_state_slots
    connection.num_kv_slots = max(0, num_kv_slots) or connection.num_kv_slots
    connection.workers_ready = status.workers_ready and connection.num_kv_slots > 0


ANSWER_TIMEOUT_S = 5.0


class PoolNow(NamedTuple):
    """The router's answer about the present."""

    pool: KVPool
    steps: list[StepNote]
    """The last ones, if it was asked for them a moment ago as well."""


MAX_QUESTIONS = 32


class Questions(Generic[T]):
    """Asks what the router answers each asker apart."""

    def __init__(self, timeout_s: float | None) -> None:
        """`timeout_s` for an answer; None: as long as the router is there, as a request waits."""
        self._timeout_s = timeout_s
        self._number = 0
        self._pending: dict[int, asyncio.Future[T]] = {}

    async def ask(self, send: Callable[[int], None]) -> T:
        """Return the answer; `send` sends the question of a number.

        Raises:
            RequestFailed: no answer within `timeout_s` (504), a full queue to the router
                (429), or the router was lost meanwhile (503).
        """
        if len(self._pending) >= MAX_QUESTIONS:
            raise queue_full()
        self._number += 1
        number = self._number
        try:
            send(number)
        except ChannelFull:
            raise queue_full() from None
        pending: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._pending[number] = pending
        try:
            async with asyncio.timeout(self._timeout_s):
                return await pending
        except TimeoutError:
            raise _router_timeout() from None
        finally:
            self._pending.pop(number, None)

    def on_answer(self, number: int, answer: T) -> None:
        """Take in an answer; one that is not waited for any more is dropped."""
        pending = self._pending.get(number)
        if pending is not None and not pending.done():
            pending.set_result(answer)

    def fail(self, failure: RequestFailed) -> None:
        """End all questions that wait for an answer."""
        for pending in self._pending.values():
            if not pending.done():
                pending.set_exception(failure)


def _router_timeout() -> RequestFailed:
    return RequestFailed(
        f"the router did not answer within {ANSWER_TIMEOUT_S:g} s; try again",
        code="router_timeout",
        status=504,
    )


class RouterClient:
    """See the module."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, be_interval_s: float = 0.0
    ) -> None:
        """Tokens for readers that can wait are told every `be_interval_s`."""
        self._clock = clock
        self._be_interval_s = be_interval_s
        self._connection: _Connection | None = None
        self._disconnected_s = clock()
        self._last_heard: tuple[str, float] | None = None
        """The boot detached from, and when it was last heard of."""
        self._live: dict[RequestId, LiveRequest] = {}
        self._next_id = 0
        self._pools: Questions[KVMap] = Questions(ANSWER_TIMEOUT_S)
        self._pool: asyncio.Task[KVMap] | None = None
        """Answer that askers at the same time share, so that they cost the router one map."""
        self._timelines: Questions[list[RequestLife]] = Questions(ANSWER_TIMEOUT_S)
        self._verdicts: Questions[Verdict] = Questions(None)
        self._urgent: list[Reader] = []
        """Urgent readers with news, from the message that is being taken in."""
        self._others: deque[Reader] = deque()
        """Other readers with news, from earlier messages."""
        self._waiting: list[Reader] = []
        """Readers whose news are read with the next beat of `be_interval_s`."""
        self._will_read = False
        self._end: RequestFailed | None = None
        """The failure of all requests from now on."""
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
        """The device of the workers, as far as they have said."""
        return None if self._connection is None else self._connection.device

    @property
    def num_kv_slots(self) -> int:
        """Tokens of one request that the KV pool holds. Raises RequestFailed while not ready."""
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
        if self._end is not None:
            raise self._end
        if self._connection is None or not self._connection.workers_ready:
            raise not_ready()
        return self._connection

    async def describe_kv(self) -> PoolNow:
        """Return what the slots of the KV pool are for, as the router sees it, and its last steps.

        Raises:
            RequestFailed: there is no ready router, it is lost meanwhile or does not answer.
        """
        send = self._ready_connection().send
        if self._pool is None or self._pool.done():
            asking = self._pools.ask(lambda number: send(DescribeKV(query_id=number)))
            self._pool = asyncio.create_task(asking)
            # Seen, also where all have left.
            self._pool.add_done_callback(lambda task: task.cancelled() or task.exception())
        found = await asyncio.shield(self._pool)
        if found.pool is None:
            raise not_ready()
        return PoolNow(found.pool, found.steps)

    async def describe_request(self, name: str, client_key: str | None) -> list[RequestLife]:
        """Return what became of the requests of that name and of that client, None: of any.

        Raises:
            RequestFailed: as `describe_kv`, or too many ask at once.
        """
        send = self._ready_connection().send
        return await self._timelines.ask(
            lambda number: send(DescribeRequest(query_id=number, name=name, client_key=client_key))
        )

    async def ask(self, request: Submit) -> None:
        """Ask whether a request may come now, which is no promise; its images need no pixels.

        Raises:
            InvalidRequest, RequestFailed: it would be refused, or as `submit`.
        """
        send = self._ready_connection().send
        try:
            verdict = await self._verdicts.ask(
                lambda number: send(MaySubmit(query_id=number, submit=request))
            )
        except FrameTooLarge as error:
            raise too_large_to_submit(error.num_bytes, error.max_bytes) from None
        if verdict.error is not None:
            raise from_router(
                verdict.error,
                retry_after_s=verdict.retry_after_s,
                max_tokens=verdict.max_tokens,
                client=request.client,
            )

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
            for questions in (self._pools, self._timelines, self._verdicts):
                questions.fail(router_lost())

    def on_message(self, message: RouterMessage) -> None:
        """Take in what the router says."""
        connection = self._connection
        if connection is None:
            return
        connection.heard_s = self._clock()
        if isinstance(message, TokenDelta):
            if connection.num_deltas is not None:
                connection.num_deltas += 1
            self._on_tokens(connection, message)
            for delta in message.requests:
                self._on_delta(delta)
            self._read_urgent(connection.heard_s)
        elif isinstance(message, RouterStatus):
            _on_status(connection, message)
        elif isinstance(message, RouterWelcome) and message.boot_id == connection.boot_id:
            connection.num_kv_slots = message.num_kv_slots
            connection.device = message.device
            connection.workers_ready = message.num_kv_slots > 0
        elif isinstance(message, KVMap):
            self._pools.on_answer(message.query_id, message)
        elif isinstance(message, RequestTimeline):
            self._timelines.on_answer(message.query_id, message.lives)
        elif isinstance(message, Verdict):
            self._verdicts.on_answer(message.query_id, message)
        unsent, connection.unsent = connection.unsent, []
        for end in unsent:
            self._send_end(end)
        self._send_progress()

    def tell(self, reader: Reader, *, at_once: bool = True) -> None:
        """Have news read: urgent ones with this message, others after all that has arrived.

        Those that can wait are read at intervals, unless these are to be read `at_once`.
        """
        if reader.is_urgent:
            self._urgent.append(reader)
        elif at_once or not reader.can_wait or not self._be_interval_s:
            self._others.append(reader)
        else:
            if not self._waiting:
                asyncio.get_running_loop().call_later(self._be_interval_s, self._end_waiting)
            self._waiting.append(reader)

    def _end_waiting(self) -> None:
        self._others.extend(self._waiting)
        self._waiting.clear()
        self._read_soon()

    def _read_urgent(self, now_s: float) -> None:
        urgent, self._urgent = self._urgent, []
        for reader in urgent:
            reader.read(now_s)
        self._read_soon()

    def _read_soon(self) -> None:
        if self._others and not self._will_read:
            self._will_read = True
            # Messages are taken in one after the other while there are some: this comes after them.
            asyncio.get_running_loop().call_soon(self._read_others)

    def _read_others(self) -> None:
        self._will_read = False
        now_s = self._clock()
        end_s = now_s + MAX_READ_S
        while self._others and now_s < end_s:
            self._others.popleft().read(now_s)
            now_s = self._clock()
        self._read_soon()

    def _on_tokens(self, connection: _Connection, message: TokenDelta) -> None:
        """Take in the tokens of requests that go on; nothing else is to be said of them."""
        try:
            request_ids = unpack_int64(message.request_ids).tolist()
            token_ids = unpack_int32(message.token_ids).tolist()
            news = list(zip(request_ids, token_ids, strict=True))
        except ValueError as error:
            self.num_rejected += 1
            log.error("the router said tokens of no request: %s", error)
            connection.is_out_of_step = True
            return
        live = self._live
        for request_id, token_id in news:
            request = live.get(request_id)
            if request is None:
                continue  # aborted while the token was on its way
            try:
                request.append_token(token_id)
            except ProtocolError as error:
                self._refuse(request, error)

    def _on_delta(self, delta: RequestDelta) -> None:
        """Take in other news."""
        request = self._live.get(delta.request_id)
        if request is None:
            return
        try:
            request.append(delta)
        except ProtocolError as error:
            self._refuse(request, error)
            return
        if not request.is_kept_by_router:
            self._live.pop(delta.request_id, None)  # it may have been given up meanwhile

    def _refuse(self, request: LiveRequest, error: ProtocolError) -> None:
        """End a request of which the router said what it may not."""
        self.num_rejected += 1
        log.error("request %d failed: the router said %s", request.request_id, error)
        request.end(from_router(ErrorCode.INVALID))

    # ------------------------------------------------------------------ requests

    def submit(
        self,
        request: Submit,
        options: OutputOptions,
        *,
        is_first: bool = True,
        names: tuple[str, ...] = (),
    ) -> LiveRequest:
        """Send a request to the router, with a number of its own, its age, and these fields.

        Raises:
            InvalidRequest: it is larger than the router takes.
            RequestFailed: there is no ready router, or its queue is full.
        """
        connection = self._ready_connection()
        age_s = max(0.0, self._clock() - options.arrival_s)
        request_id = RequestId(self._next_id)
        request = msgspec.structs.replace(
            request, request_id=request_id, age_s=age_s, is_first=is_first, names=names
        )
        self._next_id += 1
        try:
            connection.send(request)
        except ChannelFull:
            raise queue_full() from None
        except FrameTooLarge as error:
            raise too_large_to_submit(error.num_bytes, error.max_bytes) from None
        live = LiveRequest(self, request, num_prompt_tokens=len(options.prompt_token_ids))
        self._live[request_id] = live
        return live

    def fail_all(self, failure: RequestFailed) -> None:
        """End every live request with a failure, here and (if it is there) in the router."""
        live, self._live = self._live, {}
        for request_id, request in live.items():
            if not request.is_over:
                request.fail(failure)
            self._send_end(Abort(request_id=request_id))

    def end(self, failure: RequestFailed) -> None:
        """End every live request with a failure, and refuse all others with it from now on."""
        self._end = failure
        self.fail_all(failure)

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

    def move_batch(self, batch: int, due_in_s: float) -> bool:
        """Have all lines of a batch be due then; False: it could not be sent."""
        if self._connection is None:
            return False
        try:
            self._connection.send(BatchDue(batch=batch, due_in_s=due_in_s))
        except ChannelFull:
            return False
        return True

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
