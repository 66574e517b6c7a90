"""The supervisor's sum over all processes, dead ones included.

Counters and histograms of a process that ended stay in the sum for ever, so a restart never lets
one fall; its gauges go with it. What was counted after its last snapshot, at most about a second
before its death, is lost. Several threads may use a ledger.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

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

from lightserve.errors import ProtocolError
from lightserve.messages.supervision import MetricSample
from lightserve.metrics.catalogue import all_families, family_named
from lightserve.metrics.recording import (
    COMMON_LABELS,
    ENGINE_ID,
    MAX_SERIES_PER_FAMILY,
    Family,
    Kind,
)

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
