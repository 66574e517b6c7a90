"""Risk: admit while the chance that the peak exceeds the pool stays below a bound.

Our own rule, beyond Past-Future: many futures, whose quantile decides, instead of a flat
reserve. The uniform numbers behind a request's futures are the same in every round (common
random numbers) and stratified, so that decisions do not flicker and few futures suffice.
Real-time and best-effort requests have bounds of their own.

With common random numbers the forecast of a batch changes little from step to step: what a
request will have at its end stays as it was until it outlives its sample. So a refusal is
remembered with the tokens by which the peak was too high, and stands while less has left the
batch since, at most for MAX_REMEMBERED_STEPS; somebody who waits costs next to nothing then.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from lightserve.router.admission.peak import PeakRound, num_generated
from lightserve.router.future_memory import IntArray
from lightserve.router.output_lengths import FloatArray, OutputLengths
from lightserve.router.request import Request
from lightserve.types import RequestClass, StepId

MIN_FUTURES, MAX_FUTURES = 32, 1024
FUTURES_IN_TAIL = 1.28
MAX_REMEMBERED_STEPS = 8
MAX_REMEMBERED = 64
_TABLE_ROWS = 4096
"""Requests whose numbers of arrival differ by a multiple of this share their random numbers."""


def num_futures_for(smallest_risk: float) -> int:
    """Return how many futures a quantile needs: more than one in the tail, where affordable."""
    if smallest_risk <= 0.0:
        return MAX_FUTURES
    return int(np.clip(np.ceil(FUTURES_IN_TAIL / smallest_risk), MIN_FUTURES, MAX_FUTURES))


@dataclass(slots=True)
class _Refusal:
    """A request that may not start yet."""

    excess: int
    """Tokens by which the accepted quantile of the peak exceeds the pool, at most."""
    step_id: StepId


class _Refusals:
    """What has been refused lately, as long as it would be again."""

    def __init__(self) -> None:
        self._by_request: OrderedDict[Request, _Refusal] = OrderedDict()
        self._live: set[Request] = set()
        self._num_slots = 0
        self._step_id = StepId(0)

    def __contains__(self, request: Request) -> bool:
        return request in self._by_request

    def advance(self, live: Collection[Request], num_slots: int, step_id: StepId) -> None:
        """Take in who has left the batch: without them the peak is lower by what they held.

        Or by what their futures held, which may be more; a refusal is forgotten soon anyway.
        """
        self._step_id = step_id
        if num_slots != self._num_slots:  # other workers, another pool
            self._num_slots = num_slots
            self._by_request.clear()
        now = set(live)
        num_freed = sum(request.num_known_tokens for request in self._live - now)
        self._live = now
        for request, refusal in list(self._by_request.items()):
            refusal.excess -= num_freed
            age = step_id - refusal.step_id
            if refusal.excess <= 0 or age >= MAX_REMEMBERED_STEPS:
                del self._by_request[request]

    def note(self, request: Request, excess: int) -> None:
        """Remember a verdict; an excess of 0 or less admits."""
        self._by_request.pop(request, None)
        if excess > 0:
            self._by_request[request] = _Refusal(excess, self._step_id)
            if len(self._by_request) > MAX_REMEMBERED:
                self._by_request.popitem(last=False)


class RiskRound:
    """An `AdmissionRound` that does not forecast what it knows."""

    def __init__(self, forecast: PeakRound, refusals: _Refusals) -> None:
        self._forecast = forecast
        self._refusals = refusals

    def admit(self, request: Request) -> bool:
        """Admit if the risk of running out with this request is accepted, or if it is alone."""
        return request not in self._refusals and self._forecast.admit(request)


class RiskAdmission:
    """Bounds the probability of running out, per class; see the module's docstring."""

    def __init__(
        self, lengths: OutputLengths, *, seed: int, rt_risk: float, be_risk: float
    ) -> None:
        self._lengths = lengths
        self._risk = {RequestClass.RT: rt_risk, RequestClass.BE: be_risk}
        num_futures = num_futures_for(min(rt_risk, be_risk))
        self._uniforms = _stratified(np.random.default_rng(seed), num_futures)

        self._refusals = _Refusals()

    def begin(self, live: Collection[Request], num_slots: int, step_id: StepId) -> RiskRound:
        """Start a round; nothing that it draws depends on `step_id`."""

        def fits(peaks: IntArray, request: Request) -> bool:
            num_accepted = int(self._risk[request.request_class] * len(peaks))
            highest = np.partition(peaks, len(peaks) - 1 - num_accepted)
            excess = int(highest[len(peaks) - 1 - num_accepted]) - num_slots
            self._refusals.note(request, excess)
            return excess <= 0

        self._refusals.advance(live, num_slots, step_id)
        return RiskRound(PeakRound(live, self._sample, fits), self._refusals)

    def _sample(self, requests: Sequence[Request]) -> IntArray:
        count = len(requests)
        generated = np.fromiter(map(num_generated, requests), np.int64, count)
        max_tokens = np.fromiter((r.admission_limit for r in requests), np.int64, count)
        numbers = np.fromiter((request.arrival_number for request in requests), np.int64, count)
        uniforms = self._uniforms[numbers % _TABLE_ROWS]
        keys = [request.prediction_key for request in requests]
        return self._lengths.sample(generated, max_tokens, uniforms, keys)


def _stratified(rng: np.random.Generator, num_futures: int) -> FloatArray:
    """Return rows that each hold one number per stratum, in random order (Latin hypercube)."""
    strata = np.tile(np.arange(num_futures, dtype=np.float32), (_TABLE_ROWS, 1))
    rng.permuted(strata, axis=1, out=strata)
    jitter = rng.random(strata.shape, dtype=np.float32)
    result: FloatArray = np.minimum((strata + jitter) / num_futures, np.float32(1 - 1e-7))
    return result
