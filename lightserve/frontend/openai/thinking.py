"""Reasoning that a model writes before its answer, told apart from it by `<think>` tags."""

from __future__ import annotations

import io
from collections.abc import Callable

THINK, END_OF_THINK = "<think>", "</think>"

Emit = Callable[[str], None]


class Until:
    """Passes text on up to a mark; holds back what may be its beginning, and blanks before it."""

    def __init__(self, mark: str, emit: Emit) -> None:
        self._mark = mark
        self._emit = emit
        self._held = ""
        self._blanks = io.StringIO()
        """Before what is held; while nothing is, they are not looked at again with each more."""

    def push(self, text: str) -> str | None:
        """Take in text; return what follows the mark once it is there."""
        if not self._held and text.isspace():
            self._blanks.write(text)
            return None
        held = self._blanks.getvalue() + self._held + text
        self._blanks = io.StringIO()
        before, mark, after = held.partition(self._mark)
        if mark:
            self._held = ""
            self._emit(before.rstrip())
            return after
        before = held[: len(held) - _beginning(held, self._mark)]
        shown = before.rstrip()
        self._emit(shown)
        self._blanks.write(before[len(shown) :])
        self._held = held[len(before) :]
        return None

    def finish(self) -> None:
        """The mark does not come."""
        self._emit(self._blanks.getvalue() + self._held)
        self._held, self._blanks = "", io.StringIO()


def _beginning(text: str, mark: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `mark`."""
    lengths = range(min(len(text), len(mark) - 1), 0, -1)
    return next((n for n in lengths if mark.startswith(text[-n:])), 0)


class ThinkText:
    """`<think>` reasoning `</think>` content; without the first tag, all is content."""

    def __init__(
        self, reasoning: Emit, content: Emit, *, is_inside: bool, continues: bool = False
    ) -> None:
        """`continues`: the text had begun before, so that blanks in front belong to it."""
        self._content = content
        self._start = "" if not is_inside else None
        """What may be the first tag, before it is known; None: it is known."""
        self._blanks = io.StringIO()
        """Before that."""
        self._is_inside = is_inside
        self._drops_blanks = not continues
        self._until = Until(END_OF_THINK, reasoning)

    def push(self, text: str) -> None:
        """Take in text."""
        if self._start is not None:
            stripped = text if self._start else text.lstrip()
            self._blanks.write(text[: len(text) - len(stripped)])
            self._start += stripped
            if len(self._start) < len(THINK) and THINK.startswith(self._start):
                return
            start, self._start = self._start, None
            if start.startswith(THINK):
                self._is_inside = True
                text = start.removeprefix(THINK)
            else:
                self._drops_blanks = False
                text = self._blanks.getvalue() + start
        if self._is_inside:
            self._reason(text)
        else:
            self._pass_on(text)

    def _reason(self, text: str) -> None:
        if self._drops_blanks:
            text = text.lstrip()
            self._drops_blanks = not text
        after = self._until.push(text)
        if after is not None:
            self._is_inside, self._drops_blanks = False, True
            self._pass_on(after)

    def _pass_on(self, text: str) -> None:
        if self._drops_blanks:
            text = text.lstrip()
            self._drops_blanks = not text
        if text:
            self._content(text)

    def finish(self) -> None:
        """Pass on what was held back."""
        if self._start is not None:
            self._content(self._blanks.getvalue() + self._start)
        elif self._is_inside:
            self._until.finish()
