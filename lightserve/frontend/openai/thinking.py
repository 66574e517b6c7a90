"""Reasoning that a model writes before its answer, told apart from it by the tags of its format."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lightserve.model_formats import ReasoningFormat

Emit = Callable[[str], None]


class Found(NamedTuple):
    """A mark in a text."""

    mark: str
    after: str
    blanks: str
    """Before the mark; they have not been passed on."""


class Until:
    """Passes text on up to a mark; holds back what may be its beginning, and blanks before it."""

    def __init__(self, marks: Sequence[str], emit: Emit) -> None:
        """Without marks, everything is passed on at once."""
        self._marks = marks
        self._emit = emit
        self._held = ""
        self._blanks = io.StringIO()
        """Before what is held; while nothing is, they are not looked at again with each more."""

    def push(self, text: str) -> Found | None:
        """Take in text; return the first mark and what follows it once it is there."""
        if not self._marks:
            self._emit(text)
            return None
        if not self._held and text.isspace():
            self._blanks.write(text)
            return None
        held = self._blanks.getvalue() + self._held + text
        self._blanks = io.StringIO()
        places = [(place, mark) for mark in self._marks if (place := held.find(mark)) >= 0]
        if places:
            place, mark = min(places)
            self._held = ""
            shown = held[:place].rstrip()
            self._emit(shown)
            return Found(mark, held[place + len(mark) :], held[len(shown) : place])
        before = held[: len(held) - max(_beginning(held, mark) for mark in self._marks)]
        shown = before.rstrip()
        self._emit(shown)
        self._blanks.write(before[len(shown) :])
        self._held = held[len(before) :]
        return None

    def finish(self) -> None:
        """No mark comes."""
        self._emit(self._blanks.getvalue() + self._held)
        self._held, self._blanks = "", io.StringIO()


def _beginning(text: str, mark: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `mark`."""
    lengths = range(min(len(text), len(mark) - 1), 0, -1)
    return next((n for n in lengths if mark.startswith(text[-n:])), 0)


class Unwrapped:
    """Passes an answer on without the tags that may stand around it."""

    def __init__(self, tags: tuple[str, str], emit: Emit) -> None:
        self._opening, ending = tags
        self._emit = emit
        self._start: str | None = ""
        """What may be the first tag; None: it is known."""
        self._until = Until((ending,), emit)
        self._is_over = False

    def push(self, text: str) -> None:
        """Take in text, without blanks at its beginning."""
        if self._start is not None:
            self._start += text
            if len(self._start) < len(self._opening) and self._opening.startswith(self._start):
                return
            text, self._start = self._start.removeprefix(self._opening), None
        if self._is_over:
            self._emit(text)
        elif (found := self._until.push(text)) is not None:
            self._is_over = True
            self._emit(found.after)

    def finish(self) -> None:
        """Pass on what was held back."""
        if self._start is not None:
            self._emit(self._start)
        elif not self._is_over:
            self._until.finish()


class ThinkText:
    """`<think>` reasoning `</think>` content; without the first tag, all is content."""

    def __init__(
        self,
        form: ReasoningFormat,
        reasoning: Emit,
        content: Emit,
        *,
        is_inside: bool,
        continues: bool = False,
    ) -> None:
        """`continues`: the text had begun before, so that blanks in front belong to it."""
        self._openings = form.openings
        self._answer = None if form.answer is None else Unwrapped(form.answer, content)
        """Behind reasoning."""
        self._content = content
        self._start = "" if not is_inside else None
        """What may be the first tag, before it is known; None: it is known."""
        self._blanks = io.StringIO()
        """Before that."""
        self._is_inside = is_inside
        self._drops_blanks = not continues
        self._until = Until(form.endings, reasoning)

    def push(self, text: str) -> None:
        """Take in text."""
        if self._start is not None:
            stripped = text if self._start else text.lstrip()
            self._blanks.write(text[: len(text) - len(stripped)])
            self._start += stripped
            start = self._start
            if any(len(start) < len(tag) and tag.startswith(start) for tag in self._openings):
                return
            self._start = None
            tag = next((tag for tag in self._openings if start.startswith(tag)), None)
            if tag is not None:
                self._is_inside = True
                text = start.removeprefix(tag)
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
        found = self._until.push(text)
        if found is not None:
            self._is_inside, self._drops_blanks = False, True
            if self._answer is not None:
                self._content = self._answer.push
            self._pass_on(found.after)

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
        elif self._answer is not None:
            self._answer.finish()


def ends_inside(text: str, form: ReasoningFormat) -> bool:
    """Whether a text that goes on has begun reasoning and not ended it."""
    begun = max((text.rfind(tag) for tag in form.openings), default=-1)
    return begun > max((text.rfind(tag) for tag in form.endings), default=-1)
