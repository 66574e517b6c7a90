"""The supervisor's share of metrics: the sum over all processes, and its own figures."""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Iterable, Sequence
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
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

import lightserve
from lightserve.config import ServeConfig
from lightserve.dashboard import FAMILIES as DASHBOARD_FAMILIES
from lightserve.dashboard import encode_figures, encode_tick
from lightserve.errors import ProtocolError
from lightserve.http_access import ApiKey
from lightserve.logs import num_dropped_lines
from lightserve.messages.common import PROTOCOL_VERSION
from lightserve.messages.supervision import MetricSample, MetricsRequest, MetricsText, Role
from lightserve.metrics import catalogue
from lightserve.metrics.recording import (
    COMMON_LABELS,
    ENGINE_ID,
    MAX_SERIES_PER_FAMILY,
    Family,
    Kind,
    Recorder,
)
from lightserve.supervisor.spawn import num_frontends

if TYPE_CHECKING:
    from lightserve.supervisor.spawn import Child

SAMPLE_INTERVAL_S = 1.0
WATCH_S = 5.0
"""Age at which a picture for the dashboard is too old, and how long after a tick one is wanted."""

_OWN = "supervisor"


class ServerMetrics:
    """Metrics of the whole server. One thread writes, several may read."""

    def __init__(self, config: ServeConfig, keys: Sequence[ApiKey] = ()) -> None:
        self.keys = tuple(keys)
        """API keys; those of operators open the metrics port where it needs one."""
        self._ledger = Ledger()
        self._recorder = Recorder()
        self._next_sample_s = 0.0
        self._registry = make_registry(self._ledger, config.model_name)
        self._rendered = (-1, b"")
        """Version of the ledger that was rendered last, and the text."""
        self._picture = (float("-inf"), b"")
        """The last one, and when it came."""
        self._watched_until_s = self._next_picture_s = float("-inf")
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
        self._recorder.counter(catalogue.PROCESS_RESTARTS, role.value).value += 1

    def sample(self, children: Iterable[Child], num_rejected: int, now_s: float) -> None:
        """Look at all processes, if it is time; `num_rejected` are frames on the control link."""
        if now_s < self._next_sample_s:
            return
        self._next_sample_s = now_s + SAMPLE_INTERVAL_S
        for child in children:
            self._sample_process(child.control_name, child.name, child.pid)
        self._sample_process(_OWN, _OWN, os.getpid())
        self._recorder.counter(catalogue.IPC_REJECTED, _OWN).value = num_rejected
        self._recorder.counter(catalogue.LOG_LINES_DROPPED, _OWN).value = num_dropped_lines()
        self._ledger.update(_OWN, self._recorder.snapshot())

    def answer(self, request: MetricsRequest) -> MetricsText:
        """Return all metrics in the text format, or those of the dashboard."""
        if request.is_dashboard:
            return MetricsText(
                number=request.number,
                text=self._figures(),
                content_type="application/json",
                is_dashboard=True,
            )
        return MetricsText(
            number=request.number, text=self.text(), content_type=CONTENT_TYPE_LATEST
        )

    def text(self) -> bytes:
        """Return all metrics in the text format, written anew only if something has changed."""
        version, text = self._rendered
        if version != self._ledger.version:
            version = self._ledger.version
            text = generate_latest(self._registry)
            self._rendered = version, text
        return text

    def dashboard_tick(self) -> bytes:
        """Return the data of a tick, and let pictures be asked for while ticks are."""
        now_s = time.monotonic()
        self._watched_until_s = now_s + WATCH_S
        taken_s, picture = self._picture
        return encode_tick(self._figures(), picture if now_s - taken_s < WATCH_S else None)

    def wants_picture(self, now_s: float) -> bool:
        """Whether a frontend is to be asked for one now."""
        if now_s >= self._watched_until_s or now_s < self._next_picture_s:
            return False
        self._next_picture_s = now_s + SAMPLE_INTERVAL_S
        return True

    def on_picture(self, text: bytes) -> None:
        """Take in what a frontend says of pool, steps and batches."""
        self._picture = time.monotonic(), text

    def _figures(self) -> bytes:
        """Return the families that the dashboard draws, as JSON."""
        drawn = {family.name for family in DASHBOARD_FAMILIES}
        return encode_figures(
            {
                family.name: {",".join(labels): values for labels, values in series}
                for family, series in self._ledger.totals()
                if family.name in drawn
            }
        )

    def _sample_process(self, source: str, name: str, pid: int) -> None:
        if (usage := read_usage(pid)) is None:
            return
        samples = [
            MetricSample(catalogue.PROCESS_MEMORY.name, [name], [usage.resident_bytes]),
            MetricSample(catalogue.PROCESS_CPU.name, [name], [usage.cpu_s]),
        ]
        self._ledger.update(_process_source(source), samples)

    def _describe(self, config: ServeConfig) -> None:
        """Set what never changes."""
        recorder = self._recorder
        for role in Role:
            recorder.counter(catalogue.PROCESS_RESTARTS, role.value)
        recorder.gauge(catalogue.START_TIME).value = time.time()
        build = (lightserve.__version__, str(PROTOCOL_VERSION), platform.python_version())
        recorder.gauge(catalogue.BUILD_INFO, *build).value = 1
        values = {"http_workers": num_frontends(config)}  # as it is, where the option says auto
        names = catalogue.CONFIG_INFO.labels[1:]
        options = [str(values.get(name) or getattr(config, name)) for name in names]
        recorder.gauge(catalogue.CONFIG_INFO, config.digest, *options).value = 1
        self._ledger.update(_OWN, recorder.snapshot())


def _process_source(source: str) -> str:
    return f"{source} process"


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
        if len(snapshot) > MAX_SERIES_PER_FAMILY * len(catalogue.all_families()):
            raise ProtocolError(f"{len(snapshot)} series")
        with self._lock:
            self._live[source] = snapshot
            self.version += 1

    def retire(self, source: str) -> None:
        """Keep what an ended process has counted; no effect if it never said anything."""
        with self._lock:
            self.version += 1
            for key, values in self._live.pop(source, {}).items():
                family = catalogue.family_named(key[0])
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
            for family in catalogue.all_families()
            if family.name in by_family
        ]


def _checked_key(sample: MetricSample) -> SeriesKey:
    family = catalogue.family_named(sample.family)
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


class LedgerCollector(Collector):
    """Reads the ledger anew at each scrape."""

    def __init__(self, ledger: Ledger, model_name: str) -> None:
        self._ledger = ledger
        self._common = [model_name, ENGINE_ID]

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
    registry.register(LedgerCollector(ledger, model_name))
    return registry


# Memory and CPU time of a process, from /proc.

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_UTIME, _STIME, _RSS = 11, 12, 21
"""Fields of /proc/PID/stat, counted from the one behind the name in parentheses."""


class ProcessUsage(NamedTuple):
    """Memory and processor time of a process."""

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
