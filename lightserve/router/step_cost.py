"""Predicted time of a step, learnt while serving.

Least squares with exponential forgetting (recursive, three features: a constant, new tokens,
tokens of context read), which is enough to send the next plan in time. The SLO planner's cost
model will stand behind the same two calls.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lightserve.router.policies.base import Allotment

FORGETTING = 0.98
"""Weight of an observation against the one after it: about the last 50 steps count."""
MAX_COVARIANCE = 1e3
"""Forgetting stops here, so that a long run of equal steps does not make the rest unknown."""
_SCALE: npt.NDArray[np.float64] = np.array([1.0, 1e-2, 1e-4])
"""Brings the features to the order of one."""


class OnlineStepCost:
    """Predicts seconds per step; `observe` after every step."""

    def __init__(self) -> None:
        self._weights = np.zeros(3)
        self._covariance: npt.NDArray[np.float64] = np.eye(3) * MAX_COVARIANCE
        self._error_s = 0.0
        self._num_observed = 0

    @property
    def error_s(self) -> float:
        """Exponential average of the absolute prediction error."""
        return self._error_s

    def predict(self, allotments: tuple[Allotment, ...]) -> float:
        """Return the predicted seconds of a step; 0 before the first observation."""
        if self._num_observed == 0:
            return 0.0
        return max(0.0, float(step_features(allotments) @ self._weights))

    def marginal_s(self, num_new: int, context: int) -> float:
        """Return the seconds that `num_new` tokens after `context` tokens add to a step."""
        features = np.array([0.0, num_new, context]) * _SCALE
        return max(0.0, float(features @ self._weights))

    def observe(self, features: npt.NDArray[np.float64], observed_s: float) -> None:
        """Learn from a finished step."""
        error = observed_s - float(features @ self._weights)
        gain = self._covariance @ features
        gain /= FORGETTING + features @ gain
        self._weights += gain * error
        self._covariance -= np.outer(gain, features @ self._covariance)
        if np.trace(self._covariance) < MAX_COVARIANCE:
            self._covariance /= FORGETTING
        if self._num_observed > 0:
            self._error_s += 0.1 * (abs(error) - self._error_s)
        self._num_observed += 1


def step_features(allotments: tuple[Allotment, ...]) -> npt.NDArray[np.float64]:
    """Return (1, new tokens, context tokens), scaled to the order of one."""
    new_tokens = sum(allotment.num_tokens for allotment in allotments)
    context = sum(allotment.request.next_position for allotment in allotments)
    return np.array([1.0, new_tokens, context], dtype=np.float64) * _SCALE
