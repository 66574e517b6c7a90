"""How a completion becomes an HTTP response, streamed or whole, and ends when the client leaves.

A route parses its body and returns a `CompletionResponse`; encoding, submitting and sending
happen when it is called, under one watch for the client's hang-up. The watch aborts in every
state: while the prompt is encoded, queued, prefilled, or streamed, and also when nothing is
streamed (plain FastAPI would go on computing). So does a request's own `timeout`, with
an error for the client. A client that stays but does not read
is cut off by its connection (see `http_server`), which to the watch is a hang-up too.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from lightserve.errors import InvalidRequest
from lightserve.frontend.completion import Choices, News, TextDelta
from lightserve.frontend.connections import Turns
from lightserve.frontend.errors import (
    ClientGone,
    RequestFailed,
    draining,
    error_body,
    overloaded,
    timed_out,
)
from lightserve.frontend.json_body import KEPT_BYTES_KEY
from lightserve.frontend.middleware import Caller, owner_of
from lightserve.frontend.request_options import Prepared, ServiceLevel
from lightserve.frontend.service import Service
from lightserve.logs import request_id

if TYPE_CHECKING:
    from lightserve.frontend.tracing import RequestTrace

log = logging.getLogger(__name__)

T = TypeVar("T")

CONNECTION_KEY = "lightserve.connection"
"""Key in the ASGI scope: the `Connection`, where there is one."""

_SSE_HEADERS = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
BYTES_PER_WRITE = 65_536
"""Bytes that are written at once of a long answer."""
TURN_S = 0.005
KEEP_ALIVE = b": keep-alive\n\n"
_JSON_HEADERS = [(b"content-type", b"application/json")]


class Connection(Protocol):
    """A connection, as far as a response needs it."""

    is_cut_off: bool
    """Whether it was closed because the client did not read in time."""

    def cut_off(self) -> None:
        """Close it for that reason."""

    @property
    def is_writable(self) -> bool:
        """Whether everything written is through, and there may be more."""

    def write_body(self, data: bytes) -> None:
        """Write a part of the body, in the middle of one that is streamed."""

    async def drained(self) -> None:
        """Wait until everything written is through, or the connection is lost."""


class ResponseWriter(ABC):
    """One route's way of writing completions down; made for one request, all bytes final."""

    request_id: str
    wants_pieces = False
    keep_alive = KEEP_ALIVE
    """Bytes that show life on a stream that has had nothing to send for a while."""
    keeps_streamed = False
    """Whether it keeps what it streams, to say it again at the end."""

    def opening(self) -> bytes:
        """Return the events before the first text."""
        return b""

    def delta(self, index: int, delta: TextDelta, choices: Choices) -> Iterable[bytes]:
        """Return the events of some news of a completion, the finish included."""
        return ()

    def closing(self, choices: Choices) -> bytes:
        """Return the events after the last news."""
        return b""

    def failing(self, failure: InvalidRequest | RequestFailed) -> bytes:
        """Return the event that ends a stream in place of further news."""
        return sse_event(error_body(failure))

    @abstractmethod
    def keep(self, index: int, delta: TextDelta) -> None:
        """Take in some news of a completion for the answer as a whole."""

    @abstractmethod
    def whole(self, choices: Choices) -> Iterator[bytes]:
        """Yield the JSON body of the answer as a whole, from all that was kept."""


Prepare = Callable[[], Awaitable[Sequence[Prepared]]]
"""Encodes the prompts and resolves all parameters; raises InvalidRequest, RequestFailed."""
BeforeEnd = Callable[[Choices], Awaitable[None]]
"""Does what has to be done before a client hears of the end; raises as `Prepare` does."""


def sse_event(data: bytes) -> bytes:
    """Return one server-sent event."""
    return b"data: " + data + b"\n\n"


def new_request_id(prefix: str) -> str:
    """Return a fresh id such as `cmpl-…`."""
    return f"{prefix}-{uuid.uuid4().hex}"


class Turn:
    """Lets the event loop turn now and then while a long answer is written."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._began_s = time.monotonic()

    async def pause_if_long(self) -> None:
        """Let others have their turn if this one has taken a while."""
        if time.monotonic() - self._began_s > TURN_S:
            await self._turns.next()
            self._began_s = time.monotonic()


class EventWriter:
    """The body of a stream: the status leaves with the first event, comments keep it alive.

    Once it has begun it is a `Sink`: what comes then goes from the router's message to the
    connection, without a turn of the task.
    """

    def __init__(
        self,
        send: Send,
        keepalive_s: float,
        keep_alive: bytes,
        events_of: Callable[[int, TextDelta], Iterable[bytes]],
        connection: Connection | None,
    ) -> None:
        self._send = send
        self._keep_alive = keep_alive
        self._events_of = events_of
        self._connection = connection
        self._keepalive_s = keepalive_s
        self._written_s = time.monotonic()
        self.has_begun = False

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Send events."""
        self._written_s = time.monotonic()
        if not self.has_begun:
            self.has_begun = True
            await self._send(_start(_SSE_HEADERS))
        await self._send(_body(data, more=more))

    @property
    def is_open(self) -> bool:
        """Whether events can be written at once."""
        return self.has_begun and self._connection is not None and self._connection.is_writable

    def take(self, news: Sequence[News], now_s: float) -> None:
        """Write events of completions that go on, all together."""
        assert self._connection is not None
        self._written_s = now_s
        data = b"".join(event for index, delta in news for event in self._events_of(index, delta))
        if data:
            self._connection.write_body(data)

    async def keep_alive(self) -> None:
        """Send what shows life whenever nothing has been sent for a while; until cancelled."""
        while True:
            idle_s = time.monotonic() - self._written_s
            if idle_s >= self._keepalive_s:
                await self.write(self._keep_alive)
                idle_s = 0.0
            await asyncio.sleep(self._keepalive_s - idle_s)


async def prepared_for(service: Service, request: Request, work: Callable[[], Awaitable[T]]) -> T:
    """Return what is prepared for a request that generates nothing, while its client stays.

    Raises:
        ClientGone: the client has left.
        RequestFailed: too much is waiting, or the server is about to end.
    """
    scope = request.scope
    with service.in_flight.admitted(owner_of(scope), scope.get(KEPT_BYTES_KEY, 0)):
        client_gone = asyncio.create_task(client_leaves(request.receive))
        try:
            return await _prepared(service, work(), client_gone)
        finally:
            client_gone.cancel()


async def _prepared(
    service: Service,
    work: Awaitable[T],
    client_gone: asyncio.Task[None],
    level: ServiceLevel | None = None,
) -> T:
    """Return the result of `work`, which ends with its client, or with the time of `level`.

    Raises:
        ClientGone: the client has left before.
        RequestFailed: the time is over, or the server is about to end.
    """
    preparing = service.in_flight.prepare(work)
    awaited: set[asyncio.Future[Any]] = {preparing, client_gone}
    try:
        timeout_s = None if level is None else level.left_s
        await asyncio.wait(awaited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if client_gone.done():
            if preparing.done() and not preparing.cancelled():
                preparing.exception()  # there may be one, and no client to be told
            raise ClientGone
        if preparing.cancelled():
            raise draining()
        if not preparing.done():
            assert level is not None and level.timeout_s is not None
            raise timed_out(level.timeout_s)
        return preparing.result()
    finally:
        preparing.cancel()


class CompletionResponse(Response):
    """The whole life of one request's completions; see the module."""

    def __init__(
        self,
        service: Service,
        writer: ResponseWriter,
        prepare: Prepare,
        level: ServiceLevel,
        *,
        stream: bool,
        per_prompt: int = 1,
        before_end: BeforeEnd | None = None,
    ) -> None:
        """`per_prompt` consecutive ones of the prepared requests share a prompt."""
        super().__init__()
        self._service = service
        self._writer = writer
        self._prepare = prepare
        self._level = level
        self._stream = stream
        self._per_prompt = per_prompt
        self._before_end = before_end
        self._has_begun = False
        self._owner = ""
        self._connection: Connection | None = None
        self._choices: Choices | None = None
        self._is_crowded_out = False
        self._trace: RequestTrace | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Encode, submit, send; abort when the client leaves or this task is cancelled."""
        tracer = self._service.tracer
        if tracer is not None:
            self._trace = tracer.begin(scope, self._level, self._writer.request_id)
        try:
            await self._respond(scope, receive, send)
        except (InvalidRequest, RequestFailed) as failure:
            if self._trace is not None and self._choices is None:
                self._trace.refuse(failure.code)
            raise

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._service.in_flight.admitted(owner_of(scope), scope.get(KEPT_BYTES_KEY, 0)):
            self._service.router.check_ready()  # before anything is spent on the prompt
            client_gone = asyncio.create_task(client_leaves(receive))
            try:
                requests = await self._requests(client_gone)
                self._mark("lightserve.tokenised")
                self._owner = owner_of(scope)
                self._connection = scope.get(CONNECTION_KEY)
                await self._generate(requests, client_gone, send)
            except ClientGone:
                if self._trace is not None and self._choices is None:
                    self._trace.refuse("client_gone")
            finally:
                client_gone.cancel()

    async def _requests(self, client_gone: asyncio.Task[None]) -> Sequence[Prepared]:
        """Return what is to be submitted; count a request that ends before that."""
        level = self._level
        try:
            return await _prepared(self._service, self._prepare(), client_gone, level)
        except RequestFailed as failure:
            self._service.observation.requests.request(
                level.request_class, arrival_s=level.arrival_s, num_prompt_tokens=0, slo=level.slo
            ).on_failure(failure.code)
            raise

    async def _generate(
        self, requests: Sequence[Prepared], client_gone: asyncio.Task[None], send: Send
    ) -> None:
        connection = self._connection
        names = tuple(filter(None, (self._writer.request_id, request_id.get())))
        self._choices = choices = await Choices.start(
            functools.partial(self._service.start, names=names, by_token=self._writer.wants_pieces),
            requests,
            per_prompt=self._per_prompt,
        )
        self._mark("lightserve.submitted")
        client_gone.add_done_callback(lambda _: choices.abort())
        timer = self._start_timer(choices)
        outcome = "cancelled"
        try:
            await (self._send_stream if self._stream else self._send_whole)(choices, send)
            if connection is not None:
                await connection.drained()
            outcome = str(choices.first.finish_reason)
        except ClientGone:
            outcome = "client_gone"
        except (InvalidRequest, RequestFailed) as failure:
            outcome = failure.code
            if not self._has_begun:
                raise  # it can still be a status
            await send(_body(self._writer.failing(failure), more=False))
        finally:
            if timer is not None:
                timer.cancel()
            choices.abort()
            self._service.kept.release(self)
            if connection is not None and connection.is_cut_off:
                outcome = "slow_reader"
            _log_end(self._writer.request_id, choices, outcome, self._level.caller)
            if self._trace is not None:
                self._trace.end(choices, outcome)

    def _mark(self, name: str) -> None:
        if self._trace is not None:
            self._trace.mark(name)

    def _start_timer(self, choices: Choices) -> asyncio.TimerHandle | None:
        """Have the choices end with an error when the request's time is over."""
        timeout_s, left_s = self._level.timeout_s, self._level.left_s
        if timeout_s is None or left_s is None:
            return None
        failure = timed_out(timeout_s)
        return asyncio.get_running_loop().call_later(left_s, choices.end, failure)

    async def _send_whole(self, choices: Choices, send: Send) -> None:
        while not choices.is_over:
            index, delta = await choices.next_news()
            self._writer.keep(index, delta)
            self._hold(choices)
        if self._before_end is not None:
            await self._before_end(choices)
            choices.check_wanted()
        self._has_begun = True
        await send(_start(_JSON_HEADERS))
        body, turn = bytearray(), Turn(self._service.turns)
        for piece in self._writer.whole(choices):
            body += piece
            if len(body) >= BYTES_PER_WRITE:
                await send(_body(bytes(body), more=True))
                body.clear()
                self._hold(choices)
            await turn.pause_if_long()
            choices.check_wanted()
        await send(_body(bytes(body), more=False))

    def _hold(self, choices: Choices) -> None:
        """Count what is kept, which comes on. Raises RequestFailed, ClientGone."""
        self._count(choices.num_bytes)
        if self._is_crowded_out:
            raise ClientGone if self._has_begun else overloaded()

    def _count(self, num_bytes: int) -> None:
        """Count what this holds for its client; something may have to go, perhaps this."""
        if self._is_crowded_out:
            return
        for response in self._service.kept.hold(self, self._owner, num_bytes):
            self._service.observation.rejects["kept_answer_evicted"] += 1
            response.crowd_out()

    def crowd_out(self) -> None:
        """Give up an answer: what is kept has become too much, and its client has the most."""
        assert self._choices is not None
        self._is_crowded_out = True
        if not self._has_begun and not self._stream:
            self._choices.end(overloaded())
            return
        self._choices.abort()
        if self._connection is not None:
            self._connection.cut_off()

    async def _send_stream(self, choices: Choices, send: Send) -> None:
        """Send one event per news; the status waits for the first, as they may be a failure,
        but no longer than for the first comment."""
        writer = EventWriter(
            send,
            self._service.config.sse_keepalive_s,
            self._writer.keep_alive,
            lambda index, delta: self._writer.delta(index, delta, choices),
            self._connection,
        )
        keeping_alive = asyncio.create_task(writer.keep_alive())
        is_first, turn = True, Turn(self._service.turns)
        keeps = self._writer.keeps_streamed
        sink = None if keeps else writer  # what is kept is counted here

        def num_held() -> int:
            return choices.num_unread_bytes + (choices.num_bytes if keeps else 0)

        for completion in choices.completions:
            completion.watch(lambda: self._count(num_held()))
        try:
            while not choices.is_over:
                index, delta = await choices.next_news(sink)
                if keeps:
                    self._count(num_held())
                elif choices.num_unread_bytes == 0:
                    self._service.kept.release(self)
                data = self._writer.opening() if is_first else b""
                is_first = False
                for events in self._writer.delta(index, delta, choices):
                    data += events
                    if len(data) >= BYTES_PER_WRITE:
                        await writer.write(data)
                        data = b""
                        await turn.pause_if_long()
                        choices.check_wanted()
                if choices.is_over:
                    keeping_alive.cancel()
                    if self._before_end is not None:
                        await writer.write(data)
                        data = b""
                        await self._before_end(choices)
                        choices.check_wanted()
                    data += self._writer.closing(choices)
                await writer.write(data, more=not choices.is_over)
        finally:
            self._has_begun = writer.has_begun
            keeping_alive.cancel()


async def client_leaves(receive: Receive) -> None:
    """Return when the client has hung up; the request's body has been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _start(headers: list[tuple[bytes, bytes]]) -> Message:
    return {"type": "http.response.start", "status": 200, "headers": headers}


def _body(data: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


def _log_end(request_id: str, choices: Choices, outcome: str, caller: Caller) -> None:
    """Log one line per request: identity, sizes and times, never a text or a key."""
    request, usage = choices.first.request, choices.usage
    now_s, arrival_s = time.monotonic(), choices.first.options.arrival_s
    first_s = choices.first.first_token_s
    fields = {
        "request": request_id,
        "class": request.request_class.value,
        "outcome": outcome,
        "client": caller.name or None,
        "prediction_key": _short_hash(request.prediction_key),
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "ttft_ms": None if first_s is None else round((first_s - arrival_s) * 1e3, 1),
        "total_ms": round((now_s - arrival_s) * 1e3, 1),
    }
    text = " ".join(f"{name}={'-' if v is None else v}" for name, v in fields.items())
    log.info("%s", text, extra={"fields": fields})


def _short_hash(key: str) -> str | None:
    """Return what tells keys apart in the log without giving them away."""
    return hashlib.sha256(key.encode()).hexdigest()[:12] if key else None
