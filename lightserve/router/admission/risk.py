"""Risk: admit while the chance that the peak exceeds the pool stays below a bound.

Our own rule, beyond Past-Future: many futures, whose quantile decides, instead of a flat
reserve. The uniform numbers behind a request's futures are the same in every round (common
random numbers) and stratified, so that decisions do not flicker and few futures suffice.
Real-time and best-effort requests have bounds of their own.

A history is not the truth: it is short at first, and lengths come in waves. In a large batch the
errors of single requests cancel out, but not those of the history, which all of them share. So
each future also draws how much longer or shorter everybody gets than the history says.

Common random numbers also make refusals last (see `peak`): while nobody leaves, a newcomer that
was e tokens too much is refused for e - 1 more steps without a forecast.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from statistics import NormalDist

import numpy as np

from lightserve.router.admission.base import PoolView
from lightserve.router.admission.peak import (
    PeakAdmission,
    PeakRound,
    list_generated,
    nums_generated,
)
from lightserve.router.admission.roster import Roster
from lightserve.router.future_memory import IntArray
from lightserve.router.output_lengths import FloatArray, LengthArray, OutputLengths
from lightserve.router.request import Request
from lightserve.types import RequestClass, StepId

MIN_FUTURES, MAX_FUTURES = 32, 1024
FUTURES_IN_TAIL = 3.2
WAVES = 0.015
"""Variance of a history's mean rank beyond that of as many independent lengths, in units of one
length's: lengths come in waves. Chosen by measurement; see docs/results/admission.md."""
_MIN_HISTORY = 20
_RANK_TILT = 2.0 / np.sqrt(3.0)
"""An exponent of 1 + e moves the mean of uniform numbers by e / 4; the mean of n is off by
1 / sqrt(12 n)."""
MAX_REMEMBERED = 64
_LARGEST = np.float32(1 - 1e-7)
_TABLE_ROWS = 4096
"""Requests whose numbers of arrival differ by a multiple of this share their random numbers."""


def num_futures_for(smallest_risk: float) -> int:
    """Return how many futures a quantile needs: more than three in the tail, where affordable."""
    if smallest_risk <= 0.0:
        return MAX_FUTURES
    return int(np.clip(np.ceil(FUTURES_IN_TAIL / smallest_risk), MIN_FUTURES, MAX_FUTURES))


class _Refusals:
    """What was refused, as long as it certainly would be again."""

    def __init__(self) -> None:
        self._until: dict[Request, int] = {}
        """By request: the fall of the peak, counted as `_fall` is, at which it may fit."""
        self._fall = 0
        """Most tokens by which any peak has fallen."""
        self._live: list[Request] = []
        """Who counted in the last round up to its last refusal, newcomers behind the others."""
        self._counts: list[int] = []
        """Of their output tokens; empty if nobody was refused."""
        self._state: tuple[int, ...] = ()

    def __contains__(self, request: Request) -> bool:
        return self._until.get(request, 0) > self._fall

    def advance(self, live: list[Request], state: tuple[int, ...]) -> None:
        """Take in what has become of the batch; another `state` forgets all.

        `live` is in order of admission: newcomers are at its end.
        """
        before, counts = self._live, self._counts
        if state != self._state or live[: len(before)] != before:
            self._state = state
            self._until.clear()
        self._live, self._counts = live, []
        if not self._until:
            self._fall = 0
            return
        self._counts = list_generated(live)
        progress = list(map(int.__sub__, self._counts, counts))
        num_steps = max(progress, default=0)
        # Who stood still while others moved holds so much less at the old peak.
        self._fall += num_steps + num_steps * len(progress) - sum(progress)

    def note(self, request: Request, excess: int, newcomers: Sequence[Request]) -> None:
        """Remember that a request was too much by `excess` tokens.

        `newcomers` were admitted since the last note; if they do not start after all, this is
        forgotten.
        """
        if len(self._until) == MAX_REMEMBERED:
            self._until.clear()
        counted = [*self._live, *newcomers]
        self._counts += list_generated(counted[len(self._counts) :])
        self._live = counted
        self._until[request] = self._fall + excess

    def steps_left(self, request: Request) -> int:
        """Return for how many more steps of everybody it is certain."""
        return max(0, self._until.get(request, 0) - self._fall - 1)


class RiskRound:
    """An `AdmissionRound` that does not forecast what it knows."""

    def __init__(self, forecast: PeakRound, refusals: _Refusals) -> None:
        self._forecast = forecast
        self._refusals = refusals
        self._newcomers: list[Request] = []

    @property
    def peaks(self) -> IntArray | None:
        """See `PeakRound.peaks`."""
        return self._forecast.peaks

    def admit(self, request: Request) -> bool:
        """Admit if the risk of running out with this request is accepted, or if it is alone."""
        if request in self._refusals:
            return False
        is_admitted = self._forecast.admit(request)
        if is_admitted:
            self._newcomers.append(request)
        else:
            excess = self._forecast.excess(request)
            self._refusals.note(request, excess, self._newcomers)
            self._newcomers = []
        return is_admitted

    def steps_refused(self, request: Request) -> int:
        """See `AdmissionRound.steps_refused`."""
        return self._refusals.steps_left(request)


class RiskAdmission(PeakAdmission):
    """Bounds the probability of running out, per class; see the module's docstring."""

    def __init__(
        self, lengths: OutputLengths, *, seed: int, rt_risk: float, be_risk: float
    ) -> None:
        self._lengths = lengths
        self._risk = {RequestClass.RT: rt_risk, RequestClass.BE: be_risk}
        num_futures = num_futures_for(min(rt_risk, be_risk))
        rng = np.random.default_rng(seed)
        self._uniforms = _stratified(rng, num_futures)
        ranks = (np.arange(num_futures) + 0.5) / num_futures
        self._errors = rng.permutation([NormalDist().inv_cdf(rank) for rank in ranks])
        """Of each future, in standard errors."""
        self._tilted = self._uniforms
        self._tilted_for = 0
        self._refusals = _Refusals()
        self._roster = Roster()

    def begin(self, live: Collection[Request], pool: PoolView, step_id: StepId) -> RiskRound:
        """Start a round; nothing in it depends on `step_id`."""
        del step_id

        def quantile(peaks: IntArray, request: Request) -> int:
            rank = len(peaks) - 1 - int(self._risk[request.request_class] * len(peaks))
            return int(np.partition(peaks, rank)[rank])

        live = list(live)
        state = (pool.num_slots, pool.lease_version, self._lengths.num_recorded)
        self._refusals.advance(live, state)
        forecast = PeakRound(live, self._sample, quantile, pool.num_slots, self)
        return RiskRound(forecast, self._refusals)

    def _sample(self, requests: Sequence[Request]) -> LengthArray:
        generated = nums_generated(requests)
        if len(requests) == 1:  # a newcomer, perhaps one of thousands that are asked about
            newcomer = requests[0]
            limits = np.array([newcomer.admission_limit], np.int64)
            row = newcomer.arrival_number % _TABLE_ROWS
            uniforms = self._tilt()[row : row + 1]
            return self._lengths.sample(generated, limits, uniforms, [newcomer.prediction_key])
        limits, numbers, keys = self._roster.constants(requests)
        uniforms = self._tilt()[numbers % _TABLE_ROWS]
        return self._lengths.sample(generated, limits, uniforms, keys)

    def _tilt(self) -> FloatArray:
        """Return the uniform numbers, in each future shifted by the history's error in it."""
        size = max(_MIN_HISTORY, len(self._lengths))
        if not self._tilted_for <= size <= 1.1 * self._tilted_for:
            scale = _RANK_TILT * np.sqrt(1.0 / size + WAVES)
            exponents = np.exp(scale * self._errors).astype(np.float32)
            self._tilted = np.minimum(self._uniforms**exponents, _LARGEST)
            self._tilted_for = size
        return self._tilted


def _stratified(rng: np.random.Generator, num_futures: int) -> FloatArray:
    """Return rows that each hold one number per stratum, in random order (Latin hypercube)."""
    strata = np.tile(np.arange(num_futures, dtype=np.float32), (_TABLE_ROWS, 1))
    rng.permuted(strata, axis=1, out=strata)
    jitter = rng.random(strata.shape, dtype=np.float32)
    result: FloatArray = np.minimum((strata + jitter) / num_futures, _LARGEST)
    return result
