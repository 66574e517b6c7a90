"""Predicted time of a step, corrected while serving.

The model comes from a profile of the workers, or, without one, from the steps themselves: as many
of each size are remembered, so that a long stretch of decodes does not make it forget what
prompts cost. Either way running ratios of observed to predicted time, one for each kind of step,
correct it at once, and their spread is the guard that planners add.

What is predicted for a mixed step is never less than for its decodes or its chunks alone, so
that predictions stay monotone though each kind has a ratio of its own.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from lightserve.cost.model import FloatArray, IntArray, StepModel, StepSample, StepShape, fit
from lightserve.messages.common import NO_SIZES, GraphSizes, StepCoefficients

# What copying KV between the pool and the host costs, learnt while serving.
#
# Copies that a step waits for are added to its time. They
# wait for what the plan before copies ahead, if that is not finished. Most are a few tokens and say
# little about many: seconds per copy mistaken for seconds per token would make every load look
# dear, and then none would be made that could show otherwise.

MIN_VARIANCE = 64.0**2
"""Summed variance of observed token counts. With less, time of copies is put down to their number
rather than to their tokens. The next load corrects a rate that is too low."""


class CopyCost:
    """Seconds per copy and per token: least squares with exponential forgetting."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._mean_tokens = self._mean_s = 0.0
        self._variance = self._covariance = 0.0
        """Weighted sums of products of deviations from the means."""

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step that waited for copies of `num_tokens` tokens."""
        if num_tokens == 0:
            return
        kept = (1.0 - SPREAD_MEMORY) * self._weight
        self._weight = kept + 1.0
        tokens_off = num_tokens - self._mean_tokens
        seconds_off = seconds - self._mean_s
        self._mean_tokens += tokens_off / self._weight
        self._mean_s += seconds_off / self._weight
        share = kept / self._weight
        self._variance = (1.0 - SPREAD_MEMORY) * self._variance + share * tokens_off * tokens_off
        self._covariance = (
            1.0 - SPREAD_MEMORY
        ) * self._covariance + share * tokens_off * seconds_off

    @property
    def mean_rate_s(self) -> float:
        """Seconds per token of recent copies, their overhead shared out; 0: unknown."""
        return max(0.0, self._mean_s) / self._mean_tokens if self._mean_tokens > 0 else 0.0

    def predict(self, num_tokens: int) -> float:
        """Return the seconds that a step waits for copies of `num_tokens` tokens; 0: unknown."""
        if num_tokens == 0:
            return 0.0
        per_token_s = max(0.0, self._covariance / (self._variance + MIN_VARIANCE))
        per_copy_s = max(0.0, self._mean_s - per_token_s * self._mean_tokens)
        return per_copy_s + per_token_s * num_tokens


__all__ = ["StepCost", "StepKind", "StepShape"]

NUM_KNEES = 8
REFIT_STEPS = 64
"""Steps between two fits, and steps remembered of each size, a power of two of new tokens."""
RATIO_MEMORY = 0.1
"""Weight of the newest observation in the ratio, and in averages of what steps take, so that ten
steps show a change."""
SPREAD_MEMORY = 0.03
"""Weight of the newest observation in the ratio's variance, which grows at RATIO_MEMORY, and of a
copy's time in what copies take."""
FADING = 0.98
"""Weight of what is known of drafts after a step without any, so that they are tried again; and of
those of a key after a result."""
GUARD_DEVIATIONS = 2.5
"""Deviations that the guard adds. A step that took longer than predicted by more, and by
LEAST_OUTLIER, says no more than that: it was stalled by something else, which no shorter step would
have avoided. Where steps get longer for good the deviation grows by a quarter with each."""
LEAST_OUTLIER = 0.3
"""Share of the prediction by which any step may be off, the first of its kind too."""


class StepKind(StrEnum):
    """Kinds of steps, each with a correction of its own."""

    DECODE = "decode"
    DRAFT = "draft"
    """Decodes some of which have drafts."""
    MIXED = "mixed"
    PREFILL = "prefill"

    __hash__ = str.__hash__  # see `RequestClass`


DECODE, DRAFT, MIXED, PREFILL = StepKind
"""For what is asked often, see `types.RT`."""


@dataclass(slots=True)
class _Ratio:
    """Running mean of observed over modelled time, and variance of observed over predicted."""

    mean: float = 1.0
    variance: float = 0.0
    num_observed: int = 0

    def observe(self, ratio: float) -> None:
        most = max(LEAST_OUTLIER, GUARD_DEVIATIONS * math.sqrt(self.variance))
        off = min(ratio / self.mean - 1.0, most)
        self.num_observed += 1
        newest = 1.0 / self.num_observed
        self.mean *= 1.0 + max(RATIO_MEMORY, newest) * off
        if self.num_observed > 1:
            is_growing = off * off > self.variance
            memory = RATIO_MEMORY if is_growing and off > 0 else SPREAD_MEMORY
            self.variance += max(memory, newest) * (off * off - self.variance)


@dataclass(slots=True)
class StepCost:
    """Predicts step times. Queries are O(1); a fit takes milliseconds, and only without profile.

    `error_s` is the running average of the absolute error.
    """

    error_s: float = 0.0
    _model: StepModel | None = None
    _sizes: GraphSizes = NO_SIZES
    """To which the workers pad steps, see `StepModel`."""
    _is_profiled: bool = False
    _samples: dict[int, deque[StepSample]] = field(default_factory=dict)
    _num_observed: int = 0
    _all: _Ratio = field(default_factory=_Ratio)
    """Ratio of all kinds, for kinds that have not been seen."""
    _ratios: dict[StepKind, _Ratio] = field(
        default_factory=lambda: {kind: _Ratio() for kind in StepKind}
    )
    """That of drafts is beside that of decodes, which tell when a machine gets slower or faster."""
    _means: dict[StepKind, float] = field(default_factory=lambda: dict.fromkeys(StepKind, 1.0))
    """Means of observed over modelled time by kind, `_all` for kinds not seen."""
    _guard: float | None = None
    """Guard of all kinds; None: to be computed anew."""

    @property
    def is_known(self) -> bool:
        """Whether there is a profile, or anything has been learnt."""
        return self._model is not None

    @property
    def is_settled(self) -> bool:
        """Whether promises may be made of it: it was profiled, or many steps have been seen."""
        return self._is_profiled or self._num_observed >= REFIT_STEPS

    @property
    def pivot(self) -> float:
        """New tokens at which a step stops being free."""
        return 0.0 if self._model is None else self._model.coefficients.knee

    @property
    def worthwhile_s(self) -> float:
        """`StepModel.worthwhile_s`, corrected; 0: nothing is known."""
        return 0.0 if self._model is None else self._means[MIXED] * self._model.worthwhile_s

    @property
    def guard(self) -> float:
        """Factor >= 1 on predicted times that makes misses rare, whatever the kind."""
        if self._guard is None:
            self._guard = max(self.guard_of(kind) for kind in StepKind)
        return self._guard

    def guard_of(self, kind: StepKind) -> float:
        """Return 1 + k sigma of observed over predicted time."""
        return 1.0 + GUARD_DEVIATIONS * math.sqrt(self._ratio(kind).variance)

    def use_workers(self, coefficients: StepCoefficients | None, sizes: GraphSizes) -> None:
        """Start with fresh workers that pad steps to `sizes`; coefficients None: not measured."""
        self._sizes = sizes
        if coefficients is not None:
            self.use_profile(coefficients)
        elif self._model is not None:
            self._model = replace(self._model, sizes=sizes)

    def use_profile(self, coefficients: StepCoefficients) -> None:
        """Start from what was measured of fresh workers."""
        self._model = StepModel(coefficients, self._sizes)
        self._is_profiled = True
        self._samples.clear()
        self._forget_ratios()

    def seconds(self, shape: StepShape) -> float:
        """Return the predicted seconds of a step, its copies left out; 0: nothing is known."""
        model = self._model
        if model is None or shape.num_new == 0:
            return 0.0
        means = self._means
        if shape.num_chunks == 0:
            return means[kind_of(shape)] * model.seconds(shape)
        if shape.num_decodes == 0:
            return means[PREFILL] * model.seconds(shape)
        # Asked some forty times for each plan: so of all three at once, and no call for each.
        whole_s, decodes_s, chunks_s = model.seconds_of_parts(shape)
        time_s, decode_s = means[MIXED] * whole_s, means[DECODE] * decodes_s
        prefill_s = means[PREFILL] * chunks_s
        return max(time_s, decode_s, prefill_s)

    def seconds_with_drafts(
        self, shape: StepShape, pairs: IntArray
    ) -> tuple[FloatArray, FloatArray]:
        """Return `seconds` of a shape with 1 … n drafts, and what these add, float64 [n] each.

        They add at least what the model says: corrections of two kinds differ by chance as well.
        """
        model, means = self._model, self._means
        if model is None:
            return np.zeros(len(pairs)), np.zeros(len(pairs))
        whole_s = model.seconds_with_drafts(shape, pairs)
        of_kind = means[MIXED if shape.num_chunks else DRAFT]
        times_s, least_s = of_kind * whole_s, of_kind * (whole_s - model.seconds(shape))
        if shape.num_chunks:
            chunks_s = means[PREFILL] * model.seconds_with_drafts(shape.chunks, pairs)
            decode_s = means[DECODE] * model.seconds(shape.decodes)
            times_s = np.maximum(np.maximum(times_s, chunks_s), decode_s)
        return times_s, np.maximum(times_s - self.seconds(shape), least_s)

    def work(self, shape: StepShape) -> float:
        """Return the predicted seconds that a shape takes in large steps, whose floor others pay.

        0: nothing is known.
        """
        model = self._model
        return 0.0 if model is None else self._means[kind_of(shape)] * model.work(shape)

    def num_padding(self, shape: StepShape) -> int:
        """Return how many tokens the workers compute in a step beside those of its shape.

        0 of decodes alone: with a chunk in it the step would be padded as others are.
        """
        if not shape.num_chunks:
            return 0
        return self._sizes.padded(shape.num_new, has_chunks=True) - shape.num_new

    def load_seconds(self, num_tokens: int) -> float:
        """Return what loads of so many tokens add by the profile; 0: it has not measured any."""
        model = self._model
        return 0.0 if model is None else model.coefficients.per_loaded_token_s * num_tokens

    def tokens_within(self, shape: StepShape, limit_s: float, start: int, most: int) -> int:
        """Return how many tokens of one more prompt, from `start` on, keep a step in its limit.

        The largest of 0 … `most`, without guard; `most` while nothing is known.
        """
        if self._model is None:
            return most
        if most > 1 and self.seconds(shape.plus(start, most)) <= limit_s:
            return most  # as times only grow with each token of a chunk
        count = min(most, self._guess_within(shape, limit_s, start, most))
        while count > 1 and self.seconds(shape.plus(start, count)) > limit_s:
            count -= 1
        while 0 < count < most and self.seconds(shape.plus(start, count + 1)) <= limit_s:
            count += 1
        if count > 1:
            return count
        # One token is a decode, which may take longer than a chunk of two, or less.
        return int(most > 0 and self.seconds(shape.plus(start, 1)) <= limit_s)

    def _guess_within(self, shape: StepShape, limit_s: float, start: int, most: int) -> int:
        """Return `tokens_within`, at least 1, but for rounding: one off at most."""
        assert self._model is not None
        kind = MIXED if shape.num_decodes else PREFILL
        count = self._model.chunk_within(shape, limit_s / self._ratio(kind).mean, start)
        if kind is MIXED:
            prefill_s = limit_s / self._ratio(PREFILL).mean
            count = min(count, self._model.chunk_within(shape.chunks, prefill_s, start))
            decode_s = self._ratio(DECODE).mean * self._model.seconds(shape.decodes)
            if decode_s > limit_s:
                return 1
        return max(1, int(min(count, most)))

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn from a finished step; `seconds` without its copies."""
        if self._model is not None:
            self.error_s += RATIO_MEMORY * (abs(seconds - self.seconds(shape)) - self.error_s)
            self._observe_ratio(shape, seconds)
        if self._is_profiled:
            return
        samples = self._samples.setdefault(shape.num_new.bit_length(), deque(maxlen=REFIT_STEPS))
        samples.append(StepSample(shape, seconds))
        self._num_observed = count = self._num_observed + 1
        if count % REFIT_STEPS == 0 or (count < REFIT_STEPS and count & (count - 1) == 0):
            self._fit()

    def _ratio(self, kind: StepKind) -> _Ratio:
        ratio = self._ratios[kind]
        return ratio if ratio.num_observed or kind is DRAFT else self._all

    def _observe_ratio(self, shape: StepShape, seconds: float) -> None:
        assert self._model is not None
        ratio = seconds / max(self._model.seconds(shape), 1e-9)
        kind, of_drafts = kind_of(shape), self._ratios[DRAFT]
        self._all.observe(ratio)
        if kind is DRAFT:
            ratio /= self._ratio(DECODE).mean
        elif kind is DECODE:
            of_drafts.mean += RATIO_MEMORY * (1.0 - FADING) * (1.0 - of_drafts.mean)
        self._ratios[kind].observe(ratio)
        self._note_ratios()

    def _forget_ratios(self) -> None:
        self._all = _Ratio()
        self._ratios = {kind: _Ratio() for kind in StepKind}
        self._note_ratios()

    def _note_ratios(self) -> None:
        self._means = {kind: self._ratio(kind).mean for kind in self._ratios}
        self._means[DRAFT] *= self._means[DECODE]
        self._guard = None

    def _fit(self) -> None:
        """Fit to the samples; what was last observed keeps correcting."""
        samples = [sample for of_size in self._samples.values() for sample in of_size]
        coefficients = fit(samples, sizes=self._sizes, num_knees=NUM_KNEES)
        # Of one stream, what is added to the cost of its row can be taken from the floor: prompts
        # decide, in whose time either is little.
        counts = {s.num_decodes + s.num_drafts for s, _ in samples if s.num_chunks == 0}
        self._model = StepModel(coefficients, self._sizes, tells_rows=len(counts) > 1)
        self._forget_ratios()
        latest = [of_size[-8:] for of_size in map(list, self._samples.values())]
        for shape, seconds in (sample for of_size in latest for sample in of_size):
            self._observe_ratio(shape, seconds)


def kind_of(shape: StepShape) -> StepKind:
    """Return the kind of a step that has rows."""
    if shape.num_chunks == 0:
        return DRAFT if shape.num_new > shape.num_decodes else DECODE
    return MIXED if shape.num_decodes else PREFILL
