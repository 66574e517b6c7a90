"""gpt-oss's answers: messages on channels, as OpenAI's harmony format writes them.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>

What stands on `analysis` is reasoning, a message to a function that is offered is a call of it, and
all else is content. The prompt ends with `<|start|>assistant`, or within a message.

A model may spell a mark in ordinary tokens, too, and the text does not tell which. In a string of a
call's arguments a mark is text. Elsewhere it is one if a header follows that ends in
`<|message|>`, or breaks off behind an end; otherwise it is text of the message before it.
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
"""End of a prompt, before an answer."""

_MARK = re.compile("|".join(map(re.escape, MARKS)))
_FUNCTION = re.compile(r"\bto=functions\.([^\s<]+)")
_QUOTE = re.compile(r'\\.?|"', re.DOTALL)
_ENDS = (END, CALL, RETURN)
_BEGUN = re.compile(r"(<\|(?:end|call|return)\|>)?\s*(?:<\|(?:start|channel)\|>|\Z)")
_HEADER_WORDS = ("assistant", "analysis", "commentary", "final", "json", "code", "to=")


def _is_header(text: str, *, is_first: bool, is_whole: bool) -> bool:
    """Whether a text before the content of a message, or before the end of all, is its header.

    One that no end of a message precedes, and one that breaks off, have a header's words alone.
    """
    if (begun := _BEGUN.match(text)) is None:
        return is_first and is_whole
    is_behind_end = is_first or begun[1] is not None
    if is_whole == is_behind_end:
        return is_whole
    *words, last = _MARK.sub(" ", text).split() or [""]
    known = [
        word for word in _HEADER_WORDS if word == last or (not is_whole and word.startswith(last))
    ]
    return all(w in _HEADER_WORDS or w.startswith("to=") for w in words) and (
        bool(known) or last.startswith("to=")
    )


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
        """Header of the message that begins, with its marks."""
        self._emit: Emit | None = content if is_inside else None
        """For the text of a message; None: it has not begun."""
        self._last: Emit | None = None
        """For what turns out to be no header: the message before it goes on. None: it is first."""
        self._held = ""
        """Text that may be the beginning of a mark."""
        self._function = ""
        """Name of the function that is being called."""
        self._arguments = io.StringIO()
        self._in_string = self._is_escaped = False
        """Where the arguments are."""

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
        header = self._header.getvalue()
        if header and not _is_header(header, is_first=self._last is None, is_whole=False):
            self._go_on()

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
        if self._emit is not None:
            if self._in_string or mark in (MESSAGE, CONSTRAIN):
                self._emit(mark)  # spelled in ordinary tokens
                return
            self._last = self._content if self._function else self._emit
            self._end_call()
            self._emit = None
        elif mark == MESSAGE:
            header = self._header.getvalue()
            if _is_header(header, is_first=self._last is None, is_whole=True):
                self._begin(header)
                return
            self._go_on()
            self._emit = self._last
            self._text(mark)
            return
        elif mark in _ENDS or (mark == START and self._header.getvalue().strip() not in _ENDS):
            self._go_on()
        self._header.write(mark)

    def _go_on(self) -> None:
        """Tell what is no header as text of the message before it."""
        self._last = self._last or self._content
        self._last(self._header.getvalue())
        self._header = io.StringIO()

    def _begin(self, header: str) -> None:
        """Begin the text of a message by what stands before it: role, recipient and channel."""
        self._header = io.StringIO()
        self._in_string = self._is_escaped = False
        function = _FUNCTION.search(header)
        if function is not None and function[1] in self._names:
            self._function, self._emit = function[1], self._write_argument
        elif "analysis" in _MARK.sub(" ", header).split():
            self._emit = self._reasoning
        else:
            self._emit = self._content

    def _write_argument(self, text: str) -> None:
        self._arguments.write(text)
        found = _QUOTE.findall("\\" * self._is_escaped + text)
        self._in_string ^= found.count('"') % 2 == 1
        self._is_escaped = found[-1:] == ["\\"]
