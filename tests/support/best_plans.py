"""The best step of a small state, found by trying all of them.

A step is a share for each of some requests: the whole rest of it, and for at most one prompt what
fills the step instead: up to the token budget, or up to the time limit. It is feasible in the
sense of BROS (constraint 6) if, for every real-time request that could be in time if it had
the server for itself from here on (`State.is_lost` says which ones could not),

    time of the step + (0 if it advances, else T_avg) <= residual of its next token

with T_avg the mean time of a step, residuals as `slo.py` defines them, all at the start of the
step; and if `MemoryPlan` places every share of it in full, by memory and rows. What starts
needs memory for the whole prompt (`WholePrompts`, the planner's admission too). There are two ways
to read "advances" where a prompt is cut: it has a share (`Reading.SHARE`), or the step yields its
token (`Reading.TOKEN`, which asks more). The best step has the most best-effort tokens, of prompts
and outputs, per second.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightserve.router.request import RUNNING
from lightserve.router.step import Scheduled
from lightserve.router.step_cost import StepShape
from support.policy_scenes import BE, RT
from support.small_states import ROUNDING_S, Reading, State

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


def best_step(
    state: State, reading: Reading, *, with_all_of: Sequence[Scheduled] = ()
) -> list[Scheduled] | None:
    """Return the feasible step with the highest best-effort rate; None: none is feasible.

    Args:
        state: the state.
        reading: see the module.
        with_all_of: shares that it is to have at least.
    """
    for step in _by_rate(_Steps(state, reading)):
        if _covers(step, with_all_of) and state.fits(step):
            assert state.is_feasible(step, reading)
            return step
    return None


def only_real_time(step: Sequence[Scheduled]) -> list[Scheduled]:
    """Return the shares of real-time requests."""
    return [part for part in step if part.request.request_class is RT]


def _covers(step: Sequence[Scheduled], shares: Sequence[Scheduled]) -> bool:
    counts = dict(step)
    return all(counts.get(request, 0) >= count for request, count in shares)


@dataclass(slots=True)
class _Candidates:
    """Steps that keep all deadlines: all that is whole, and how much of which prompt besides."""

    whole: BoolArray
    cut: int | None
    num_cut: IntArray
    rate: FloatArray


def _by_rate(steps: _Steps) -> Iterator[list[Scheduled]]:
    """Yield steps that keep deadlines, tokens and rows, the highest rate first."""
    groups = list(steps.candidates())
    rates = np.concatenate([group.rate for group in groups])
    firsts = np.cumsum([0, *(len(group.rate) for group in groups)])
    for place in np.argsort(-rates, kind="stable"):
        number = int(np.searchsorted(firsts, place, side="right")) - 1
        group, at = groups[number], int(place - firsts[number])
        step = [
            Scheduled(request, int(count))
            for request, count, is_in in zip(
                steps.requests, steps.rest, group.whole[at], strict=True
            )
            if is_in
        ]
        if group.cut is not None:
            step.append(Scheduled(steps.requests[group.cut], int(group.num_cut[at])))
            step.sort(key=lambda part: steps.requests.index(part.request))
        yield step


class _Steps:
    """All subsets of the requests at once, as rows of arrays; times by the profile's formula."""

    def __init__(self, state: State, reading: Reading) -> None:
        self.requests = state.requests
        self._state, self._reading = state, reading
        model = state.pipeline.cost._model
        assert model is not None
        self._c = model.coefficients
        count = len(self.requests)
        numbers = np.arange(1 << count)
        self._in = (numbers[:, None] >> np.arange(count)) & 1 == 1
        found = [state.kv.look_up(request) for request in self.requests]
        self.rest = np.array([each.num_left for each in found])
        """Tokens that each request has to compute."""
        self._starts = [each.start for each in found]
        self._is_be = np.array([r.request_class is BE for r in self.requests])
        self._is_new = np.array([r.state is not RUNNING for r in self.requests])
        self._copies_s = np.array([state.copy_seconds(r) for r in self.requests])
        self._residual = np.array(
            [
                np.inf if r.request_class is BE or state.is_lost(r) else state.residual(r)
                for r in self.requests
            ]
        )
        shapes = [StepShape().plus(*each[:2]) for each in found]
        self._shape = self._in @ np.array(shapes, dtype=np.float64)
        kept = np.array(
            [r.num_kept_tokens if r.state is RUNNING or r.is_paused else 0 for r in self.requests]
        )
        held = np.array([r.num_held_tokens for r in self.requests])
        self._slots = np.where(self._is_be, kept, kept - held)
        """That each takes, besides its tokens, of what is left if best-effort ones lose all."""
        self._prompts = np.where(self._is_new, kept - held + self.rest, 0)
        """Newcomers' whole prompts, for which there must be memory."""
        self._num_slots = state.kv.num_slots - int(held[~self._is_be].sum())

    def candidates(self) -> Iterator[_Candidates]:
        """Yield the whole steps, then for each prompt those that have a part of it."""
        keep = self._can_fit(self._in) & self._in.any(axis=1)
        time_s = self._seconds(self._shape) + self._in @ self._copies_s
        keep &= time_s <= self._limit(self._in) + ROUNDING_S
        yield self._group(keep, None, np.zeros(len(keep), dtype=np.int64), time_s)
        for cut in np.flatnonzero(self.rest > 2):
            yield from self._with_cut(int(cut))

    def _with_cut(self, cut: int) -> Iterator[_Candidates]:
        """Yield steps with a part of a prompt: what time, tokens or memory allow."""
        with_cut = self._in.copy()
        with_cut[:, cut] = True
        keep = ~self._in[:, cut] & self._can_fit(with_cut)
        advancing = with_cut if self._reading is Reading.SHARE else self._in
        copies_s = with_cut @ self._copies_s
        limit_s = self._limit(advancing) + ROUNDING_S - copies_s
        num_new = self._shape[:, 0].astype(np.int64)
        most = np.minimum(self._state.budget - num_new, int(self.rest[cut]) - 1)
        low, high = np.ones_like(most), most  # the largest count that keeps the limit, by bisection
        for _ in range(12):
            middle = (low + high + 1) // 2
            in_time = self._seconds(self._plus(cut, middle)) <= limit_s
            low, high = np.where(in_time, middle, low), np.where(in_time, high, middle - 1)
        if_all_give = self._num_slots - with_cut @ self._slots - num_new
        if_none_gives = self._state.kv.num_available - num_new
        counts = [np.minimum(low, most)]
        counts += [np.minimum(counts[0], slots) for slots in (if_all_give, if_none_gives)]
        for number, count in enumerate(counts):
            time_s = self._seconds(self._plus(cut, count)) + copies_s
            is_new = count < counts[0] if number else True
            is_in_time = self._seconds(self._plus(cut, count)) <= limit_s
            yield self._group(keep & is_new & (count > 1) & is_in_time, cut, count, time_s)

    def _can_fit(self, chosen: BoolArray) -> BoolArray:
        """Return which subsets keep the token budget, and may keep rows and memory."""
        is_be_running = self._is_be & ~self._is_new
        num_yielding = (~chosen & is_be_running).sum(axis=1)
        keeps_rows = (chosen & self._is_new).sum(axis=1) <= self._state.rows.num_free + num_yielding
        keeps_tokens = self._shape[:, 0] <= self._state.budget
        keeps_memory = chosen @ self._slots + self._shape[:, 0] <= self._num_slots
        newcomers_be = chosen @ (self._prompts * self._is_be)
        newcomers_rt = chosen @ (self._prompts * ~self._is_be)
        keeps_memory &= newcomers_rt <= self._num_slots
        keeps_memory &= (newcomers_be == 0) | (
            newcomers_rt + newcomers_be <= self._state.kv.num_available
        )
        all_three: BoolArray = keeps_rows & keeps_tokens & keeps_memory
        return all_three

    def _limit(self, advancing: BoolArray) -> FloatArray:
        left_s = self._residual - np.where(advancing, 0.0, self._state.mean_step_s)
        return np.asarray(left_s.min(axis=1), dtype=np.float64)

    def _plus(self, cut: int, count: IntArray) -> FloatArray:
        start = self._starts[cut]
        shape: FloatArray = self._shape.copy()
        shape[:, 0] += count
        shape[:, 2] += count * start + count * (count - 1) // 2
        shape[:, 4] += 1
        shape[:, 5] += start
        return shape

    def _seconds(self, shape: FloatArray) -> FloatArray:
        """Return the times of shapes, by the same formula as `StepModel.seconds`."""
        c = self._c
        contexts = [c.per_decode_context_s, c.per_chunk_pair_s]
        rows = [c.per_decode_s, c.per_chunk_s, c.per_chunk_context_s]
        linear: FloatArray = shape @ np.array([0.0, *contexts, *rows, c.per_decode_s])
        time_s: FloatArray = c.floor_s + c.per_new_s * np.maximum(0.0, shape[:, 0] - c.knee)
        time_s += linear
        return time_s

    def _group(
        self, keep: BoolArray, cut: int | None, count: IntArray, time_s: FloatArray
    ) -> _Candidates:
        tokens = self._in @ (self.rest * self._is_be)
        if cut is not None and self._is_be[cut]:
            tokens = tokens + count
        return _Candidates(self._in[keep], cut, count[keep], tokens[keep] / time_s[keep])
