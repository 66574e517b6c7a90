"""Risk: admit while the chance that the peak exceeds the pool stays below a bound.

Our own rule, beyond Past-Future: many futures, whose quantile decides, instead of a flat
reserve. The uniform numbers behind a request's futures are the same in every round (common
random numbers) and stratified, so that decisions do not flicker and few futures suffice.
Real-time and best-effort requests have bounds of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from lightserve.router.admission.peak import PeakRound, num_generated
from lightserve.router.future_memory import IntArray
from lightserve.router.output_lengths import FloatArray, OutputLengths
from lightserve.router.request import Request
from lightserve.types import RequestClass, StepId

MIN_FUTURES, MAX_FUTURES = 32, 1024
_TABLE_ROWS = 4096
"""Requests whose numbers of arrival differ by a multiple of this share their random numbers."""


def num_futures_for(smallest_risk: float) -> int:
    """Return how many futures a quantile needs: at least two in the tail, where affordable."""
    if smallest_risk <= 0.0:
        return MAX_FUTURES
    return int(np.clip(np.ceil(2.0 / smallest_risk), MIN_FUTURES, MAX_FUTURES))


class RiskAdmission:
    """Bounds the probability of running out, per class; see the module's docstring."""

    def __init__(
        self, lengths: OutputLengths, *, seed: int, rt_risk: float, be_risk: float
    ) -> None:
        self._lengths = lengths
        self._risk = {RequestClass.RT: rt_risk, RequestClass.BE: be_risk}
        num_futures = num_futures_for(min(rt_risk, be_risk))
        self._uniforms = _stratified(np.random.default_rng(seed), num_futures)

    def begin(self, live: Collection[Request], num_slots: int, step_id: StepId) -> PeakRound:
        """Start a round; nothing in it depends on `step_id`."""
        del step_id

        def fits(peaks: IntArray, request: Request) -> bool:
            return bool((peaks > num_slots).mean() <= self._risk[request.request_class])

        return PeakRound(live, self._sample, fits)

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
