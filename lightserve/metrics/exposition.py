"""A ledger in Prometheus's text format. The supervisor's: it alone needs prometheus_client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate

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

from lightserve.metrics.families import COMMON_LABELS, ENGINE_ID, Family, Kind
from lightserve.metrics.ledger import Ledger, Series

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
