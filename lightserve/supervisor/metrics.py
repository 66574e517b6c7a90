"""The supervisor's share of metrics: the sum over all processes, its own figures, GET /metrics."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

import lightserve
from lightserve.config import ServeConfig
from lightserve.errors import ProtocolError, StartupError
from lightserve.http_access import ApiKey, bearer_key, find_key, is_loopback, names_machine
from lightserve.logs import num_dropped_lines
from lightserve.messages.common import PROTOCOL_VERSION
from lightserve.messages.supervision import MetricSample, MetricsRequest, MetricsText, Role
from lightserve.metrics.catalogue import (
    BUILD_INFO,
    CONFIG_INFO,
    IPC_REJECTED,
    LOG_LINES_DROPPED,
    PROCESS_CPU,
    PROCESS_MEMORY,
    PROCESS_RESTARTS,
    START_TIME,
    all_families,
    family_named,
)
from lightserve.metrics.recording import (
    COMMON_LABELS,
    ENGINE_ID,
    MAX_SERIES_PER_FAMILY,
    Family,
    Kind,
    Recorder,
)
from lightserve.supervisor.spawn import num_frontends
from lightserve.supervisor.startup import base_url
from lightserve.tls import server_context

if TYPE_CHECKING:
    from lightserve.supervisor.spawn import Child

SAMPLE_INTERVAL_S = 1.0
MAX_SCRAPES = 32
"""Connections to the metrics port that are open at once."""
SCRAPE_TIMEOUT_S = 5.0
_MAX_HEAD_BYTES = 16 * 1024

_OWN = "supervisor"


class ServerMetrics:
    """What the whole server counts. One thread writes, several may read."""

    def __init__(self, config: ServeConfig, keys: Sequence[ApiKey] = ()) -> None:
        self.keys = tuple(keys)
        """Of them, operators' open the metrics port where it wants one."""
        self._ledger = Ledger()
        self._recorder = Recorder()
        self._next_sample_s = 0.0
        self._registry = make_registry(self._ledger, config.model_name)
        self._rendered = (-1, b"")
        """What was rendered last, and of which version of the ledger."""
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
        return MetricsText(number=request.number, text=self.text(), content_type=CONTENT_TYPE)

    def text(self) -> bytes:
        """Return all metrics in the text format, written anew only if something has changed."""
        version, text = self._rendered
        if version != self._ledger.version:
            version = self._ledger.version
            text = render(self._registry)
            self._rendered = version, text
        return text

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
        values = {"http_workers": num_frontends(config)}  # as it is, where the option says auto
        names = CONFIG_INFO.labels[1:]
        options = [str(values.get(name) or getattr(config, name)) for name in names]
        recorder.gauge(CONFIG_INFO, config.digest, *options).value = 1
        self._ledger.update(_OWN, recorder.snapshot())


def _process_source(source: str) -> str:
    return f"{source} process"


class MetricsListener:
    """GET /metrics on --metrics-host and --metrics-port, in a thread of its own.

    On a loopback address the Host header must name it; on others an operator's key is needed,
    unless the server has none. A scrape has SCRAPE_TIMEOUT_S, from the connection to its last byte,
    and where MAX_SCRAPES are open the oldest makes room, so that slow clients hold up no other.
    """

    def __init__(self, config: ServeConfig) -> None:
        """Take the port, without answering yet. Raises StartupError, naming flag and value."""
        self._config = config
        self._tls: ssl.SSLContext | None = None
        if config.ssl_certfile and not is_loopback(config.metrics_host):  # no key in the open
            self._tls = server_context(config.ssl_certfile, config.ssl_keyfile)
        self._open: dict[asyncio.StreamWriter, None] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        try:
            self._socket = _bound_socket(config.metrics_host, config.metrics_port)
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
        for writer in list(self._open):
            writer.transport.abort()
        while self._open:
            await asyncio.sleep(0)  # each learns of it by itself: cancelled ones would be logged

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request of a connection."""
        if len(self._open) >= MAX_SCRAPES:
            oldest = next(iter(self._open))
            del self._open[oldest]  # at once: in one turn of the loop there may come many
            oldest.transport.abort()
        self._open[writer] = None
        try:
            async with asyncio.timeout(SCRAPE_TIMEOUT_S):
                writer.write(self._respond(await reader.readuntil(b"\r\n\r\n")))
                await writer.drain()
                writer.write_eof() if writer.can_write_eof() else writer.close()
                await reader.read(1)  # until the client has read it; closing could destroy it
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a client that is slow, or gone
        finally:
            self._open.pop(writer, None)
            writer.transport.abort()

    def _respond(self, head: bytes) -> bytes:
        """Return the whole answer to the head of a request."""
        line, *lines = head.split(b"\r\n")
        method, _, rest = line.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        headers: dict[bytes, list[bytes]] = {}
        for header in lines:
            name, _, value = header.partition(b":")
            headers.setdefault(name.strip().lower(), []).append(value.strip())
        status, why = self._judge(headers)
        if status != 200:
            return _message(status, f"{why}\n".encode(), method)
        if path != b"/metrics":
            return _message(404, b"metrics are at /metrics\n", method)
        if method not in (b"GET", b"HEAD"):
            return _message(405, b"GET and HEAD are answered\n", method)
        return _message(200, self._metrics.text(), method, CONTENT_TYPE)

    def _judge(self, headers: Mapping[bytes, list[bytes]]) -> tuple[int, str]:
        """Return status and reason of a refusal, status 200 if there is none."""
        config = self._config
        if config.metrics_need_key:
            (given,) = values if len(values := headers.get(b"authorization", [])) == 1 else [b""]
            key = find_key(self._metrics.keys, bearer_key(given))
            if key is None:
                return 401, "a valid API key is needed: Authorization: Bearer KEY"
            if not key.is_admin:
                return 403, "metrics need the key of an operator"
        elif is_loopback(config.metrics_host):
            (host,) = values if len(values := headers.get(b"host", [])) == 1 else [b""]
            if not names_machine(host, {config.metrics_host.lower()}):
                return 421, "the Host header must name this machine"
        return 200, ""

    def _port_error(self, error: OSError | UnicodeError) -> StartupError:
        reason = error.strerror if isinstance(error, OSError) else None
        return StartupError(
            f"cannot listen on --metrics-host {self._config.metrics_host} --metrics-port"
            f" {self._config.metrics_port}: {reason or error} (take another, or -1 for none)"
        )


def _bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket that has the port and shares it with no other."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def _message(status: int, body: bytes, method: bytes, kind: str = "text/plain") -> bytes:
    """Return a response after which the connection ends."""
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: {kind}\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n"
    )
    if status == 401:
        head += "www-authenticate: Bearer\r\n"
    return f"{head}\r\n".encode() + (b"" if method == b"HEAD" else body)


# ----------------------------------------------------------------------
# The supervisor's sum over all processes, dead ones included.
#
# Counters and histograms of a process that ended stay in the sum for ever, so a restart never lets
# one fall; its gauges go with it. What was counted after its last snapshot, at most about a second
# before its death, is lost. Several threads may use a ledger.


SeriesKey = tuple[str, tuple[str, ...]]
"""Family name and label values."""

Series = list[tuple[tuple[str, ...], list[float]]]
"""Label values, and values as in `MetricSample`."""


class Ledger:
    """See the module."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: dict[str, dict[SeriesKey, list[float]]] = {}
        self._retired: dict[SeriesKey, list[float]] = {}
        self.version = 0
        """Grows with every change."""

    def update(self, source: str, samples: Sequence[MetricSample]) -> None:
        """Replace what is known of a process. Raises ProtocolError for what is no snapshot."""
        snapshot = {_checked_key(sample): sample.values for sample in samples}
        if len(snapshot) > MAX_SERIES_PER_FAMILY * len(all_families()):
            raise ProtocolError(f"{len(snapshot)} series")
        with self._lock:
            self._live[source] = snapshot
            self.version += 1

    def retire(self, source: str) -> None:
        """Keep what an ended process has counted; no effect if it never said anything."""
        with self._lock:
            self.version += 1
            for key, values in self._live.pop(source, {}).items():
                family = family_named(key[0])
                if family is not None and family.kind is not Kind.GAUGE:
                    _add(self._retired, key, values)

    def totals(self) -> list[tuple[Family, Series]]:
        """Return all series of all families that have any, in the catalogue's order."""
        with self._lock:
            sums = {key: list(values) for key, values in self._retired.items()}
            for snapshot in self._live.values():
                for key, values in snapshot.items():
                    _add(sums, key, values)
        by_family: dict[str, Series] = {}
        for (name, labels), values in sums.items():
            by_family.setdefault(name, []).append((labels, values))
        return [
            (family, sorted(by_family[family.name]))
            for family in all_families()
            if family.name in by_family
        ]


def _checked_key(sample: MetricSample) -> SeriesKey:
    family = family_named(sample.family)
    if family is None:
        raise ProtocolError(f"no metric family {sample.family!r}")
    if len(sample.labels) != len(family.labels) or len(sample.values) != family.num_values:
        raise ProtocolError(f"a sample of {family.name} with another shape")
    return family.name, tuple(sample.labels)


def _add(sums: dict[SeriesKey, list[float]], key: SeriesKey, values: list[float]) -> None:
    before = sums.get(key)
    if before is None:
        sums[key] = list(values)
    else:
        sums[key] = [a + b for a, b in zip(before, values, strict=True)]


# A ledger in Prometheus's text format. The supervisor's: it alone needs prometheus_client.

__all__ = ["CONTENT_TYPE", "LedgerCollector", "make_registry", "render"]


class LedgerCollector(Collector):
    """Reads the ledger anew at each scrape."""

    def __init__(self, ledger: Ledger, common_labels: Mapping[str, str]) -> None:
        self._ledger = ledger
        self._common = [common_labels[name] for name in COMMON_LABELS]

    def collect(self) -> Iterable[Metric]:
        """Return all families that have series."""
        return [self._metric(family, series) for family, series in self._ledger.totals()]

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the ledger is empty when the collector is registered."""
        return []

    def _metric(self, family: Family, all_series: Series) -> Metric:
        names = [*COMMON_LABELS, *family.labels]
        if family.kind is Kind.HISTOGRAM:
            histogram = HistogramMetricFamily(family.name, family.help, labels=names)
            bounds = [*map(floatToGoString, family.buckets), "+Inf"]
            for labels, (total, *counts) in all_series:
                buckets = list(zip(bounds, accumulate(counts), strict=True))
                histogram.add_metric([*self._common, *labels], buckets, total)
            return histogram
        kind = CounterMetricFamily if family.kind is Kind.COUNTER else GaugeMetricFamily
        metric = kind(family.name, family.help, labels=names)
        for labels, (value,) in all_series:
            metric.add_metric([*self._common, *labels], value)
        return metric


def make_registry(ledger: Ledger, model_name: str) -> CollectorRegistry:
    """Return a registry with nothing but the ledger."""
    registry = CollectorRegistry()
    registry.register(LedgerCollector(ledger, {"model_name": model_name, "engine": ENGINE_ID}))
    return registry


def render(registry: CollectorRegistry) -> bytes:
    """Return all metrics in the text format; its content type is CONTENT_TYPE."""
    return generate_latest(registry)


# Memory and CPU time of a process, from /proc.

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_UTIME, _STIME, _RSS = 11, 12, 21
"""Fields of /proc/PID/stat, counted from the one behind the name in parentheses."""


class ProcessUsage(NamedTuple):
    """What a process has used."""

    resident_bytes: int
    cpu_s: float


def read_usage(pid: int) -> ProcessUsage | None:
    """Return what a process has used so far, None if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    ticks = int(fields[_UTIME]) + int(fields[_STIME])
    return ProcessUsage(int(fields[_RSS]) * _PAGE_BYTES, ticks / _TICKS_PER_S)
