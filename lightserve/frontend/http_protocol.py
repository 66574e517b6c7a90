"""One HTTP connection: uvicorn's, with a deadline for writing and errors in OpenAI's shape.

A write is through once the kernel has taken all of it. While it has not, `send` makes responses
wait (their deltas merge meanwhile), and after `write_deadline_s` the connection is reset: the
client sees that it has not got everything, no buffer is kept for it, and its request learns of a
client that is gone, which frees its slots.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from lightserve.errors import InvalidRequest
from lightserve.frontend.failures import error_body
from lightserve.frontend.responses import CONNECTION_KEY

WRITE_DEADLINE_S = 30.0
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class HttpProtocol(H11Protocol):
    """See the module. The application finds it in its scope, as a `responses.Connection`."""

    write_deadline_s = WRITE_DEADLINE_S

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.is_cut_off = False
        self._write_deadline: asyncio.TimerHandle | None = None
        app = self.app

        async def call(scope: Any, receive: Any, send: Any) -> None:
            scope[CONNECTION_KEY] = self
            await app(scope, receive, send)

        self.app = call

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin; what the kernel does not take at once counts as waiting, however little."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)

    def connection_lost(self, exc: Exception | None) -> None:
        """End; no effect of the deadline after that."""
        self._stop_deadline()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Start the deadline: the kernel has not taken everything."""
        super().pause_writing()
        self._stop_deadline()
        self._write_deadline = self.loop.call_later(self.write_deadline_s, self._cut_off)

    def resume_writing(self) -> None:
        """Stop the deadline: the kernel has taken everything."""
        self._stop_deadline()
        super().resume_writing()

    async def drained(self) -> None:
        """Wait until everything written is through, or the connection is lost."""
        await self.flow.drain()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, if it can still be answered, and close."""
        body = error_body(InvalidRequest("the request is not valid HTTP", code="invalid_http"))
        head = h11.Response(
            status_code=400,
            headers=[
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ],
            reason=b"Bad Request",
        )
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _stop_deadline(self) -> None:
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None

    def _cut_off(self) -> None:
        self.is_cut_off = True
        connection: socket.socket = self.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self.transport.abort()
