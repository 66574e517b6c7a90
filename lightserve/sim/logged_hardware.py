"""Workers that take as long as those of a decision log took at the same time."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from lightserve.cost.model import StepModel, StepShape
from lightserve.messages.common import NO_SIZES, GraphSizes, StepCoefficients
from lightserve.messages.images import EncoderWork
from lightserve.sim.virtual_gpus import ProfiledHardware

NEIGHBOURS = 12
"""Steps on either side of one, whose median says how fast the machine was."""
MOST_SHORTER = 0.3
"""Share by which a step may be shorter than that says."""


class LoggedStep(NamedTuple):
    """A step that ran."""

    shape: StepShape
    exec_s: float
    """Without its copies."""
    gap_s: float
    """Between the end of the step before and its start, where its plan was there; otherwise 0."""
    start_s: float = 0.0
    """When it began, after the first request."""


class LoggedHardware(ProfiledHardware):
    """Workers that are off from a formula of their step times as those of the log were then.

    A step takes as many times what the formula says as the steps around it did at that time in the
    log, and what the log's own step took longer than that: where others had the machine for a
    moment, a step waits for as long, whatever it computes.
    """

    def __init__(
        self,
        step_cost: StepCoefficients,
        samples: Sequence[LoggedStep],
        *,
        overlaps_copies: bool,
        graph_sizes: GraphSizes = NO_SIZES,
        encoder: EncoderWork | None = None,
        speed: float = 1.0,
        clock: Callable[[], float],
    ) -> None:
        """`speed`: times as fast as those of the log; `clock`: seconds since the first request."""
        super().__init__(
            step_cost,
            kv_bytes_per_token=0,
            overlaps_copies=overlaps_copies,
            graph_sizes=graph_sizes,
            encoder=encoder,
        )
        self._speed = speed
        self._clock = clock
        model = StepModel(step_cost, graph_sizes)
        model_s = np.array([model.seconds(each.shape) for each in samples])
        exec_s = np.array([each.exec_s for each in samples])
        padded = np.pad(exec_s / model_s, NEIGHBOURS, mode="edge")
        around = np.lib.stride_tricks.sliding_window_view(padded, 2 * NEIGHBOURS + 1)
        ratios = np.median(around, axis=1)
        self._ratios: list[float] = ratios.tolist()
        self._longer_s: list[float] = (exec_s - ratios * model_s).tolist()
        self._gaps_s = [each.gap_s for each in samples]
        self._starts_s = [each.start_s for each in samples]
        self._last = -1
        """The step of the log whose moment has been had."""

    @property
    def per_encoder_token_s(self) -> float:
        """See `Hardware`."""
        return super().per_encoder_token_s / self._speed

    def step_seconds(self, shape: StepShape) -> float:
        """Return the seconds of the next step, and of the gap before it."""
        span_s = self._starts_s[-1] - self._starts_s[0]
        at_s = self._starts_s[0] + (self._clock() * self._speed) % max(span_s, 1e-9)
        place = max(0, bisect.bisect_right(self._starts_s, at_s) - 1)
        usual_s = self._ratios[place] * super().step_seconds(shape)
        longer_s = self._longer_s[place] if place != self._last else 0.0
        self._last = place
        longer_s = max(longer_s, -MOST_SHORTER * usual_s)
        return (self._gaps_s[place] + usual_s + longer_s) / self._speed
