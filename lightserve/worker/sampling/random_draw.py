"""Uniform numbers that are a function of (seed, choice, position), and of nothing else.

Contract N1: a draw never depends on the batch, so a request gives the same tokens wherever and
whenever it runs. Counter-based: the 64-bit finaliser of SplitMix64 (Steele, Lea, Flood 2014)
over the three numbers, one after the other. Seed and choice stay the same for all of a sequence:
their share is worked out once (`sequence_state`), the position's in every step, here on the CPU
and to the same bits in `kernels.triton.sampling` on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_UInt64 = npt.NDArray[np.uint64]
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1


def uniform(
    seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int]
) -> npt.NDArray[np.float64]:
    """Return numbers in [0, 1), float64 [n]; seeds are signed 64-bit."""
    state = _mix(_unsigned(seeds))
    state = _mix(state ^ _unsigned(choices))
    return uniform_at(state, _unsigned(positions))


def sequence_state(seed: int, choice: int) -> np.uint64:
    """Return what seed and choice contribute to all numbers of a sequence."""
    state: np.uint64 = _mix(_mix(_unsigned([seed])) ^ _unsigned([choice]))[0]
    return state


def uniform_at(states: _UInt64, positions: _UInt64) -> npt.NDArray[np.float64]:
    """Return the numbers of sequences, by `sequence_state`, at positions; float64 [n]."""
    state = _mix(states ^ positions)
    result: npt.NDArray[np.float64] = (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return result


def _unsigned(values: Sequence[int]) -> _UInt64:
    return np.array([value & _MASK for value in values], dtype=np.uint64)


def _mix(value: _UInt64) -> _UInt64:
    value = value + _GAMMA
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
