"""Oracle: the true lengths are known (simulation only), the optimum every rule is held against."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from lightserve.router.admission.base import PoolView
from lightserve.router.admission.peak import PeakAdmission, PeakRound
from lightserve.router.future_memory import IntArray
from lightserve.router.request import Request
from lightserve.types import StepId


class OracleAdmission(PeakAdmission):
    """`true_length` tells how many tokens a request will output."""

    def __init__(self, true_length: Callable[[Request], int]) -> None:
        self._true_length = true_length

    def begin(self, live: Collection[Request], pool: PoolView, step_id: StepId) -> PeakRound:
        """Start a round; nothing in it is random."""
        del step_id

        def sample(requests: Sequence[Request]) -> IntArray:
            lengths = np.fromiter(map(self._true_length, requests), np.int64, len(requests))
            return lengths[:, None]

        return PeakRound(live, sample, lambda peaks, _: int(peaks[0]), pool.num_slots, self)
