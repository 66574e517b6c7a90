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

from lightserve.frontend.openai.call_scanners import arguments_json

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
        """`call`: name of a function and its arguments, once they are whole.

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
        self._function = ""
        """Of the call that has begun."""
        self._arguments = io.StringIO()

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
        if not self._arguments.getvalue().strip():
            self._function = ""  # it breaks off before its arguments
        self._end_call()
        if self._emit is None and not self._has_channel:
            self._content(self._header.getvalue())

    def _text(self, text: str) -> None:
        if self._emit is None:
            self._header.write(text)
        elif text:
            self._emit(text)

    def _end_call(self) -> None:
        """Tell a call; what is no JSON of its arguments is content."""
        name, self._function = self._function, ""
        text, self._arguments = self._arguments.getvalue(), io.StringIO()
        if name and (arguments := arguments_json(text)) is not None:
            self._call(name, arguments)
        elif text:
            self._content(text)

    def _mark(self, mark: str) -> None:
        self._end_call()
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
            self._function, self._emit = function[1], self._write_argument
        elif "analysis" in header.split():
            self._emit = self._reasoning
        else:
            self._emit = self._content

    def _write_argument(self, text: str) -> None:
        self._arguments.write(text)
