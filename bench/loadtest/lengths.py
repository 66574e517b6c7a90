"""Distributions of lengths in tokens, as a user writes them.

512                  always 512
128:512              uniform, both ends included
normal:512,64        mean and standard deviation
lognormal:512,0.8    median, and standard deviation of the logarithm
loguniform:64,4096   uniform in the logarithm, between two ends
exponential:512      mean
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .errors import LoadTestError

IntArray = npt.NDArray[np.int64]

_NUM_PARAMETERS = {
    "constant": 1,
    "uniform": 2,
    "normal": 2,
    "lognormal": 2,
    "loguniform": 2,
    "exponential": 1,
}


@dataclass(frozen=True)
class LengthDistribution:
    """A named distribution; `parse` makes one."""

    kind: str
    parameters: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> LengthDistribution:
        """Parse what the module's docstring lists. Raises LoadTestError."""
        kind, _, rest = text.strip().rpartition(":")
        if not kind:
            kind, values = "constant", [rest]
        elif kind in _NUM_PARAMETERS:
            values = rest.split(",")
        else:
            kind, values = "uniform", [kind, rest]
        try:
            parameters = tuple(float(value) for value in values)
        except ValueError as error:
            raise LoadTestError(f"not a length distribution: {text!r}") from error
        if len(parameters) != _NUM_PARAMETERS[kind]:
            raise LoadTestError(f"{kind} takes {_NUM_PARAMETERS[kind]} numbers: {text!r}")
        if not all(math.isfinite(value) for value in parameters) or parameters[0] < 1:
            raise LoadTestError(f"lengths start at 1 token: {text!r}")
        if kind in ("uniform", "loguniform") and parameters[1] < parameters[0]:
            raise LoadTestError(f"the second end is below the first: {text!r}")
        if kind in ("normal", "lognormal") and parameters[1] < 0:
            raise LoadTestError(f"a deviation is not negative: {text!r}")
        return cls(kind, parameters)

    def draw(self, rng: np.random.Generator, count: int) -> IntArray:
        """Draw lengths, [count] int64, each at least 1."""
        a, b = (*self.parameters, 0.0)[:2]
        match self.kind:
            case "uniform":
                return rng.integers(round(a), round(b), size=count, endpoint=True)
            case "normal":
                lengths = rng.normal(a, b, count)
            case "lognormal":
                lengths = rng.lognormal(math.log(a), b, count)
            case "loguniform":
                lengths = np.exp(rng.uniform(math.log(a), math.log(b), count))
            case "exponential":
                lengths = rng.exponential(a, count)
            case _:
                lengths = np.full(count, a)
        return np.maximum(1, np.rint(lengths)).astype(np.int64)
