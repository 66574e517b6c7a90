"""What a simulated run came to: sums over it, and the report made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lightserve.router.core import RouterCore
from lightserve.router.events import PlannedStep
from lightserve.router.future_memory import IntArray, peak_memory
from lightserve.router.output_lengths import FloatArray
from lightserve.router.request import Request
from lightserve.sim.hardware import VirtualHardware

CALIBRATED_QUANTILES = (0.5, 0.9, 0.99)
TIMELINE_QUANTILE = 0.99


@dataclass(frozen=True)
class TimelinePoint:
    """The pool after a plan."""

    decode_step: int
    used_tokens: int
    forecast_tokens: float | None
    """The peak that the rule expected at its last admission; None if it does not look ahead."""
    num_evicted: int


@dataclass(frozen=True)
class Report:
    """What a run came to; percentages are of the pool's capacity, means over decode steps."""

    decode_steps: int
    consumed_pct: float
    future_pct: float
    """True peak of the running batch."""
    evicted_pct: float
    """Evictions per request, in percent."""
    recomputed_tokens: int
    total_work_s: float
    """Execution time of all steps on the virtual hardware, recomputed prompts included."""
    finished: int
    max_overtaken: int
    duration_s: float
    """Virtual time from the first arrival to the last token."""
    ttft_s_p50: float
    ttft_s_p99: float
    cpu_ms_p50: float
    """Router time per plan: plan, commit, result."""
    cpu_ms_p99: float
    exceeded_pct: dict[float, float]
    """By q: in how many percent of admissions the batch's true peak was above the forecast's
    q-quantile; empty for rules that do not look ahead."""
    timeline: tuple[TimelinePoint, ...] = field(repr=False)


class Measurements:
    """Sums over a run."""

    def __init__(self, capacity_tokens: int, outputs: IntArray, hardware: VirtualHardware) -> None:
        self.router_s: list[float] = []
        self.ttft_s: list[float] = []
        self._capacity = capacity_tokens
        self._outputs = outputs
        self._hardware = hardware
        self._decode_steps = 0
        self._work_s = 0.0
        self._consumed = 0.0
        self._future = 0.0
        self._peak: float | None = None
        self._max_overtaken = 0
        self._forecast_tokens: float | None = None
        self._timeline: list[TimelinePoint] = []
        self._num_exceeded: IntArray = np.zeros(len(CALIBRATED_QUANTILES), dtype=np.int64)
        self._num_forecasts = 0

    def admitted(self, batch: Sequence[Request], peaks: IntArray | None) -> None:
        """Take in a batch with a newcomer, and what the rule expects of it."""
        if peaks is None:
            return
        true_peak = self._true_peak(batch)
        self._num_exceeded += true_peak > np.quantile(peaks, CALIBRATED_QUANTILES)
        self._num_forecasts += 1
        self._forecast_tokens = float(np.quantile(peaks, TIMELINE_QUANTILE))

    def prompts(self, step: PlannedStep) -> float:
        """Take in a step of prompts; returns its seconds."""
        self._peak = None
        parts = [(request.next_position, num_tokens) for request, num_tokens in step.allotments]
        num_new = sum(num_tokens for _, num_tokens in parts)
        pairs = sum(num_tokens * (start + num_tokens // 2) for start, num_tokens in parts)
        self._max_overtaken = max(
            self._max_overtaken, *(request.num_overtaken for request, _ in step.allotments)
        )
        return self._spend(self._hardware.seconds(num_new, chunk_context=pairs))

    def decodes(
        self, step: PlannedStep, num_steps: int, num_used: int, live: Sequence[Request]
    ) -> float:
        """Take in decode steps, before they are booked; returns their seconds."""
        if step.stops:
            self._peak = None
        if self._peak is None:
            self._peak = self._true_peak([request for request in live if request not in step.stops])
        num_rows = len(step.allotments)
        held = sum(request.next_position for request, _ in step.allotments)
        freed = sum(victim.next_position for victim in step.stops)
        growth = num_rows * num_steps * (num_steps + 1) / 2
        self._decode_steps += num_steps
        self._consumed += num_steps * (num_used - freed) + growth
        self._future += num_steps * self._peak
        return self._spend(self.decode_seconds(num_rows, held, num_steps))

    def decode_seconds(self, num_rows: int, held: int, num_steps: int) -> float:
        """Return the seconds of decode steps of rows that hold `held` tokens before the first."""
        mean_context = held + num_rows * (num_steps - 1) / 2
        return num_steps * self._hardware.seconds(num_rows, decode_context=mean_context)

    def planned(self, num_used: int, num_evicted: int) -> None:
        """Take in how full the pool is after a plan."""
        self._timeline.append(
            TimelinePoint(self._decode_steps, num_used, self._forecast_tokens, num_evicted)
        )

    def ended(self) -> None:
        """A request has left the batch."""
        self._peak = None

    def report(self, num_finished: int, core: RouterCore, duration_s: float) -> Report:
        """Return what the run came to."""
        share = 100.0 / (self._capacity * max(1, self._decode_steps))
        p50, p99 = _percentiles(self.router_s) * 1e3
        ttft_p50, ttft_p99 = _percentiles(self.ttft_s)
        exceeded = 100.0 * self._num_exceeded / max(1, self._num_forecasts)
        return Report(
            decode_steps=self._decode_steps,
            consumed_pct=self._consumed * share,
            future_pct=self._future * share,
            evicted_pct=100.0 * core.num_preemptions / num_finished,
            recomputed_tokens=core.num_preempted_tokens,
            total_work_s=self._work_s,
            finished=num_finished,
            max_overtaken=self._max_overtaken,
            duration_s=duration_s,
            ttft_s_p50=float(ttft_p50),
            ttft_s_p99=float(ttft_p99),
            cpu_ms_p50=float(p50),
            cpu_ms_p99=float(p99),
            exceeded_pct=dict(zip(CALIBRATED_QUANTILES, exceeded.tolist(), strict=True))
            if self._num_forecasts
            else {},
            timeline=tuple(self._timeline),
        )

    def _spend(self, seconds: float) -> float:
        self._work_s += seconds
        return seconds

    def _true_peak(self, batch: Sequence[Request]) -> float:
        """Return the memory that the batch will need at its peak, by the true lengths."""
        base = np.array([request.num_known_tokens for request in batch], dtype=np.int64)
        truth = self._outputs[[request.key.request_id for request in batch]]
        generated = np.array([len(request.output_token_ids) for request in batch], dtype=np.int64)
        return float(peak_memory(base, (truth - generated)[None])[0])


def _percentiles(values: Sequence[float]) -> FloatArray:
    result: FloatArray = np.percentile(values, [50, 99])
    return result
