"""When requests arrive, in seconds after the start, decided before the first one is sent."""

from __future__ import annotations

from enum import StrEnum

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


class ArrivalKind(StrEnum):
    """How arrivals are spaced; all but `CLOSED` are open loops."""

    TRACE = "trace"
    POISSON = "poisson"
    GAMMA = "gamma"
    CONSTANT = "constant"
    CLOSED = "closed"


def arrival_offsets(
    kind: ArrivalKind, *, rate_per_s: float, burstiness: float, count: int, rng: np.random.Generator
) -> FloatArray:
    """Return ascending offsets in seconds, [count].

    Args:
        kind: `POISSON`, `GAMMA` or `CONSTANT`.
        rate_per_s: mean number of arrivals per second.
        burstiness: coefficient of variation of gamma gaps: 1 is Poisson, 0 constant, 3 bursty.
        count: number of arrivals.
        rng: draws the gaps.
    """
    gap_s = 1.0 / rate_per_s
    if kind is ArrivalKind.POISSON:
        gaps = rng.exponential(gap_s, count)
    elif kind is ArrivalKind.GAMMA and burstiness > 0:
        shape = burstiness**-2
        gaps = rng.gamma(shape, gap_s / shape, count)
    else:
        return np.multiply(np.arange(count), gap_s, dtype=np.float64)
    offsets: FloatArray = np.cumsum(gaps)
    return offsets


def count_for(kind: ArrivalKind, *, rate_per_s: float, duration_s: float) -> int:
    """Return how many arrivals to draw so that all of `duration_s` is (nearly surely) covered."""
    mean = rate_per_s * duration_s
    return int(mean) + 1 if kind is ArrivalKind.CONSTANT else int(mean + 10 * mean**0.5 + 100)


def trace_offsets(
    times: FloatArray, *, time_scale: float | None, rate_per_s: float | None
) -> FloatArray:
    """Return a trace's own arrival times, rebased to 0 and stretched.

    With a rate the stretch makes it the mean rate; otherwise one second of the trace takes
    `time_scale` seconds.
    """
    offsets: FloatArray = times - times[0]
    if rate_per_s is None:
        stretch = 1.0 if time_scale is None else time_scale
    else:
        span_s = float(offsets[-1])
        stretch = (len(times) - 1) / rate_per_s / span_s if span_s else 1.0
    return np.multiply(offsets, stretch, dtype=np.float64)
