"""How a generation becomes an HTTP response, streamed or whole, and ends when the client leaves.

A route parses its body and returns a `GenerationResponse`; encoding, submitting and sending
happen when it is called, under one watch for the client's hang-up. The watch aborts in every
state: while the prompt is encoded, queued, prefilled, or streamed, and also when nothing is
streamed (plain FastAPI would go on computing for nobody). A client that stays but does not read
is cut off by its connection (see `http_protocol`), which to the watch is a hang-up too.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Protocol

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from lightserve.errors import InvalidRequest
from lightserve.frontend.access import ANYBODY, Caller, caller_of
from lightserve.frontend.failures import ClientGone, RequestFailed, error_body
from lightserve.frontend.generation import Generation, TextDelta
from lightserve.frontend.router_client import NewRequest
from lightserve.frontend.service import Service

log = logging.getLogger(__name__)

ARRIVAL_KEY = "lightserve.arrival_s"
"""Key in the ASGI scope: monotonic time at which the headers were there."""

CONNECTION_KEY = "lightserve.connection"
"""Key in the ASGI scope: the `Connection`, where there is one."""

_SSE_HEADERS = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
_JSON_HEADERS = [(b"content-type", b"application/json")]


class Connection(Protocol):
    """What a response wants to know of its connection."""

    is_cut_off: bool
    """Whether it was closed because the client did not read in time."""

    async def drained(self) -> None:
        """Wait until everything written is through, or the connection is lost."""


class Shape(Protocol):
    """One route's way of writing a generation down; made for one request, all bytes final."""

    request_id: str
    wants_pieces: bool

    def opening(self) -> bytes:
        """Return the events before the first text."""

    def delta(self, delta: TextDelta) -> bytes:
        """Return the events of some news, the finish included."""

    def closing(self, generation: Generation) -> bytes:
        """Return the events after the last news."""

    def whole(self, text: str, deltas: list[TextDelta], generation: Generation) -> bytes:
        """Return the JSON body of the answer as a whole."""


Prepare = Callable[[], Awaitable[NewRequest]]
"""Encodes the prompt and resolves all parameters; raises InvalidRequest, RequestFailed."""


def sse_event(data: bytes) -> bytes:
    """Return one server-sent event."""
    return b"data: " + data + b"\n\n"


def new_request_id(prefix: str) -> str:
    """Return a fresh id such as `cmpl-…`."""
    return f"{prefix}-{uuid.uuid4().hex}"


class GenerationResponse(Response):
    """The whole life of one generation; see the module."""

    def __init__(self, service: Service, shape: Shape, prepare: Prepare, *, stream: bool) -> None:
        super().__init__()
        self._service = service
        self._shape = shape
        self._prepare = prepare
        self._stream = stream
        self._has_begun = False
        self._caller = ANYBODY

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Encode, submit, send; abort when the client leaves or this task is cancelled."""
        with self._service.in_flight.admitted():
            self._service.router.check_ready()  # before anything is spent on the prompt
            client_gone = asyncio.create_task(_client_leaves(receive))
            try:
                if (request := await self._prepared(client_gone)) is not None:
                    self._caller = caller_of(scope)
                    salt = self._caller.prefix_salt
                    request = dataclasses.replace(request, prefix_salt=salt)
                    connection = scope.get(CONNECTION_KEY)
                    await self._generate(request, client_gone, send, connection)
            finally:
                client_gone.cancel()

    async def _prepared(self, client_gone: asyncio.Task[None]) -> NewRequest | None:
        """Return the request, or None if the client has left before it was ready."""
        preparing = asyncio.ensure_future(self._prepare())
        try:
            await asyncio.wait({preparing, client_gone}, return_when=asyncio.FIRST_COMPLETED)
            if not client_gone.done():
                return preparing.result()
            if preparing.done():
                preparing.exception()  # there may be one, and nobody to tell it to
            return None
        finally:
            preparing.cancel()

    async def _generate(
        self,
        request: NewRequest,
        client_gone: asyncio.Task[None],
        send: Send,
        connection: Connection | None,
    ) -> None:
        generation = Generation.start(self._service, request, by_token=self._shape.wants_pieces)
        client_gone.add_done_callback(lambda _: generation.abort())
        outcome = "cancelled"
        try:
            await (self._send_stream if self._stream else self._send_whole)(generation, send)
            if connection is not None:
                await connection.drained()
            outcome = str(generation.finish_reason)
        except ClientGone:
            outcome = "client_gone"
        except (InvalidRequest, RequestFailed) as failure:
            outcome = failure.code
            if not self._has_begun:
                raise  # it can still be a status
            await send(_body(sse_event(error_body(failure)), more=False))
        finally:
            generation.abort()
            if connection is not None and connection.is_cut_off:
                outcome = "slow_reader"
            _log_end(self._shape.request_id, generation, outcome, self._caller)

    async def _send_whole(self, generation: Generation, send: Send) -> None:
        deltas: list[TextDelta] = []
        while generation.finish_reason is None:
            deltas.append(await generation.next_delta())
        text = "".join(delta.text for delta in deltas)
        self._has_begun = True
        await send(_start(_JSON_HEADERS))
        await send(_body(self._shape.whole(text, deltas, generation), more=False))

    async def _send_stream(self, generation: Generation, send: Send) -> None:
        """Send one event per news; the status waits for the first, as they may be a failure."""
        while generation.finish_reason is None:
            delta = await generation.next_delta()
            data = self._shape.delta(delta)
            if not self._has_begun:
                self._has_begun = True
                data = self._shape.opening() + data
                await send(_start(_SSE_HEADERS))
            if generation.finish_reason is not None:
                data += self._shape.closing(generation)
            await send(_body(data, more=generation.finish_reason is None))


async def _client_leaves(receive: Receive) -> None:
    """Return when the client has hung up; the request's body has been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _start(headers: list[tuple[bytes, bytes]]) -> Message:
    return {"type": "http.response.start", "status": 200, "headers": headers}


def _body(data: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


def _log_end(request_id: str, generation: Generation, outcome: str, caller: Caller) -> None:
    """Log one line per request: identity, sizes and times, never a text or a key."""
    now_s, arrival_s = time.monotonic(), generation.request.arrival_s
    first_s = generation.first_token_s
    ttft = "-" if first_s is None else f"{(first_s - arrival_s) * 1e3:.1f}"
    log.info(
        "request=%s outcome=%s client=%s key=%s prompt_tokens=%d completion_tokens=%d ttft_ms=%s"
        " total_ms=%.1f",
        request_id,
        outcome,
        caller.name or "-",
        _short_hash(generation.request.prediction_key),
        generation.usage.prompt_tokens,
        generation.usage.completion_tokens,
        ttft,
        (now_s - arrival_s) * 1e3,
    )


def _short_hash(key: str) -> str:
    """Return what tells keys apart in the log without giving them away."""
    return hashlib.sha256(key.encode()).hexdigest()[:12] if key else "-"
