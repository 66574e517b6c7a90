"""A frontend's view of requests: latencies, tokens, ends, targets met."""

from __future__ import annotations

from typing import NamedTuple, Self

from lightserve.metrics import catalogue
from lightserve.metrics.recording import Counter, Recorder
from lightserve.types import SLO, FinishReason, RequestClass

ABORT = "abort"
"""`finished_reason` of requests whose client left."""


class SloTargets(NamedTuple):
    """Targets of a request, in seconds, as `SLO` has them; None: it has no such target."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    mtpot_s: float | None = None
    completion_s: float | None = None

    @classmethod
    def of(cls, slo: SLO) -> Self:
        """Return targets in the words of requests."""
        ttft_s, tpot_s, mtpot_s = (
            None if value is None else value / 1e3
            for value in (slo.ttft_ms, slo.tpot_ms, slo.mtpot_ms)
        )
        return cls(ttft_s, tpot_s, mtpot_s, slo.completion_s)


class RequestMetrics:
    """One request (one completion of one prompt), from its submission to its end.

    Call `on_tokens` for each delivery, then exactly one of `on_finish`, `on_failure` and
    `on_abort`; whatever comes after the first of those has no effect. Times are monotonic.
    """

    __slots__ = (
        "_arrival_s",
        "_first_s",
        "_is_over",
        "_last_s",
        "_max_gap_s",
        "_num_prompt_tokens",
        "_num_tokens",
        "_series",
        "_targets",
        "missed",
    )

    def __init__(
        self, series: _ClassSeries, *, arrival_s: float, num_prompt_tokens: int, targets: SloTargets
    ) -> None:
        self._series = series
        self._arrival_s = arrival_s
        self._num_prompt_tokens = num_prompt_tokens
        self._targets = targets
        self._first_s: float | None = None
        self._last_s = arrival_s
        self._max_gap_s = 0.0
        self._num_tokens = 0
        self._is_over = False
        self.missed: list[str] | None = None
        """Targets that it missed, once it is over: all that it has if it failed."""

    def on_tokens(self, num_tokens: int, now_s: float) -> None:
        """Count a delivery of tokens."""
        series = self._series
        if self._first_s is None:
            self._first_s = now_s
            series.ttft.observe(now_s - self._arrival_s)
            series.prompt_tokens.value += self._num_prompt_tokens
        else:
            gap_s = now_s - self._last_s
            series.itl.observe(gap_s)
            self._max_gap_s = max(self._max_gap_s, gap_s)
        self._last_s = now_s
        self._num_tokens += num_tokens
        series.generation_tokens.value += num_tokens

    def on_finish(self, reason: FinishReason) -> None:
        """Count a whole answer, which ended at the last tokens."""
        if self._is_over:
            return
        self._is_over = True
        series = self._series
        series.success[reason].value += 1
        series.e2e.observe(self._last_s - self._arrival_s)
        series.request_prompt_tokens.observe(self._num_prompt_tokens)
        series.request_generation_tokens.observe(self._num_tokens)
        ttft_s = self._last_s if self._first_s is None else self._first_s
        tpot_s = 0.0
        if self._num_tokens > 1:
            tpot_s = (self._last_s - ttft_s) / (self._num_tokens - 1)
            series.tpot.observe(tpot_s)
            series.max_gap.observe(self._max_gap_s)
        latency_s = self._last_s - self._arrival_s
        observed = SloTargets(ttft_s - self._arrival_s, tpot_s, self._max_gap_s, latency_s)
        if self._judge(observed):
            series.goodput_requests.value += 1
            series.goodput_tokens.value += self._num_tokens

    def on_failure(self, code: str) -> None:
        """Count a refusal, or an end before the answer was whole, by error code."""
        if not self._is_over:
            self._is_over = True
            self._series.on_failure(code)
            self._judge(None)

    def on_abort(self) -> None:
        """Count that the client has left."""
        if not self._is_over:
            self._is_over = True
            self._series.aborts.value += 1
            self._judge(None)

    def _judge(self, observed: SloTargets | None) -> bool:
        """Compare with the targets, None misses them all; return whether nothing was missed."""
        met_all = observed is not None
        has_any = False
        self.missed = []
        for index, name in enumerate(_TARGET_NAMES):
            if (target_s := self._targets[index]) is None:
                continue
            has_any = True
            value_s = None if observed is None else observed[index]
            met = value_s is not None and value_s <= target_s
            met_all = met_all and met
            if not met:
                self.missed.append(name)
            self._series.on_target(name, met=met)
        if has_any:
            self._series.on_target("all", met=met_all)
        return met_all


_TARGET_NAMES = ("ttft", "tpot", "mtpot", "completion")


class _ClassSeries:
    """The series of one request class."""

    def __init__(self, recorder: Recorder, label: str) -> None:
        self._recorder = recorder
        self._label = label
        self.ttft = recorder.histogram(catalogue.TIME_TO_FIRST_TOKEN, label)
        self.itl = recorder.histogram(catalogue.INTER_TOKEN_LATENCY, label)
        self.tpot = recorder.histogram(catalogue.TIME_PER_OUTPUT_TOKEN, label)
        self.max_gap = recorder.histogram(catalogue.MAX_INTER_TOKEN_LATENCY, label)
        self.e2e = recorder.histogram(catalogue.E2E_REQUEST_LATENCY, label)
        self.request_prompt_tokens = recorder.histogram(catalogue.REQUEST_PROMPT_TOKENS, label)
        self.request_generation_tokens = recorder.histogram(
            catalogue.REQUEST_GENERATION_TOKENS, label
        )
        self.prompt_tokens = recorder.counter(catalogue.PROMPT_TOKENS, label)
        self.generation_tokens = recorder.counter(catalogue.GENERATION_TOKENS, label)
        self.goodput_requests = recorder.counter(catalogue.GOODPUT_REQUESTS, label)
        self.goodput_tokens = recorder.counter(catalogue.GOODPUT_TOKENS, label)
        self.success: dict[FinishReason, Counter] = {
            reason: recorder.counter(catalogue.REQUEST_SUCCESS, label, reason.value)
            for reason in FinishReason
            if reason is not FinishReason.ERROR
        }
        self.aborts = recorder.counter(catalogue.REQUEST_SUCCESS, label, ABORT)

    def on_failure(self, code: str) -> None:
        self._recorder.counter(catalogue.REQUEST_FAILURE, self._label, code).value += 1

    def on_target(self, target: str, *, met: bool) -> None:
        outcome = "met" if met else "missed"
        self._recorder.counter(catalogue.SLO_REQUESTS, self._label, target, outcome).value += 1


class FrontendMetrics:
    """Makes the records of requests."""

    def __init__(self, recorder: Recorder) -> None:
        self._series = {
            request_class: _ClassSeries(recorder, request_class.value)
            for request_class in RequestClass
        }

    def request(
        self, request_class: RequestClass, *, arrival_s: float, num_prompt_tokens: int, slo: SLO
    ) -> RequestMetrics:
        """Begin a request's record."""
        return RequestMetrics(
            self._series[request_class],
            arrival_s=arrival_s,
            num_prompt_tokens=num_prompt_tokens,
            targets=SloTargets.of(slo),
        )
