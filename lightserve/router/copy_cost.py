"""What copying KV between the pool and the host costs, learnt while serving (mechanisms B5).

Copies that a step waits for are added to its time (architecture 6: a sum, not a maximum). They
wait for what the plan before copies ahead, if that is not finished. Most are a few tokens and say
little about many: seconds per copy mistaken for seconds per token would make every load look dear,
and then none would be made that could show otherwise.
"""

from __future__ import annotations

FORGETTING = 0.98
"""Weight of an observation against the one after it."""
MIN_VARIANCE = 64.0**2
"""Of observed numbers of tokens, summed: with less, what copies take is rather put down to their
number than to their tokens. A rate that is too low is corrected by the next load."""


class CopyCost:
    """Seconds per copy and per token: least squares with exponential forgetting."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._mean_tokens = self._mean_s = 0.0
        self._variance = self._covariance = 0.0
        """Weighted sums of products of deviations from the means."""

    def observe(self, num_tokens: int, seconds: float, num_ahead: int = 0) -> None:
        """Learn from a step that waited for copies of `num_tokens` tokens.

        `num_ahead` are those that the plan before copied ahead: the most that may have been in
        the way.
        """
        if num_tokens == 0:
            return
        kept = FORGETTING * self._weight
        self._weight = kept + 1.0
        tokens_off = num_tokens + num_ahead - self._mean_tokens
        seconds_off = seconds - self._mean_s
        self._mean_tokens += tokens_off / self._weight
        self._mean_s += seconds_off / self._weight
        share = kept / self._weight
        self._variance = FORGETTING * self._variance + share * tokens_off * tokens_off
        self._covariance = FORGETTING * self._covariance + share * tokens_off * seconds_off

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
