"""Texts of a wanted number of tokens, without knowing the tokenizer.

How many tokens words cost is measured through `usage.prompt_tokens`: one short request per word
(the word repeated, one token of output), and one more for what chat template and BOS add.
Tokenizers that split at spaces before they merge, as nearly all do, then give a text of these words
the sum of their costs; the result reports how far prompts were off.

All texts are cut from one long tape of random words. A prompt of its own starts at a place of the
tape that no other has; what is shared, a document or a block of a trace, starts at the place that
its key is mapped to.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

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


UNIQUE = -1
"""The key of a segment that no other prompt has."""
_TAPE_WORDS = 1 << 18
_KEY_STEP = 0x9E3779B1
"""Odd, so that keys below the length of the tape start at different places."""


class Segment(NamedTuple):
    """A run of tokens of a prompt."""

    key: int
    """Equal keys are equal texts (up to the shorter one's length); or `UNIQUE`."""
    num_tokens: int


class PromptMaker:
    """Makes texts; two with one seed and calibration make the same ones."""

    def __init__(self, calibration: Calibration, seed: int) -> None:
        rng = np.random.default_rng(seed)
        order = rng.integers(len(WORDS), size=_TAPE_WORDS)
        word_chars = np.array([len(word) + 1 for word in WORDS])
        self._calibration = calibration
        # Twice the same words: a text may start near the end.
        order = np.concatenate((order, order))
        self._text = " ".join(WORDS[number] for number in order) + " "
        self._char_ends = np.cumsum(word_chars[order])
        self._token_ends = np.cumsum(np.asarray(calibration.word_tokens)[order])
        self._starts = rng.permutation(_TAPE_WORDS)
        self._num_unique = 0
        self._shift = int(rng.integers(_TAPE_WORDS))

    @property
    def max_tokens(self) -> int:
        """Tokens of the whole tape: the longest text cut in one piece."""
        return int(self._token_ends[_TAPE_WORDS - 1])

    def text(self, segments: Iterable[Segment]) -> str:
        """Return a prompt; the calibrated overhead (template, BOS) counts towards its length."""
        overhead = self._calibration.overhead_tokens
        parts = []
        for segment in segments:
            wanted = segment.num_tokens - overhead
            overhead = max(0.0, -wanted)
            start = self._start(segment.key)
            while wanted > self.max_tokens:  # round the tape
                parts.append(self._cut(start, self.max_tokens))
                wanted -= self.max_tokens
            parts.append(self._cut(start, wanted))
        return " ".join(part for part in parts if part) or WORDS[0]

    def _start(self, key: int) -> int:
        if key != UNIQUE:
            return (key * _KEY_STEP + self._shift) % _TAPE_WORDS
        self._num_unique += 1
        return int(self._starts[self._num_unique % _TAPE_WORDS])

    def _cut(self, start: int, num_tokens: float) -> str:
        before_tokens, before_chars = (
            (0.0, 0)
            if start == 0
            else (float(self._token_ends[start - 1]), int(self._char_ends[start - 1]))
        )
        wanted = before_tokens + num_tokens
        end = int(np.searchsorted(self._token_ends, wanted, side="right"))
        # `end` words stay below; one more may be nearer.
        if end < len(self._token_ends) and self._token_ends[end] - wanted < wanted - (
            float(self._token_ends[end - 1]) if end else 0.0
        ):
            end += 1
        return self._text[before_chars : int(self._char_ends[end - 1])].rstrip() if end else ""
