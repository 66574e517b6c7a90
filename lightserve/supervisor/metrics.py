"""The supervisor's share of metrics: the sum over all processes, its own figures, GET /metrics."""

from __future__ import annotations

import os
import platform
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import make_wsgi_app

import lightserve
from lightserve.config import ServeConfig
from lightserve.errors import StartupError
from lightserve.logs import num_dropped_lines
from lightserve.messages.common import PROTOCOL_VERSION
from lightserve.messages.metrics import MetricSample, MetricsRequest, MetricsText
from lightserve.messages.supervision import Role
from lightserve.metrics.catalogue import (
    BUILD_INFO,
    CONFIG_INFO,
    IPC_REJECTED,
    LOG_LINES_DROPPED,
    PROCESS_CPU,
    PROCESS_MEMORY,
    PROCESS_RESTARTS,
    START_TIME,
)
from lightserve.metrics.exposition import CONTENT_TYPE, make_registry, render
from lightserve.metrics.ledger import Ledger
from lightserve.metrics.processes import read_usage
from lightserve.metrics.recording import Recorder

if TYPE_CHECKING:
    from lightserve.supervisor.spawn import Child

SAMPLE_INTERVAL_S = 1.0
MAX_SCRAPES = 8
"""Scrapes answered at once; more connections are closed."""
SCRAPE_TIMEOUT_S = 5.0

_OWN = "supervisor"


class ServerMetrics:
    """What the whole server counts. One thread writes, several may read."""

    def __init__(self, config: ServeConfig) -> None:
        self._ledger = Ledger()
        self._recorder = Recorder()
        self._next_sample_s = 0.0
        self.registry = make_registry(self._ledger, config.model_name)
        self._describe(config)

    def on_snapshot(self, source: str, samples: Sequence[MetricSample]) -> None:
        """Take in what a living child has counted. Raises ProtocolError."""
        self._ledger.update(source, samples)

    def on_exit(self, child: Child) -> None:
        """Keep what a child that has ended, and is not reaped yet, had counted."""
        self._sample_process(child.control_name, child.name, child.pid)
        self._ledger.retire(child.control_name)
        self._ledger.retire(_process_source(child.control_name))

    def on_restart(self, role: Role) -> None:
        """Count a child started in place of another."""
        self._recorder.counter(PROCESS_RESTARTS, role.value).value += 1

    def sample(self, children: Iterable[Child], num_rejected: int, now_s: float) -> None:
        """Look at all processes, if it is time; `num_rejected` are frames on the control link."""
        if now_s < self._next_sample_s:
            return
        self._next_sample_s = now_s + SAMPLE_INTERVAL_S
        for child in children:
            self._sample_process(child.control_name, child.name, child.pid)
        self._sample_process(_OWN, _OWN, os.getpid())
        self._recorder.counter(IPC_REJECTED, _OWN).value = num_rejected
        self._recorder.counter(LOG_LINES_DROPPED, _OWN).value = num_dropped_lines()
        self._ledger.update(_OWN, self._recorder.snapshot())

    def answer(self, request: MetricsRequest) -> MetricsText:
        """Return all metrics in the text format."""
        text = render(self.registry)
        return MetricsText(number=request.number, text=text, content_type=CONTENT_TYPE)

    def _sample_process(self, source: str, name: str, pid: int) -> None:
        if (usage := read_usage(pid)) is None:
            return
        samples = [
            MetricSample(PROCESS_MEMORY.name, [name], [usage.resident_bytes]),
            MetricSample(PROCESS_CPU.name, [name], [usage.cpu_s]),
        ]
        self._ledger.update(_process_source(source), samples)

    def _describe(self, config: ServeConfig) -> None:
        """Set what never changes."""
        recorder = self._recorder
        for role in Role:
            recorder.counter(PROCESS_RESTARTS, role.value)
        recorder.gauge(START_TIME).value = time.time()
        build = (lightserve.__version__, str(PROTOCOL_VERSION), platform.python_version())
        recorder.gauge(BUILD_INFO, *build).value = 1
        options = [str(getattr(config, name)) for name in CONFIG_INFO.labels[1:]]
        recorder.gauge(CONFIG_INFO, config.digest, *options).value = 1
        self._ledger.update(_OWN, recorder.snapshot())


def _process_source(source: str) -> str:
    return f"{source} process"


class MetricsListener:
    """GET /metrics on --metrics-host and --metrics-port, by threads of its own."""

    def __init__(self, config: ServeConfig) -> None:
        """Take the port, without answering yet. Raises StartupError, naming flag and value."""
        self._config = config
        try:
            self._server = _Server(config.metrics_host, config.metrics_port)
        except (OSError, UnicodeError) as error:
            raise self._port_error(error) from error

    @property
    def url(self) -> str:
        """Where metrics are."""
        host, port = self._server.server_address[:2]
        shown = f"[{host!s}]" if ":" in str(host) else str(host)
        return f"http://{shown}:{port}/metrics"

    def start(self, metrics: ServerMetrics) -> None:
        """Begin to answer. Raises StartupError when another server was faster."""
        self._server.set_app(_only_metrics(make_wsgi_app(metrics.registry)))
        try:
            self._server.server_activate()
        except OSError as error:
            raise self._port_error(error) from error
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()
        self._server.is_serving = True

    def close(self) -> None:
        """Give the port back."""
        if self._server.is_serving:
            # The loop wakes up at once instead of at its next look around.
            self._server.socket.shutdown(socket.SHUT_RDWR)
            self._server.shutdown()
        self._server.server_close()

    def _port_error(self, error: OSError | UnicodeError) -> StartupError:
        reason = error.strerror if isinstance(error, OSError) else None
        return StartupError(
            f"cannot listen on --metrics-host {self._config.metrics_host} --metrics-port"
            f" {self._config.metrics_port}: {reason or error} (take another, or -1 for none)"
        )


class _Handler(WSGIRequestHandler):
    timeout = SCRAPE_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Say nothing: scrapes come every few seconds."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """At most MAX_SCRAPES threads; binding asks no name server and shares the port with nobody."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_port = False
    is_serving = False

    def __init__(self, host: str, port: int) -> None:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = info[0]
        self.address_family = family
        self._free = threading.Semaphore(MAX_SCRAPES)
        super().__init__((str(address[0]), port), _Handler, bind_and_activate=False)
        try:
            self.server_bind()
        except OSError:
            self.server_close()
            raise

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "", self.server_address[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore scrapers that leave."""


def _only_metrics(app: Callable[..., Any]) -> Callable[..., Any]:
    """Return `app` at /metrics, 404 everywhere else."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        if environ["PATH_INFO"] != "/metrics":
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [b"metrics are at /metrics\n"]
        return app(environ, start_response)

    return answer
