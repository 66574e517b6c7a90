"""Texts of a wanted number of tokens.

All texts are cut from one long tape of random words whose costs in tokens are known
(calibration.py). A prompt of its own starts at a place of the tape that no other has; what is
shared, a document or a block of a trace, starts at the place that its key is mapped to.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from .calibration import WORDS, Calibration

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
