"""How many tokens words cost, measured through `usage.prompt_tokens`.

One short request per word (the word repeated, one token of output), and one more for what chat
template and BOS add. Tokenizers that split at spaces before they merge, as nearly all do, then give
a text of these words the sum of their costs; the result reports how far prompts were off.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

_WORDS = (
    "the of and to in is that it was for on are as with his they "
    "at be this have from or one had by word but not what all were we"
)
WORDS = tuple(_WORDS.split())
"""Common and short: one token each for most tokenizers."""

_SHORT, _LONG = 8, 40
_GUESS_TOKENS_PER_WORD = 1.0


@dataclass(frozen=True)
class Calibration:
    """Costs in tokens."""

    word_tokens: tuple[float, ...]
    """Of each of `WORDS`, with the space before it."""
    overhead_tokens: float
    """What every prompt costs besides its words."""
    is_measured: bool


UNCALIBRATED = Calibration((_GUESS_TOKENS_PER_WORD,) * len(WORDS), 0.0, is_measured=False)
"""One token per word: what is left where a server reports no usage."""


async def calibrate(count_tokens: Callable[[str], Awaitable[int | None]]) -> Calibration:
    """Measure; `count_tokens` returns the prompt tokens of a text, or None where unknown."""
    short, *longs = [
        await count_tokens(" ".join([word] * count))
        for word, count in [(WORDS[0], _SHORT), *((word, _LONG) for word in WORDS)]
    ]
    if short is None or any(count is None for count in longs):
        return UNCALIBRATED
    counts = [count for count in longs if count is not None]
    first = (counts[0] - short) / (_LONG - _SHORT)
    overhead = max(0.0, short - first * _SHORT)
    # A word that a tokenizer drops would make texts endless.
    costs = tuple(max(0.05, (count - overhead) / _LONG) for count in counts)
    return Calibration(costs, overhead, is_measured=True)
