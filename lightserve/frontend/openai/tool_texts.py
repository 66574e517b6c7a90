"""The two ways in which models write tool calls into their text.

hermes        text <tool_call>{"name": …, "arguments": {…}}</tool_call> …
llama3_json   {"name": …, "parameters": {…}}; {…}        and nothing else
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection

from lightserve.frontend.openai.call_scanner import CallNews, CallScanner, State
from lightserve.frontend.openai.reasoning import Emit, Until

TOOL_CALL, END_OF_TOOL_CALL = "<tool_call>", "</tool_call>"
_SEPARATORS = "; \t\r\n"


class HermesText:
    """Content, and any number of tagged calls."""

    def __init__(
        self, names: Collection[str], content: Emit, call: Callable[[CallNews], None]
    ) -> None:
        self._names = names
        self._content = content
        self._call = call
        self._until = Until(TOOL_CALL, content)
        self._scanner: CallScanner | None = None
        self._closing: str | None = None
        """After a call: what may be the beginning of its closing tag."""
        self._drops_blanks = False

    def push(self, text: str) -> None:
        """Take in text."""
        while text:
            if self._closing is not None:
                text = self._close(self._closing + text)
            elif self._scanner is not None:
                text = self._scan(self._scanner, text)
            else:
                text = self._pass_on(text)

    def finish(self) -> None:
        """Pass on what was held back; of a call that is not whole, what came stays told."""
        if self._scanner is not None:
            if not self._scanner.is_call:
                self._content(TOOL_CALL + self._scanner.raw)
        elif self._closing is None:
            self._until.finish()

    def _pass_on(self, text: str) -> str:
        """Tell content up to the next call; return what follows its tag."""
        if self._drops_blanks:
            text = text.lstrip()
            self._drops_blanks = not text
        after = self._until.push(text)
        if after is None:
            return ""
        self._scanner = CallScanner(self._names)
        return after

    def _scan(self, scanner: CallScanner, text: str) -> str:
        used = _scan(scanner, text, self._call)
        if scanner.state is not State.OPEN:
            self._scanner = None
            if scanner.state is State.DONE:
                self._closing = ""
            else:
                self._content(TOOL_CALL + scanner.raw)
        return text[used:]

    def _close(self, text: str) -> str:
        """Drop a closing tag and the blanks around it; return what follows."""
        stripped = text.lstrip()
        if len(stripped) < len(END_OF_TOOL_CALL) and END_OF_TOOL_CALL.startswith(stripped):
            self._closing = stripped
            return ""
        self._closing = None
        self._drops_blanks = True
        return stripped.removeprefix(END_OF_TOOL_CALL)


class JsonText:
    """Calls alone, or content alone; after calls there may be content."""

    def __init__(
        self, names: Collection[str], content: Emit, call: Callable[[CallNews], None]
    ) -> None:
        self._names = names
        self._content = content
        self._call = call
        self._scanner: CallScanner | None = None
        self._blanks = io.StringIO()
        """In front of what may be the first call."""
        self._has_calls = False
        self._is_content = False

    def push(self, text: str) -> None:
        """Take in text."""
        while text:
            if self._is_content:
                self._content(text)
                return
            if self._scanner is None:
                text = self._begin(text)
            else:
                used = _scan(self._scanner, text, self._call)
                text = text[used:]
                if self._scanner.state is State.NO_CALL:
                    self._become_content(self._scanner.raw)
                elif self._scanner.state is State.DONE:
                    self._has_calls, self._scanner, self._blanks = True, None, io.StringIO()

    def finish(self) -> None:
        """Pass on what was held back; of a call that is not whole, what came stays told."""
        if self._scanner is None:
            if not self._has_calls and not self._is_content:
                self._content(self._blanks.getvalue())
        elif not self._scanner.is_call and not self._is_content:
            self._become_content(self._scanner.raw)

    def _begin(self, text: str) -> str:
        """Skip what is between calls; return what follows."""
        stripped = text.lstrip(_SEPARATORS if self._has_calls else None)
        self._blanks.write(text[: len(text) - len(stripped)])
        if stripped.startswith("{"):
            self._scanner = CallScanner(self._names)
        elif stripped:
            self._become_content("")
        return stripped

    def _become_content(self, raw: str) -> None:
        self._is_content = True
        self._content(("" if self._has_calls else self._blanks.getvalue()) + raw)


def _scan(scanner: CallScanner, text: str, call: Callable[[CallNews], None]) -> int:
    """Push characters until the scanner has had enough; return how many."""
    for number, char in enumerate(text):
        news = scanner.push(char)
        if news.name or news.arguments:
            call(news)
        if scanner.state is not State.OPEN:
            return number + 1
    return len(text)
