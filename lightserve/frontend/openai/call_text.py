"""Content and tool calls in a text, told apart as it comes, in any format of
`lightserve/model_formats.py`.

    content  OPENING  before  call  behind  call …  content  OPENING …
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Mapping
from enum import Enum, auto

from lightserve.frontend.openai.call_scanners import Call, Scanner, State, new_scanner
from lightserve.frontend.openai.thinking import Emit, Until
from lightserve.model_formats import CallFormat


class Place(Enum):
    """Where the text is."""

    CONTENT = auto()
    BEFORE = auto()
    """Before what may be a call."""
    CALL = auto()
    BEHIND = auto()
    """Behind one, where another may follow."""


class CallsText:
    """Content, and any number of calls."""

    def __init__(
        self,
        form: CallFormat,
        names: Collection[str],
        text_arguments: Mapping[tuple[str, str], bool | None],
        *,
        content: Emit,
        call: Callable[[Call], None],
    ) -> None:
        self._form, self._names, self._text_arguments = form, names, text_arguments
        self._content, self._call = content, call
        self._openings = [mark for mark in form.openings if mark != form.name_start]
        self._until = Until(form.openings, content)
        self._place = Place.BEFORE if form.at_start else Place.CONTENT
        self._raw = io.StringIO()
        """What came before a call and is content if there is none: blanks, an opening, marks."""
        self._held = ""
        """What may be the beginning of a mark."""
        self._scanner: Scanner | None = None

    def push(self, text: str) -> None:
        """Take in text."""
        text, self._held = self._held + text, ""
        while text:
            if self._place is Place.CONTENT:
                text = self._pass_on(text)
            elif self._scanner is not None:
                text = self._scan(self._scanner, text)
            elif self._place is Place.BEFORE:
                text = self._before(text)
            else:
                text = self._behind(text)

    def finish(self) -> None:
        """Pass on what was held back; what came of a call that is not whole is content."""
        scanner = self._scanner
        if self._place is Place.CONTENT:
            self._until.finish()
        elif scanner is not None:
            scanner.finish()
            if scanner.call is not None:
                self._call(scanner.call)
            else:
                self._content(self._raw.getvalue() + scanner.raw)
        elif self._place is Place.BEFORE:
            self._content(self._raw.getvalue() + self._held)

    def _pass_on(self, text: str) -> str:
        """Tell content up to an opening; return what follows."""
        found = self._until.push(text)
        if found is None:
            return ""
        self._raw = io.StringIO()
        self._raw.write(found.blanks)
        self._place = Place.BEFORE
        if found.mark == self._form.name_start:  # it is the beginning of the call itself
            return found.mark + found.after
        self._raw.write(found.mark)
        return found.after

    def _before(self, text: str) -> str:
        """Note what may stand before a call; return what follows."""
        rest, is_certain = _without(text, (*self._form.before, *self._openings))
        self._raw.write(text[: len(text) - len(rest)])
        if not is_certain:
            self._held = rest
            return ""
        if rest:
            self._scanner = self._new_scanner(rest)
        return rest

    def _behind(self, text: str) -> str:
        """Drop what may stand behind a call; return what follows, another call or content."""
        form = self._form
        marks = (*form.behind, *((*form.before, *self._openings) if form.goes_on else ()))
        rest, is_certain = _without(text, marks)
        if not is_certain:
            self._held = rest
            return ""
        if rest:
            self._raw = io.StringIO()
            if form.goes_on:
                self._scanner = self._new_scanner(rest)
            else:
                self._place = Place.CONTENT
        return rest

    def _new_scanner(self, text: str) -> Scanner:
        return new_scanner(self._form, text[0], self._names, self._text_arguments)

    def _scan(self, scanner: Scanner, text: str) -> str:
        """Push characters until the scanner has had enough; return what follows."""
        for number, char in enumerate(text):
            scanner.push(char)
            if scanner.state is State.OPEN:
                continue
            self._scanner = None
            if scanner.call is not None:
                self._call(scanner.call)
                self._place = Place.BEHIND
                return text[number + 1 :]
            # The last character may belong to an opening, unless it is the call's own.
            self._place = Place.CONTENT
            is_own = len(raw := scanner.raw) == 1 and not self._raw.getvalue()
            self._content(self._raw.getvalue() + (raw if is_own else raw[:-1]))
            return text[number + is_own :]
        return ""


def _without(text: str, marks: Collection[str]) -> tuple[str, bool]:
    """Return what is behind blanks and marks at the beginning; False: it may be part of a mark."""
    while True:
        text = text.lstrip()
        if text and any(len(text) < len(mark) and mark.startswith(text) for mark in marks):
            return text, False
        mark = max((mark for mark in marks if text.startswith(mark)), key=len, default="")
        if not mark:
            return text, True
        text = text.removeprefix(mark)
