"""What processes tell the supervisor of their metrics, and how a frontend asks for all of them.

Part of the supervision link. Values are cumulative since the process began, so a lost or late
snapshot costs nothing.
"""

from __future__ import annotations

import msgspec

from lightserve.messages.common import Message


class MetricSample(msgspec.Struct, frozen=True, array_like=True):
    """One series of `lightserve.metrics.catalogue`."""

    family: str
    labels: list[str]
    """Values of the family's labels, in its order."""
    values: list[float]
    """A counter's or gauge's value; a histogram's sum, then the count of each bucket alone."""


class MetricsSnapshot(Message, frozen=True):
    """From the router and each frontend, about once a second: all their series as they stand."""

    samples: list[MetricSample]


class MetricsRequest(Message, frozen=True):
    """From a frontend: answer with `MetricsText`."""

    number: int


class MetricsText(Message, frozen=True):
    """To the frontend that asked: all metrics of the server in Prometheus's text format."""

    number: int
    text: bytes
    content_type: str
