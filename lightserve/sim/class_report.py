"""What the requests of one class came to: attainment of targets, goodput, throughput.

Every arrival in the window counts. TTFT is judged by the first token; the other targets, goodput
and throughput in requests need the end: what was refused, or is unfinished when the run ends, is
a miss.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lightserve.types import SLO


class Targets(NamedTuple):
    """Seconds; None where there is no target."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    """Mean of the gaps between a request's tokens."""
    mtpot_s: float | None = None
    """Largest of them."""
    completion_s: float | None = None
    """From the arrival to the last token; excludes the other three."""

    def slo(self) -> SLO:
        """Return them as requests carry them."""
        ttft, tpot, mtpot = (None if target is None else 1e3 * target for target in self[:3])
        return SLO(ttft, tpot, mtpot, self.completion_s)


class Window(NamedTuple):
    """Arrivals and tokens from `start_s` until before `end_s` count; the run ends at `stop_s`."""

    start_s: float
    end_s: float
    stop_s: float

    def has(self, time_s: float) -> bool:
        """Return whether something that happened then counts."""
        return self.start_s <= time_s < self.end_s

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end_s - self.start_s


@dataclass
class Seen:
    """What a client saw of a request."""

    arrival_s: float
    num_output_tokens: int
    """Its true length, whether it got there or not."""
    token_times_s: list[float] = field(default_factory=list)
    is_finished: bool = False
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens that were found, not computed; known with the first token."""
    is_refused: bool = False
    """Whether an error ended it."""


@dataclass(frozen=True)
class ClassReport:
    """Shares are of arrivals in the window, 0 … 1; rates are per second of it."""

    arrivals: int
    ttft_attainment: float | None
    """None: no target."""
    tpot_attainment: float | None
    mtpot_attainment: float | None
    completion_attainment: float | None
    goodput_rps: float
    """Arrivals of the window that finished and met every target there is."""
    goodput_tps: float
    """Their output tokens."""
    normalized_latency_ms: float | None
    """Mean over arrivals of time to the end per output token; None: no arrivals. Unfinished ones
    count with their time until the run ended: a lower bound."""
    throughput_rps: float
    """Requests that finished in the window, whenever they came."""
    throughput_tps: float
    """Output tokens that came in the window."""
    ttft_ms_p50: float | None
    ttft_ms_p99: float | None
    """Over arrivals; those without a token count with their time until the run ended."""
    mtpot_ms_p99: float | None
    """Over arrivals with at least two tokens, finished or not."""
    missed_e2e_s_p99: float | None
    """Time to the end of arrivals that missed a target, refused ones left out; unfinished ones
    count with their time until the run ended: a lower bound. None: there are none."""
    cached_pct: float | None
    """Prompt tokens that were found as cache, over arrivals with a first token."""
    evictions: int
    """Whole run: times that one lost KV to another."""
    recomputed_tokens: int
    """Whole run: tokens whose KV was given up."""


def class_report(
    requests: Sequence[Seen],
    targets: Targets,
    window: Window,
    *,
    evictions: int,
    recomputed_tokens: int,
) -> ClassReport:
    """Return what these requests, all of one class, came to."""
    counted = [request for request in requests if window.has(request.arrival_s)]
    met = [_targets_met(request, targets) for request in counted]
    good = [request for request, kept in zip(counted, met, strict=True) if all(kept)]
    finished = [r for r in requests if r.is_finished and window.has(r.token_times_s[-1])]
    times = np.array([time_s for r in requests for time_s in r.token_times_s])
    num_tokens = int(((times >= window.start_s) & (times < window.end_s)).sum())
    ttft_s = [_first_s(request, window.stop_s) for request in counted]
    mtpot_s = [max(_gaps(request)) for request in counted if len(request.token_times_s) > 1]
    latency_s = [
        (_end_s(request, window.stop_s) - request.arrival_s) / request.num_output_tokens
        for request in counted
    ]
    missed_s = [
        _end_s(request, window.stop_s) - request.arrival_s
        for request, kept in zip(counted, met, strict=True)
        if not all(kept) and not request.is_refused
    ]
    attained = [
        None if target is None or not met else float(np.mean([kept[i] for kept in met]))
        for i, target in enumerate(targets)
    ]
    return ClassReport(
        arrivals=len(counted),
        ttft_attainment=attained[0],
        tpot_attainment=attained[1],
        mtpot_attainment=attained[2],
        completion_attainment=attained[3],
        goodput_rps=len(good) / window.seconds,
        goodput_tps=sum(len(request.token_times_s) for request in good) / window.seconds,
        normalized_latency_ms=1e3 * float(np.mean(latency_s)) if latency_s else None,
        throughput_rps=len(finished) / window.seconds,
        throughput_tps=num_tokens / window.seconds,
        ttft_ms_p50=_percentile_ms(ttft_s, 50),
        ttft_ms_p99=_percentile_ms(ttft_s, 99),
        mtpot_ms_p99=_percentile_ms(mtpot_s, 99),
        missed_e2e_s_p99=float(np.percentile(missed_s, 99)) if missed_s else None,
        cached_pct=_cached_pct(counted),
        evictions=evictions,
        recomputed_tokens=recomputed_tokens,
    )


class _Met(NamedTuple):
    ttft: bool
    tpot: bool
    mtpot: bool
    end: bool


def _targets_met(request: Seen, targets: Targets) -> _Met:
    """Return which targets a request kept; one that is not set is kept by all that finished."""
    times, ends = request.token_times_s, request.is_finished
    ttft_s = times[0] - request.arrival_s if times else float("inf")
    gaps = _gaps(request) or [0.0]
    tpot_s = (times[-1] - times[0]) / len(gaps) if times else 0.0
    latency_s = times[-1] - request.arrival_s if times else 0.0
    return _Met(
        ttft_s <= (float("inf") if targets.ttft_s is None else targets.ttft_s) and bool(times),
        ends and (targets.tpot_s is None or tpot_s <= targets.tpot_s),
        ends and (targets.mtpot_s is None or max(gaps) <= targets.mtpot_s),
        ends and (targets.completion_s is None or latency_s <= targets.completion_s),
    )


def _gaps(request: Seen) -> list[float]:
    times = request.token_times_s
    return [after - before for before, after in itertools.pairwise(times)]


def _cached_pct(requests: Sequence[Seen]) -> float | None:
    started = [request for request in requests if request.token_times_s]
    num_tokens = sum(request.num_prompt_tokens for request in started)
    num_cached = sum(request.num_cached_tokens for request in started)
    return 100.0 * num_cached / num_tokens if num_tokens else None


def _first_s(request: Seen, stop_s: float) -> float:
    return (request.token_times_s[0] if request.token_times_s else stop_s) - request.arrival_s


def _end_s(request: Seen, stop_s: float) -> float:
    return request.token_times_s[-1] if request.is_finished else stop_s


def _percentile_ms(seconds: Sequence[float], percent: float) -> float | None:
    return 1e3 * float(np.percentile(seconds, percent)) if seconds else None
