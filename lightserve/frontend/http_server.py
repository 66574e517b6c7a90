"""One HTTP connection: uvicorn's, with deadlines for both directions and errors in OpenAI's shape.

Writing: a write is through once the kernel has taken all of it. While it has not, `send` makes
responses wait (their deltas merge meanwhile), and after `write_deadline_s` the connection is
reset: the client sees that it has not got everything, no buffer is kept for it, and its request
learns of a client that is gone, which frees its slots.

Reading: uvicorn waits for ever. Here one timer follows what is awaited:

    head      from the connection's start, or the first byte after a request, to the whole head
    body      from the head to the body's end; it also has to come at a least rate, looked at every
              `RATE_WINDOW_S`, and what has come counts in the frontend's sum (`connections`)
    rest      an answer (a refusal) has gone out before the body was there: what still comes is
              thrown away for a moment, as closing at once would destroy the answer on its way
    end       the same where the answer ends the connection: our side is closed after it, and the
              socket once the client has closed its own
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
import struct
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, cast

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.utils import get_remote_addr

from lightserve.errors import InvalidRequest
from lightserve.frontend.connections import ACCEPT_BURST, ConnectionTable
from lightserve.frontend.errors import RequestFailed, draining, error_body
from lightserve.frontend.http_requests import RequestReader
from lightserve.frontend.middleware import is_upload, owner_of
from lightserve.frontend.response import CONNECTION_KEY

log = logging.getLogger(__name__)

UPLOAD_BYTES_HELD = 1024 * 1024
"""Most memory of an upload, however large the file: the rest is in the store."""
UPLOAD_TIMEOUT_S = 3600.0
"""Time for a file to arrive."""
WRITE_DEADLINE_S = 30.0
REST_TIMEOUT_S = 5.0
"""A client on a slow line needs about as long to notice that it was answered."""
RATE_WINDOW_S = 10.0
"""The rate of a body is that over so many last seconds: what came before does not excuse it."""
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_REASONS = {
    400: b"Bad Request",
    408: b"Request Timeout",
    429: b"Too Many Requests",
    431: b"Request Header Fields Too Large",
}


class _Awaited(Enum):
    """The part of a request that the client has yet to send."""

    NOTHING = "nothing"
    HEAD = "head"
    BODY = "body"
    REST = "rest"
    END = "end"


class _PatientTransport:
    """A transport that stays open behind its `close`, while its owner says so.

    A kernel that gets data for a socket that is closed, or closes one with data to be read, resets
    the connection: the client may lose an answer that it has not read yet.
    """

    def __init__(self, transport: asyncio.Transport, on_close: Callable[[], bool]) -> None:
        """`on_close` says whether the transport is to stay; its owner then calls `close_now`."""
        self._transport = transport
        self._on_close = on_close
        self._is_ended = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Whether `close` was called, or the connection is lost."""
        return self._is_ended or self._transport.is_closing()

    def close(self) -> None:
        """Write what is left to be written; close now, or when the owner says so."""
        if self.is_closing():
            return
        self._is_ended = True
        if not self._on_close():
            self._transport.close()
        elif not self._transport.get_extra_info("sslcontext"):  # TLS knows no half of an end
            with contextlib.suppress(OSError):  # the client is gone, as the loop will notice
                self._transport.write_eof()

    def close_now(self) -> None:
        """Close, without regard to what the client still sends."""
        self._transport.close()

    def forget_owner(self) -> None:
        """Ask it no more: the connection is lost."""
        self._on_close = bool


class HttpProtocol(H11Protocol):
    """See the module. The application finds it in its scope, as a `responses.Connection`."""

    write_deadline_s = WRITE_DEADLINE_S
    rest_timeout_s = REST_TIMEOUT_S
    rate_window_s = RATE_WINDOW_S

    def __init__(self, table: ConnectionTable, **options: Any) -> None:
        super().__init__(**options)
        self.conn: RequestReader = RequestReader(table.limits)
        self.scope: Any = {}  # of the last request
        self.is_cut_off = False
        self._table = table
        self._write_deadline: asyncio.TimerHandle | None = None
        self._awaited = _Awaited.NOTHING
        self._awaited_since_s = 0.0
        self._num_body_bytes = 0
        self._num_window_bytes = 0
        self._read_deadline: asyncio.TimerHandle | None = None

    @property
    def app(self) -> Any:
        """The application, as uvicorn calls it for each request.

        Nothing else of a connection refers to it, or it would stay, once it is over, until Python
        looks for garbage.
        """
        return self._call

    @app.setter
    def app(self, app: Any) -> None:
        self._app = app

    async def _call(self, scope: Any, receive: Any, send: Any) -> None:
        scope[CONNECTION_KEY] = self
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:  # at the server's end, which is no fault to be logged
            self._end(draining())
            self.cycle.disconnected = True
        finally:
            del scope[CONNECTION_KEY]

    # ------------------------------------------------------------------ the connection's life

    def take_place(self, transport: asyncio.Transport) -> str | None:
        """Take a place in the table, from the kernel's accept on; returns the reason if none is."""
        self.transport = transport  # for the table, until there is one above TLS
        client = get_remote_addr(transport)
        return self._table.add(self, client[0] if client else "")

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin; what the kernel does not take at once counts as waiting, however little."""
        self._patient = _PatientTransport(transport, self._on_close)
        super().connection_made(cast(asyncio.Transport, self._patient))
        # What waits above TLS counts from the first byte: there, "full" means at the limit.
        transport.set_write_buffer_limits(high=0 if self.scheme == "http" else 1)
        reason = self.take_place(self.transport) if self.scheme == "http" else None
        if reason is None:
            self._await(_Awaited.HEAD)
            return
        status = 503 if reason == "too_many_connections" else 429
        failure = RequestFailed("too many connections are open", code=reason, status=status)
        self._answer(failure)

    def give_place_back(self) -> None:
        """Leave the table; no effect the second time."""
        self._table.remove(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """End; no effect of any deadline after that."""
        self.give_place_back()
        self._stop_deadline()
        self._await(_Awaited.NOTHING)
        super().connection_lost(exc)
        self._patient.forget_owner()

    def shutdown(self) -> None:
        """Close as soon as the answer is out; at once where only the client's end is missing."""
        if self._awaited is _Awaited.END:
            self._patient.close_now()
        else:
            super().shutdown()

    def _on_close(self) -> bool:
        """Return whether to wait for the client's end: part of a request may be on its way."""
        state = self.conn.their_state
        is_amid_head = state is h11.IDLE and self.conn.trailing_data[0] != b""
        if not is_amid_head and state not in (h11.SEND_BODY, h11.ERROR):
            return False
        self._await(_Awaited.END)
        self._table.mark_idle(self, owner_of(self.scope))
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        if self.cycle is not None and not self.cycle.response_complete:
            # Its reader need not wait for the connection to be gone.
            self.cycle.disconnected = True
            self.cycle.body = bytearray()
            self.cycle.message_event.set()
        return True

    def evict(self) -> None:
        """Close an idle connection whose place is needed."""
        self.transport.abort()

    def refuse_body(self) -> None:
        """End the request whose body is arriving: its memory is needed."""
        self._end(
            RequestFailed(
                "too many request bodies are arriving; try again", code="overloaded", status=429
            )
        )

    # ------------------------------------------------------------------ reading

    def data_received(self, data: bytes) -> None:
        """Take in what has come, and see what is awaited now."""
        if self.transport.is_closing():
            return
        if self._awaited is _Awaited.NOTHING and self.conn.their_state is h11.IDLE:
            self._await(_Awaited.HEAD)
        super().data_received(data)
        self._look(len(data))

    def on_response_complete(self) -> None:
        """Go on after an answer, which may have come before the end of the body."""
        super().on_response_complete()
        self._look()

    def _look(self, num_new_bytes: int = 0) -> None:
        """Follow the state of the client's side."""
        if self._awaited is _Awaited.END:
            return
        if self.transport.is_closing():
            self._await(_Awaited.NOTHING)
            return
        state, awaited = self.conn.their_state, self._awaited
        if state is h11.SEND_BODY:
            is_answered = self.cycle is not None and self.cycle.response_complete
            wanted = _Awaited.REST if is_answered else _Awaited.BODY
            if awaited is not wanted:
                self._await(wanted)
            self._num_body_bytes += num_new_bytes
            self._num_window_bytes += num_new_bytes
            if wanted is _Awaited.REST:
                self._table.mark_idle(self, owner_of(self.scope))
                return
            self._table.mark_busy(self)
            num_held = self._num_body_bytes
            if is_upload(self.scope):
                most = self._table.limits.max_pending_body_bytes // 2
                num_held = min(num_held, UPLOAD_BYTES_HELD, most)
            self._table.hold_body(self, owner_of(self.scope), num_held)
        elif state is h11.IDLE:
            if self.conn.trailing_data[0]:  # half a head that came behind a request
                if awaited is not _Awaited.HEAD:
                    self._await(_Awaited.HEAD)
            elif awaited in (_Awaited.BODY, _Awaited.REST):
                self._await(_Awaited.NOTHING)
            self._table.mark_idle(self, owner_of(self.scope))
        else:
            self._table.mark_busy(self)
            self._await(_Awaited.NOTHING)

    def _await(self, awaited: _Awaited) -> None:
        self._table.release_body(self)
        self._awaited = awaited
        self._awaited_since_s = self.loop.time()
        self._num_body_bytes = 0
        if self._read_deadline is not None:
            self._read_deadline.cancel()
            self._read_deadline = None
        if awaited is _Awaited.HEAD:
            self._wait(self._table.limits.header_timeout_s)
        elif awaited in (_Awaited.REST, _Awaited.END):
            self._wait(self.rest_timeout_s)
        elif awaited is _Awaited.BODY:
            self._wait(min(self.rate_window_s, self._table.limits.body_timeout_s))

    def _wait(self, seconds: float) -> None:
        """Have the deadline so far away; of a body it is the end of a window perhaps."""
        self._num_window_bytes = 0
        self._read_deadline = self.loop.call_later(seconds, self._on_read_deadline)

    def _on_read_deadline(self) -> None:
        awaited, limits = self._awaited, self._table.limits
        if awaited is _Awaited.END:
            self._await(_Awaited.NOTHING)
            self._patient.close_now()
            return
        if awaited is _Awaited.BODY:
            timeout_s = UPLOAD_TIMEOUT_S if is_upload(self.scope) else limits.body_timeout_s
            left_s = self._awaited_since_s + timeout_s - self.loop.time()
            least = limits.min_body_bytes_per_s * self.rate_window_s
            if left_s > 0.001 and self._num_window_bytes >= least:
                self._wait(min(self.rate_window_s, left_s))
                return
        self._table.rejects[f"slow_{awaited.value}"] += 1
        if awaited is _Awaited.HEAD and self.conn.trailing_data[0] == b"":
            self._await(_Awaited.NOTHING)
            self.transport.close()  # nothing was asked
            return
        message = f"the {awaited.value} of the request did not arrive in time"
        self._end(InvalidRequest(message, code="request_timeout", status=408))

    def _end(self, failure: InvalidRequest | RequestFailed) -> None:
        """End the request that is arriving: answer it if it can be, and let go of its body."""
        may_answer = self._awaited is _Awaited.HEAD or not self.cycle.response_started
        self._await(_Awaited.NOTHING)
        if may_answer:
            self._answer(failure)
        else:
            self.transport.abort()

    # ------------------------------------------------------------------ writing

    def pause_writing(self) -> None:
        """Start the deadline: the kernel has not taken everything."""
        super().pause_writing()
        self._stop_deadline()
        self._write_deadline = self.loop.call_later(self.write_deadline_s, self.cut_off)

    def resume_writing(self) -> None:
        """Stop the deadline: the kernel has taken everything."""
        self._stop_deadline()
        super().resume_writing()

    @property
    def is_writable(self) -> bool:
        """Whether the kernel has taken everything, and the client is there."""
        is_gone = self.cycle.disconnected or self.transport.is_closing()
        return not (is_gone or self.flow.write_paused)

    def write_body(self, data: bytes) -> None:
        """Write a part of an answer of unknown length, as h11 would, without its objects."""
        if (self.conn.their_http_version or b"") >= b"1.1":
            data = b"%x\r\n%b\r\n" % (len(data), data)
        self.transport.write(data)

    async def drained(self) -> None:
        """Wait until everything written is through, or the connection is lost."""
        await self.flow.drain()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, if it can still be answered, and close."""
        refusal = self.conn.refusal
        self._table.rejects[refusal.code or ""] += 1
        self._answer(refusal)

    def _answer(self, failure: InvalidRequest | RequestFailed) -> None:
        """Answer without the application, if that is still possible, and close."""
        body = error_body(failure)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        if isinstance(failure, RequestFailed):
            headers.append((b"retry-after", b"1"))
        head = h11.Response(
            status_code=failure.status,
            headers=headers,
            reason=_REASONS.get(failure.status, b"Service Unavailable"),
        )
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _stop_deadline(self) -> None:
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None

    def cut_off(self) -> None:
        """Reset the connection: its client does not read, and is to see that it has not got all."""
        self.is_cut_off = True
        connection: socket.socket = self.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self.transport.abort()


class TlsProtocol(SSLProtocol):
    """TLS below an `HttpProtocol`, which has its place in the table before the handshake.

    Who finds no place learns of it by the end of the connection: an answer would cost a handshake.
    """

    max_size = 32 * 1024
    """Size of the buffer that each connection has."""

    def __init__(self, http: HttpProtocol, context: ssl.SSLContext, handshake_s: float) -> None:
        """The handshake may take so long."""
        super().__init__(
            asyncio.get_running_loop(),
            http,
            context,
            None,  # type: ignore[arg-type]  # no task waits for the handshake
            server_side=True,
            ssl_handshake_timeout=handshake_s,  # type: ignore[arg-type]  # any number
        )
        self._http = http

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin the handshake, if there is a place."""
        if self._http.take_place(transport) is None:
            super().connection_made(transport)
        else:
            transport.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Give the place back, also where the handshake had no end."""
        self._http.give_place_back()
        super().connection_lost(exc)


# ----------------------------------------------------------------------
# uvicorn as a frontend uses it: on an inherited socket, with `HttpProtocol`, perhaps with TLS.


BACKLOG = 1024
KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections, so that they do not race with the closing."""
LATE_REQUEST_S = 0.2
"""From the end of listening until the last connection's first request is taken to be here."""
CLOSE_S = 1
"""Seconds that connections get to close at the end."""
_LOOK_S = 0.05
"""How often it is seen whether they have, and what a request gets to end when it is cut off."""


class HttpServer(uvicorn.Server):
    """Serves an application; leaves signals to the supervisor."""

    def __init__(
        self, app: ASGIApp, table: ConnectionTable, tls: ssl.SSLContext | None = None
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",
                http=HttpProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                # What it says below a warning is of its own life, which the supervisor tells,
                # under the name uvicorn.error.
                log_level=max(logging.WARNING, logging.getLogger().level),
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                h11_max_incomplete_event_size=table.limits.max_header_bytes,
            )
        )
        self.listening = asyncio.Event()
        self._table = table
        self._tls = tls

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so.

        In place of uvicorn's own: connections get the table.
        """
        await self.lifespan.startup()
        asyncio.get_running_loop().set_exception_handler(self._on_loop_error)
        self.servers = [
            await asyncio.get_running_loop().create_server(
                self._make_protocol, sock=listener, backlog=ACCEPT_BURST
            )
            for listener in sockets or []
        ]
        for listener in sockets or []:
            listener.listen(BACKLOG)  # asyncio has one number for both
        self.started = True
        self.listening.set()

    async def stop_listening(self) -> None:
        """See `Server`: what was accepted a moment ago has yet to say what it wants."""
        for _ in range(2):  # closing breaks what waits to be accepted: first the loop looks again
            await asyncio.sleep(0)
        for server in self.servers:
            server.close()
        await asyncio.sleep(LATE_REQUEST_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close all connections; cut off what is left after `CLOSE_S`: no error to be logged."""
        for listener in (*self.servers, *(sockets or ())):
            listener.close()
        state, now_s = self.server_state, asyncio.get_running_loop().time
        for connection in list(state.connections):
            connection.shutdown()
        end_s = now_s() + CLOSE_S
        while (state.connections or state.tasks) and now_s() < end_s:
            await asyncio.sleep(_LOOK_S)
        tasks = list(state.tasks)
        if tasks:
            log.info("%d requests are cut off", len(tasks))
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_LOOK_S)
        for connection in list(state.connections):
            cast(HttpProtocol, connection).evict()

    def _make_protocol(self) -> HttpProtocol | TlsProtocol:
        """Make a connection's protocol; a TLS handshake has the time of a request's head."""
        http = HttpProtocol(
            self._table,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        if self._tls is None:
            return http
        return TlsProtocol(http, self._tls, self._table.limits.header_timeout_s)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Count what the kernel refuses; asyncio would log a traceback for each, and tries again.

        The table keeps so far from the limit of open files that this should not happen.
        """
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            self._table.on_no_files()
        else:
            loop.default_exception_handler(context)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the process's signal handlers alone."""
        yield
