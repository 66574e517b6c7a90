"""Counting in one process: plain attributes, no locks, since each process has one loop.

A part of the process takes its series out of the `Recorder` once and then only adds to them; an
`observe` is a bisection and two additions.
"""

from __future__ import annotations

from bisect import bisect_left

from lightserve.messages.metrics import MetricSample
from lightserve.metrics.families import MAX_SERIES_PER_FAMILY, OTHER, Family, Kind


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
