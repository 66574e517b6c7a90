"""The report of a simulated run, and the sums that it is made of."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lightserve.metrics.requests import SloTargets
from lightserve.router.future_memory import IntArray, peak_memory
from lightserve.router.output_lengths import FloatArray
from lightserve.router.request import Request
from lightserve.router.scheduler import Scheduler
from lightserve.router.step import PlannedStep, Reason
from lightserve.sim.simulation import TimedCore
from lightserve.sim.virtual_gpus import Hardware, VirtualHardware
from lightserve.sim.worker import RunLengths, WorkSums
from lightserve.types import SLO, RequestClass, largest_gap

# What the requests of one class came to: attainment of targets, goodput, throughput.
#
# Every arrival in the window counts. TTFT is judged by the first token; the other targets, goodput
# and throughput in requests need the end: what was refused, or is unfinished when the run ends, is
# a miss.


class Targets(SloTargets):
    """Targets of a simulated request."""

    def counted(self) -> Targets:
        """Return those that are judged: the largest gap is `largest_gap`, as a server has it."""
        return self._replace(mtpot_s=largest_gap(self.tpot_s, self.mtpot_s))

    def slo(self) -> SLO:
        """Return them as a server has them."""
        times = self.counted()[:3]
        ttft, tpot, mtpot = (None if target is None else 1e3 * target for target in times)
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
    """A request as its client saw it."""

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
    targets: Targets | None = None
    """Its own; None: those of its class."""


@dataclass(frozen=True)
class ClassReport:
    """Shares are of arrivals in the window, 0 … 1; rates are per second of it."""

    arrivals: int
    ttft_attainment: float | None
    """Share of the requests with such a target that met it; None: no request has one."""
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
    wanted = [(request.targets or targets).counted() for request in counted]
    met = [_targets_met(request, own) for request, own in zip(counted, wanted, strict=True)]
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
    attained: list[float | None] = []
    for i in range(len(targets)):
        of_one = [kept[i] for kept, own in zip(met, wanted, strict=True) if own[i] is not None]
        attained.append(float(np.mean(of_one)) if of_one else None)
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


def is_in_time(request: Seen) -> bool:
    """Return whether a request with targets of its own finished and kept them all."""
    return all(_targets_met(request, (request.targets or Targets()).counted()))


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


# What a hybrid run came to: both classes, the KV pool, the router.


@dataclass(frozen=True)
class KVReport:
    """Figures of memory in the whole run, both classes together."""

    steps: int
    total_work_s: float
    """Execution time of all steps on the virtual hardware."""
    max_step_ms: float
    consumed_pct: float
    """Slots that requests held, of the pool: mean over steps."""
    evicted_pct: float
    """Evictions per request sent, in percent."""
    pauses: int
    evictions: int
    rt_evictions_beside_be: int
    """Evictions of real-time requests while a best-effort one still had KV of its own."""
    recomputed_tokens: int
    saved_tokens: int
    """Copied to the host in the step that took their slots."""
    loaded_tokens: int
    copied_tokens: int
    """All of these copies."""
    copied_bytes: int
    copy_wait_s: float
    """For which steps waited for copies."""
    ahead_wait_s: float
    """For which they could not begin, as copies that no step waits for were not finished."""
    mean_run_tokens: float | None
    """Neighbouring slots in a row, over the sequences of sampled steps; None: not measured."""


STEP_TARGET_MS = 187.5
"""AccelGen counts the steps that last no longer (section 2)."""


@dataclass(frozen=True)
class StepsReport:
    """Sizes of all steps of the run, and the share of the hardware that they use."""

    tokens_mean: float
    """Computed in a step, of prompts and decodes."""
    tokens_p90: float
    ms_p50: float
    ms_p99: float
    short_pct: float
    """Steps of at most `STEP_TARGET_MS`."""
    busy_pct: float
    """Share of the run's time in which steps ran."""
    compute_pct: float
    """Share of the time that all tokens would take in the largest steps, where neither the
    floor of a step nor attention counts: how much of the compute is used."""


def steps_report(sums: WorkSums, per_token_s: float, stop_s: float) -> StepsReport:
    """Return what these steps came to, up to `stop_s`."""
    step_ms = np.array(sums.step_s or [0.0]) * 1e3
    num_tokens = np.array(sums.step_tokens or [0])
    return StepsReport(
        tokens_mean=float(num_tokens.mean()),
        tokens_p90=float(np.percentile(num_tokens, 90)),
        ms_p50=float(np.percentile(step_ms, 50)),
        ms_p99=float(np.percentile(step_ms, 99)),
        short_pct=100.0 * float(np.mean(step_ms <= STEP_TARGET_MS)),
        busy_pct=min(100.0, 100.0 * sums.busy_s / stop_s),
        compute_pct=100.0 * per_token_s * sums.num_tokens / stop_s,
    )


@dataclass(frozen=True)
class RouterReport:
    """Real CPU time of the router, and the sizes of its messages."""

    cpu_ms_p50: float
    """CPU time of all calls of the core for a step, in every eighth step."""
    cpu_ms_p99: float
    plan_bytes_mean: float
    reasons: dict[str, dict[str, int]]
    """By class and reason: times that a request was considered for a step and left out."""
    unseen: dict[str, dict[str, int]]
    """By class and what stopped the search: times that one was not considered."""


@dataclass(frozen=True)
class WarmUpReport:
    """Figures before the window, which no other figure of the classes counts."""

    seconds: float
    rt_arrivals: int
    rt_ttft_attainment: float | None
    rt_goodput_rps: float | None
    """None, as what follows: there is nothing before the window."""
    be_throughput_rps: float | None
    be_throughput_tps: float | None


@dataclass(frozen=True)
class HybridReport:
    """Report of a hybrid run; a class without traffic has no arrivals."""

    warm_up: WarmUpReport
    rt: ClassReport
    be: ClassReport
    kv: KVReport
    steps: StepsReport
    router: RouterReport


def hybrid_report(
    seen: Mapping[RequestClass, Sequence[Seen]],
    targets: Mapping[RequestClass, Targets],
    window: Window,
    *,
    core: TimedCore,
    sums: WorkSums,
    run_lengths: RunLengths,
    num_slots: int,
    hardware: Hardware,
) -> HybridReport:
    """Return what these requests and this core came to."""
    classes = {
        request_class: class_report(
            seen[request_class],
            targets[request_class],
            window,
            evictions=core.counters[request_class].num_evictions,
            recomputed_tokens=core.counters[request_class].lost_tokens,
        )
        for request_class in RequestClass
    }
    num_steps = max(1, sums.num_steps)
    num_copied = sums.saved_tokens + sums.loaded_tokens
    kv = KVReport(
        steps=sums.num_steps,
        total_work_s=sums.busy_s,
        max_step_ms=1e3 * sums.max_step_s,
        consumed_pct=100.0 * core.used_slots / (num_steps * num_slots),
        evicted_pct=100.0 * core.num_preemptions / max(1, sum(map(len, seen.values()))),
        pauses=sum(counters.num_pauses for counters in core.counters.values()),
        evictions=core.num_preemptions,
        rt_evictions_beside_be=core.num_rt_evictions_beside_be,
        recomputed_tokens=core.num_preempted_tokens,
        saved_tokens=sums.saved_tokens,
        loaded_tokens=sums.loaded_tokens,
        copied_tokens=num_copied,
        copied_bytes=num_copied * hardware.kv_bytes_per_token,
        copy_wait_s=sums.copy_wait_s,
        ahead_wait_s=sums.ahead_wait_s,
        mean_run_tokens=run_lengths.num_tokens / run_lengths.num_runs
        if run_lengths.num_runs
        else None,
    )
    p50, p99 = np.percentile(core.step_cpu_s or [0.0], [50, 99]) * 1e3
    router = RouterReport(
        float(p50),
        float(p99),
        sums.plan_bytes / num_steps,
        reasons=_by_class(core.skip_counters.skipped),
        unseen=_by_class(core.skip_counters.unseen),
    )
    warm_up = _warm_up(seen, targets, window)
    steps = steps_report(sums, hardware.per_token_s, window.stop_s)
    rt, be = classes[RequestClass.RT], classes[RequestClass.BE]
    return HybridReport(warm_up, rt, be, kv, steps, router)


def _warm_up(
    seen: Mapping[RequestClass, Sequence[Seen]],
    targets: Mapping[RequestClass, Targets],
    window: Window,
) -> WarmUpReport:
    if window.start_s <= 0:
        return WarmUpReport(0.0, 0, None, None, None, None)
    before = Window(0.0, window.start_s, window.stop_s)
    rt, be = (
        class_report(seen[of], targets[of], before, evictions=0, recomputed_tokens=0)
        for of in (RequestClass.RT, RequestClass.BE)
    )
    return WarmUpReport(
        before.seconds,
        rt.arrivals,
        rt.ttft_attainment,
        rt.goodput_rps,
        be.throughput_rps,
        be.throughput_tps,
    )


def _by_class(counts: Mapping[RequestClass, Counter[Reason]]) -> dict[str, dict[str, int]]:
    return {
        request_class.value: {reason.value: of_class[reason] for reason in Reason}
        for request_class, of_class in counts.items()
    }


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
    """Report of a run; percentages are of the pool's capacity, means over decode steps."""

    decode_steps: int
    consumed_pct: float
    future_pct: float
    """True peak of the running batch."""
    evicted_pct: float
    """Evictions per request, in percent."""
    evicted_requests_pct: float
    """Requests that memory was taken from, once or more often."""
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
        parts = [(request.next_position, num_tokens) for request, num_tokens in step.scheduled]
        num_new = sum(num_tokens for _, num_tokens in parts)
        pairs = sum(num_tokens * (start + num_tokens // 2) for start, num_tokens in parts)
        self._max_overtaken = max(
            self._max_overtaken, *(request.num_overtaken for request, _ in step.scheduled)
        )
        return self._spend(self._hardware.seconds(num_new, chunk_context=pairs))

    def decodes(
        self, step: PlannedStep, num_steps: int, num_used: int, live: Sequence[Request]
    ) -> float:
        """Take in decode steps, before they are booked; returns their seconds."""
        if step.paused:
            self._peak = None
        if self._peak is None:
            self._peak = self._true_peak(
                [request for request in live if request not in step.paused]
            )
        num_rows = len(step.scheduled)
        held = sum(request.next_position for request, _ in step.scheduled)
        freed = sum(victim.next_position for victim in step.paused)
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

    def report(self, num_finished: int, core: Scheduler, duration_s: float) -> Report:
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
            evicted_requests_pct=100.0
            * sum(counters.num_evicted for counters in core.counters.values())
            / num_finished,
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
        base = np.array([r.num_known_tokens + r.recurrent.num_slots for r in batch], dtype=np.int64)
        truth = self._outputs[[request.key.request_id for request in batch]]
        generated = np.array([len(request.output_token_ids) for request in batch], dtype=np.int64)
        return float(peak_memory(base, (truth - generated)[None])[0])


def _percentiles(values: Sequence[float]) -> FloatArray:
    result: FloatArray = np.percentile(values, [50, 99])
    return result
