"""gpt-oss's answers: messages on channels, as OpenAI's harmony format writes them.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>

What stands on `analysis` is reasoning, a message to a function that is offered is a call of it, and
all else is content. The prompt ends with `<|start|>assistant`, or within a message.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Collection

START, END, CHANNEL, MESSAGE = "<|start|>", "<|end|>", "<|channel|>", "<|message|>"
CALL, RETURN, CONSTRAIN = "<|call|>", "<|return|>", "<|constrain|>"
MARKS = (START, END, CHANNEL, MESSAGE, CALL, RETURN, CONSTRAIN)
"""Special tokens of the format, which are part of a text."""
OPENING = f"{START}assistant"
"""What a prompt ends with before an answer."""

_MARK = re.compile("|".join(map(re.escape, MARKS)))
_FUNCTION = re.compile(r"\bto=functions\.([^\s<]+)")

Emit = Callable[[str], None]


class HarmonyText:
    """The messages of an answer, told part by part."""

    def __init__(
        self,
        names: Collection[str],
        *,
        reasoning: Emit,
        content: Emit,
        call: Callable[[str, str], None],
        is_inside: bool,
    ) -> None:
        """`call`: name of a function, once, and the next piece of its arguments.

        `is_inside`: the text goes on with the content of a message.
        """
        self._names = names
        self._reasoning, self._content, self._call = reasoning, content, call
        self._header = io.StringIO()
        """Of the message that begins."""
        self._has_channel = False
        self._emit: Emit | None = content if is_inside else None
        """For the text of a message; None: it has not begun."""
        self._held = ""
        """What may be the beginning of a mark."""

    def push(self, text: str) -> None:
        """Take in text."""
        text, self._held = self._held + text, ""
        end = 0
        for match in _MARK.finditer(text):
            self._text(text[end : match.start()])
            self._mark(match[0])
            end = match.end()
        rest = text[end:]
        place = rest.rfind("<")
        if place >= 0 and any(mark.startswith(rest[place:]) for mark in MARKS):
            rest, self._held = rest[:place], rest[place:]
        self._text(rest)

    def finish(self) -> None:
        """Pass on what was held back; what is no message at all is content."""
        held, self._held = self._held, ""
        self._text(held)
        if self._emit is None and not self._has_channel:
            self._content(self._header.getvalue())

    def _text(self, text: str) -> None:
        if self._emit is None:
            self._header.write(text)
        elif text:
            self._emit(text)

    def _mark(self, mark: str) -> None:
        if mark == MESSAGE:
            self._begin(self._header.getvalue())
        elif mark == CONSTRAIN:
            self._text(" ")
        elif mark == CHANNEL and self._emit is None:
            self._has_channel = True
            self._text(" ")
        else:
            self._header, self._emit, self._has_channel = io.StringIO(), None, True

    def _begin(self, header: str) -> None:
        """Begin the text of a message by what stands before it: role, recipient and channel."""
        function = _FUNCTION.search(header)
        if function is not None and function[1] in self._names:
            name = function[1]
            self._call(name, "")
            self._emit = lambda text: self._call("", text)
        elif "analysis" in header.split():
            self._emit = self._reasoning
        else:
            self._emit = self._content
