"""The HTTP server of the metrics port: GET /metrics, and the dashboard."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Mapping
from http import HTTPStatus

from prometheus_client.exposition import CONTENT_TYPE_LATEST

from lightserve.config import ServeConfig
from lightserve.dashboard import EVENTS_PATH, PAGE_PATH, Feed, load_page
from lightserve.errors import StartupError
from lightserve.http_access import bearer_key, find_key, is_loopback, names_machine, server_context
from lightserve.supervisor.metrics import ServerMetrics
from lightserve.supervisor.startup import base_url, bind_port

MAX_SCRAPES = 32
"""Connections to the metrics port that are open at once, viewers of the dashboard apart."""
SCRAPE_TIMEOUT_S = 5.0
_MAX_HEAD_BYTES = 16 * 1024


class MetricsListener:
    """GET /metrics and /dashboard on --metrics-host and --metrics-port, in a thread of its own.

    On a loopback address the Host header must name it; on others an operator's key is needed,
    unless the server has none. A scrape has SCRAPE_TIMEOUT_S, from the connection to its last byte,
    and where MAX_SCRAPES are open the oldest makes room, so that slow clients hold up no other.
    Those that look at the dashboard's events are no scrapes: they are counted by themselves.
    """

    def __init__(self, config: ServeConfig) -> None:
        """Take the port, without answering yet. Raises StartupError, naming flag and value."""
        self._config = config
        self._tls: ssl.SSLContext | None = None
        if config.ssl_certfile and not is_loopback(config.metrics_host):  # no key in the open
            self._tls = server_context(config.ssl_certfile, config.ssl_keyfile)
        self._open: dict[asyncio.StreamWriter, None] = {}
        self._viewers: set[asyncio.StreamWriter] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        try:
            self._socket = bind_port(config.metrics_host, config.metrics_port)
        except (OSError, UnicodeError) as error:
            raise self._port_error(error) from error

    @property
    def url(self) -> str:
        """Where metrics are."""
        host, port = self._socket.getsockname()[:2]
        scheme = "http" if self._tls is None else "https"
        return f"{base_url(str(host), port, scheme=scheme)}/metrics"

    def start(self, metrics: ServerMetrics) -> None:
        """Begin to answer. Raises StartupError: another server was faster, or no thread is left."""
        self._metrics = metrics
        try:
            self._socket.listen()
        except OSError as error:
            raise self._port_error(error) from error
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=[started], name="metrics")
        self._thread.daemon = True
        try:
            self._thread.start()
        except RuntimeError as error:
            raise StartupError(f"metrics: {error} (see ulimit -u and the pids limit)") from error
        started.wait()

    def close(self) -> None:
        """Give the port back."""
        if self._loop is not None and self._thread is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
        self._socket.close()

    def _run(self, started: threading.Event) -> None:
        try:
            asyncio.run(self._serve(started))
        finally:
            started.set()

    async def _serve(self, started: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._feed = Feed(self._config, self._make_tick)
        server = await asyncio.start_server(
            self._answer,
            sock=self._socket,
            ssl=self._tls,
            ssl_handshake_timeout=None if self._tls is None else SCRAPE_TIMEOUT_S,
            limit=_MAX_HEAD_BYTES,
            backlog=MAX_SCRAPES,
        )
        started.set()
        await self._stop.wait()
        server.close()
        self._feed.close()
        for writer in [*self._open, *self._viewers]:
            writer.transport.abort()
        while self._open or self._viewers:
            await asyncio.sleep(0)  # each learns of it by itself: cancelled ones would be logged

    async def _make_tick(self) -> bytes:
        return self._metrics.dashboard_tick()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request of a connection."""
        if len(self._open) >= MAX_SCRAPES:
            oldest = next(iter(self._open))
            del self._open[oldest]  # at once: in one turn of the loop there may come many
            oldest.transport.abort()
        self._open[writer] = None
        try:
            async with asyncio.timeout(SCRAPE_TIMEOUT_S):
                answer = self._respond(await reader.readuntil(b"\r\n\r\n"))
                if answer is not None:
                    writer.write(answer)
                    await writer.drain()
                    writer.write_eof() if writer.can_write_eof() else writer.close()
                    await reader.read(1)  # until the client has read it; closing could destroy it
            if answer is None:
                self._open.pop(writer, None)
                await self._show(writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a client that is slow, or gone
        finally:
            self._open.pop(writer, None)
            writer.transport.abort()

    async def _show(self, writer: asyncio.StreamWriter) -> None:
        """Send the dashboard's events; a viewer that does not read them is cut off."""
        self._viewers.add(writer)
        try:
            with self._feed.viewer():
                writer.write(_head(200, {"content-type": "text/event-stream", **_NO_STORE}))
                async for event in self._feed.events():
                    writer.write(event)
                    async with asyncio.timeout(SCRAPE_TIMEOUT_S):
                        await writer.drain()
        finally:
            self._viewers.discard(writer)

    def _respond(self, head: bytes) -> bytes | None:
        """Return the whole answer to the head of a request; None: the dashboard's events."""
        line, *lines = head.split(b"\r\n")
        method, _, rest = line.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0].decode("latin-1")
        headers: dict[bytes, list[bytes]] = {}
        for header in lines:
            name, _, value = header.partition(b":")
            headers.setdefault(name.strip().lower(), []).append(value.strip())
        status, why = self._judge(headers, path)
        if status != 200:
            return _message(status, f"{why}\n".encode(), method)
        if path not in ("/metrics", PAGE_PATH, EVENTS_PATH):
            return _message(
                404, b"metrics are at /metrics, pictures of them at /dashboard\n", method
            )
        if method not in (b"GET", b"HEAD"):
            return _message(405, b"GET and HEAD are answered\n", method)
        if path == PAGE_PATH:
            page = load_page()
            return _message(200, page.body, method, page.headers)
        if path == EVENTS_PATH and method == b"GET":
            if self._feed.is_full:
                why = "too many views of the dashboard are open; close one of them"
                return _message(503, f"{why}\n".encode(), method)
            return None
        if path == EVENTS_PATH:
            return _message(200, b"", method, {"content-type": "text/event-stream"})
        return _message(200, self._metrics.text(), method, {"content-type": CONTENT_TYPE_LATEST})

    def _judge(self, headers: Mapping[bytes, list[bytes]], path: str) -> tuple[int, str]:
        """Return status and reason of a refusal, status 200 if there is none."""
        config = self._config
        if is_loopback(config.metrics_host):
            (host,) = values if len(values := headers.get(b"host", [])) == 1 else [b""]
            if not names_machine(host, {config.metrics_host.lower()}):
                return 421, "the Host header must name this machine"
        site = headers.get(b"sec-fetch-site", [b"same-origin"])
        if path == EVENTS_PATH and any(value != b"same-origin" for value in site):
            return 403, "web pages of other origins may not look at the dashboard"
        needs_key = config.metrics_need_key and path != PAGE_PATH
        if needs_key or (path == EVENTS_PATH and config.api_key_file):
            (given,) = values if len(values := headers.get(b"authorization", [])) == 1 else [b""]
            key = find_key(self._metrics.keys, bearer_key(given))
            if key is None:
                return 401, "a valid API key is needed: Authorization: Bearer KEY"
            if not key.is_admin:
                return 403, "metrics need the key of an operator"
        return 200, ""

    def _port_error(self, error: OSError | UnicodeError) -> StartupError:
        reason = error.strerror if isinstance(error, OSError) else None
        return StartupError(
            f"cannot listen on --metrics-host {self._config.metrics_host} --metrics-port"
            f" {self._config.metrics_port}: {reason or error} (take another, or -1 for none)"
        )


_TEXT = {"content-type": "text/plain"}
_NO_STORE = {"cache-control": "no-store"}


def _message(status: int, body: bytes, method: bytes, headers: Mapping[str, str] = _TEXT) -> bytes:
    """Return a response after which the connection ends."""
    head = _head(status, {**headers, "content-length": str(len(body))})
    return head + (b"" if method == b"HEAD" else body)


def _head(status: int, headers: Mapping[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", "connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if status == 401:
        lines.append("www-authenticate: Bearer")
    return "\r\n".join([*lines, "\r\n"]).encode()
