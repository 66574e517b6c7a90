"""uvicorn as a frontend uses it: on an inherited socket, with `HttpProtocol`, perhaps with TLS."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from lightserve.frontend.connections import ACCEPT_BURST, ConnectionTable
from lightserve.frontend.http_protocol import HttpProtocol, TlsProtocol

BACKLOG = 1024
KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections, so that they do not race with the closing."""
CLOSE_S = 1
"""What connections get to close at the end."""


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
                timeout_graceful_shutdown=CLOSE_S,
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
