"""The supervisor's sum over all processes, dead ones included.

Counters and histograms of a process that ended stay in the sum for ever, so a restart never lets
one fall; its gauges go with it. What was counted after its last snapshot, at most about a second
before its death, is lost. Several threads may use a ledger.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from lightserve.errors import ProtocolError
from lightserve.messages.metrics import MetricSample
from lightserve.metrics.catalogue import all_families, family_named
from lightserve.metrics.families import MAX_SERIES_PER_FAMILY, Family, Kind

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
