"""What a metric family is, and how one is declared; `catalogue` has them all."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

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


def counter(name: str, origin: Origin, text: str, labels: tuple[str, ...] = ()) -> Family:
    """Declare a family of counters."""
    return _add(Family(_PREFIX + name, Kind.COUNTER, origin, text, labels))


def gauge(name: str, origin: Origin, text: str, labels: tuple[str, ...] = ()) -> Family:
    """Declare a family of gauges."""
    return _add(Family(_PREFIX + name, Kind.GAUGE, origin, text, labels))


def histogram(
    name: str,
    origin: Origin,
    text: str,
    buckets: tuple[float, ...],
    labels: tuple[str, ...] = (),
) -> Family:
    """Declare a family of histograms."""
    return _add(Family(_PREFIX + name, Kind.HISTOGRAM, origin, text, labels, buckets))
