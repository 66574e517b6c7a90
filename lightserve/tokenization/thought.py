"""Where an output is in its reasoning: the worker ends it by this, and frontends count by it.

A thought goes by the bytes of tokens, as the text of an answer is told apart: whichever tokens a
model spells a tag in, both sides find it at the same one.

    OPENING ── the first of `openings` ──► INSIDE ── budget used up ──► CLOSING
       └── anything else ──► OVER ◄── one of `endings` ────┴───────────────┘
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum, auto

from lightserve.messages.common import Thinking


class Phase(Enum):
    """Phase of an output that may begin with reasoning."""

    OPENING = auto()
    INSIDE = auto()
    CLOSING = auto()
    OVER = auto()


class Thought:
    """The reasoning of one output, token by token."""

    def __init__(
        self, thinking: Thinking, bytes_of: Callable[[int], bytes], *, is_strict: bool = False
    ) -> None:
        """`bytes_of`: a token's; `is_strict`: reasoning that has begun to open is opened."""
        self.num_tokens = 0
        """Tokens of the reasoning so far, without its tags."""
        self.phase = Phase.OPENING if thinking.openings else Phase.INSIDE
        self._thinking = thinking
        self._bytes_of = bytes_of
        self._is_strict = is_strict
        self._openings = [text.encode() for text in thinking.openings]
        self.endings = [text.encode() for text in thinking.endings]
        self._longest = max(map(len, self.endings))
        self._head = b""
        """Before it is known whether it opens."""
        self._closing = thinking.closing
        self._num_opened = self._num_closed = 0
        """Tokens of `opening` and `_closing` that are there."""
        self._is_cut = False
        """Whether a token was forced."""
        self._pieces: deque[bytes] = deque()
        """The last tokens of the reasoning, in which an ending may have begun."""

    @property
    def is_over(self) -> bool:
        """Whether the answer has begun."""
        return self.phase is Phase.OVER

    @property
    def opening_token_id(self) -> int:
        """The first token of its opening, …"""
        return self._thinking.opening[0]

    @property
    def opens_at_once(self) -> bool:
        """… and whether it is the only one."""
        return len(self._thinking.opening) == 1

    @property
    def tail(self) -> bytes:
        """The end of the reasoning, as long as endings are or longer."""
        return b"".join(self._pieces)

    def forced(self) -> int | None:
        """Return the token that has to come next; None: any may."""
        known = self._thinking
        if self.phase is Phase.OPENING and self._is_strict and (self._num_opened or known.is_sure):
            return known.opening[self._num_opened]
        if self.phase is Phase.INSIDE and self.num_tokens >= known.budget:
            self.phase = Phase.CLOSING
            self._closing = self._rest_of_ending() or known.closing
        return self._closing[self._num_closed] if self.phase is Phase.CLOSING else None

    def _rest_of_ending(self) -> tuple[int, ...]:
        """Return what is left of the tag where the reasoning has begun to write it."""
        ending, begun = self._thinking.ending, b""
        rests = []
        for number, token_id in enumerate(ending[:-1], 1):
            begun += self._bytes_of(token_id)
            if self.tail.endswith(begun):
                rests.append(ending[number:])
        return rests[-1] if rests else ()

    def skip(self) -> None:
        """There is no reasoning: the answer begins at once."""
        self.phase = Phase.OVER

    def consume(self, token_id: int) -> bool:
        """Take in a token of an output whose answer has not begun; return whether it is the first
        that a budget forces."""
        self.forced()  # which may begin to close
        data = self._bytes_of(token_id)
        if self.phase is Phase.OPENING:
            self._open(data)
            return False
        is_first = self.phase is Phase.CLOSING and not self._is_cut
        self._is_cut |= is_first
        self._num_closed += self.phase is Phase.CLOSING
        self.num_tokens += 1
        self._look(data)
        return is_first

    def _open(self, data: bytes) -> None:
        self._num_opened += 1
        self._head += data
        text = self._head.lstrip()
        if any(len(text) < len(tag) and tag.startswith(text) for tag in self._openings):
            return
        tag = next((tag for tag in self._openings if text.startswith(tag)), None)
        self.phase = Phase.OVER if tag is None else Phase.INSIDE
        if tag is not None:
            self._look(text[len(tag) :])

    def _look(self, data: bytes) -> None:
        """Take in some reasoning, and end with the first of the endings that is there."""
        self._pieces.append(data)
        text = self.tail
        place = min((at for ending in self.endings if (at := text.find(ending)) >= 0), default=-1)
        if place < 0:
            while len(text) - len(self._pieces[0]) >= self._longest:
                text = text[len(self._pieces.popleft()) :]
            return
        start = 0
        for piece in self._pieces:
            self.num_tokens -= start >= place
            start += len(piece)
        self.num_tokens = max(0, self.num_tokens)
        self.phase = Phase.OVER
