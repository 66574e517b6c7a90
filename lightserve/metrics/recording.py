"""Counting in one process: plain attributes, no locks, since each process has one loop.

A part of the process takes its series out of the `Recorder` once and then only adds to them; an
`observe` is a bisection and two additions.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from enum import StrEnum

from lightserve.messages.supervision import MetricSample

# What a metric family is, and how one is declared; `catalogue` has them all.

ENGINE_ID = "0"
"""Which engine of a server; there is one."""

COMMON_LABELS = ("model_name", "engine")

OTHER = "other"
"""Stands for label values outside the closed set."""

MAX_SERIES_PER_FAMILY = 1024
"""Far above what the closed sets allow; more are counted under OTHER."""


class Kind(StrEnum):
    """How a family behaves."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Origin(StrEnum):
    """Which process records a family."""

    FRONTEND = "frontend"
    ROUTER = "router"
    SUPERVISOR = "supervisor"
    ALL = "all"

    def counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Family:
        """Declare a family of counters."""
        return _add(Family(_PREFIX + name, Kind.COUNTER, self, text, labels))

    def gauge(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Family:
        """Declare a family of gauges."""
        return _add(Family(_PREFIX + name, Kind.GAUGE, self, text, labels))

    def histogram(
        self, name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()
    ) -> Family:
        """Declare a family of histograms."""
        return _add(Family(_PREFIX + name, Kind.HISTOGRAM, self, text, labels, buckets))


@dataclass(frozen=True)
class Family:
    """One metric family."""

    name: str
    kind: Kind
    origin: Origin
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, inclusive, ascending; +Inf follows."""

    @property
    def num_values(self) -> int:
        """Numbers in one sample: one, or a histogram's sum and its buckets, +Inf included."""
        return len(self.buckets) + 2 if self.kind is Kind.HISTOGRAM else 1


FAMILIES: dict[str, Family] = {}

CLASS = ("request_class",)
_PREFIX = "lightserve_"

LATENCY_BUCKETS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
GAP_BUCKETS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0),
)
REQUEST_BUCKETS_S = (
    *(0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKEN_BUCKETS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
STEP_BUCKETS_S = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05),
    *(0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0),
)
STEP_ERROR_BUCKETS_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
STEP_RATIO_BUCKETS = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.5, 2.0, 4.0)
STEP_HEADROOM_BUCKETS_S = (
    *(0.0, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0),
)
TURN_BUCKETS_S = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0),
)
BATCH_BUCKETS = tuple(float(2**power) for power in range(13))


def _add(family: Family) -> Family:
    assert family.name not in FAMILIES, f"{family.name} is there already"
    FAMILIES[family.name] = family
    return family


class Counter:
    """Adds up; `value` may be assigned where a total is kept elsewhere, but must not fall."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def values(self) -> list[float]:
        """Return what goes into a sample."""
        return [self.value]


class Gauge(Counter):
    """Goes up and down: assign `value`."""

    __slots__ = ()


class Histogram:
    """Counts observations by fixed buckets."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value; one that equals a bound belongs below it."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def values(self) -> list[float]:
        """Return what goes into a sample: the sum, then each bucket's own count."""
        return [self._sum, *self._counts]


class Recorder:
    """All series of one process."""

    def __init__(self) -> None:
        self._series: dict[str, dict[tuple[str, ...], Counter | Histogram]] = {}

    def counter(self, family: Family, *labels: str) -> Counter:
        """Return the counter with these label values, at 0 if it is new."""
        assert family.kind is Kind.COUNTER, family.name
        series = self._find(family, labels)
        assert isinstance(series, Counter)
        return series

    def gauge(self, family: Family, *labels: str) -> Gauge:
        """Return the gauge with these label values, at 0 if it is new."""
        assert family.kind is Kind.GAUGE, family.name
        series = self._find(family, labels)
        assert isinstance(series, Gauge)
        return series

    def histogram(self, family: Family, *labels: str) -> Histogram:
        """Return the histogram with these label values, empty if it is new."""
        assert family.kind is Kind.HISTOGRAM, family.name
        series = self._find(family, labels)
        assert isinstance(series, Histogram)
        return series

    def snapshot(self) -> list[MetricSample]:
        """Return all series as they stand."""
        return [
            MetricSample(family, list(labels), series.values())
            for family, by_labels in self._series.items()
            for labels, series in by_labels.items()
        ]

    def _find(self, family: Family, labels: tuple[str, ...]) -> Counter | Histogram:
        assert len(labels) == len(family.labels), f"{family.name} has labels {family.labels}"
        by_labels = self._series.setdefault(family.name, {})
        if labels not in by_labels and len(by_labels) >= MAX_SERIES_PER_FAMILY:
            labels = (OTHER,) * len(labels)
        series = by_labels.get(labels)
        if series is None:
            series = by_labels[labels] = _new_series(family)
        return series


def _new_series(family: Family) -> Counter | Histogram:
    match family.kind:
        case Kind.COUNTER:
            return Counter()
        case Kind.GAUGE:
            return Gauge()
        case Kind.HISTOGRAM:
            return Histogram(family.buckets)
