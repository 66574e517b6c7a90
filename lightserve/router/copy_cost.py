"""What copying KV between the pool and the host costs, learnt while serving (mechanisms B5).

Copies that a step waits for are added to its time (architecture 6: a sum, not a maximum).
"""

from __future__ import annotations

MEMORY_TOKENS = 4096.0
"""After so many more copied tokens, an observation counts a third of what it did."""


class CopyCost:
    """Seconds per copied token, a running average weighted by tokens."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._tokens = 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step that waited for copies of `num_tokens` tokens."""
        if num_tokens == 0:
            return
        keep = max(0.0, 1.0 - num_tokens / MEMORY_TOKENS)
        self._seconds = keep * self._seconds + seconds
        self._tokens = keep * self._tokens + num_tokens

    def predict(self, num_tokens: int) -> float:
        """Return the seconds that a step waits for copies of `num_tokens` tokens; 0: unknown."""
        return num_tokens * self._seconds / self._tokens if self._tokens else 0.0
