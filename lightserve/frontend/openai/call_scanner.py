"""Reads one tool call, a JSON object, character by character as it is written.

    {"name": "weather", "arguments": {"city": "Oslo"}}

The name is told as soon as it is known, the text of the arguments as it comes. A text that is no
call of a known tool is told as such, whole: it was ordinary text.
"""

from __future__ import annotations

import io
import json
from collections.abc import Collection
from enum import Enum, auto
from typing import NamedTuple

ARGUMENT_KEYS = ("arguments", "parameters")
_BLANKS = " \t\r\n"


class CallNews(NamedTuple):
    """What a scanner found out; mostly nothing."""

    name: str = ""
    """Now known."""
    arguments: str = ""
    """The next piece of their text; after the name."""


class State(Enum):
    """How far a scanner is."""

    OPEN = auto()
    DONE = auto()
    """The object is closed, and was a call."""
    NO_CALL = auto()


class _Value:
    """Where a JSON value ends, found by brackets and quotes alone."""

    def __init__(self) -> None:
        self.first = ""
        """Its first character."""
        self._text = io.StringIO()
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._is_whole = False

    def takes(self, char: str) -> bool:
        """Take a character of the value; False: it is the first after the value."""
        if self._is_whole:
            return False
        if self._in_string:
            self._take_in_string(char)
        elif self._depth == 0 and self.first and (char in '"{[}],:' or char in _BLANKS):
            return False  # the end of a number or a word
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self._is_whole = self._depth == 0
        self.first = self.first or char
        self._text.write(char)
        return True

    def forget(self) -> None:
        """Keep no text so far but the first character: it has been told."""
        self._text = io.StringIO()

    @property
    def text(self) -> str:
        """All of it, unless it was forgotten."""
        return self._text.getvalue()

    def _take_in_string(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._in_string = False
            self._is_whole = self._depth == 0

    def loads(self) -> object:
        """Return the value, None if it is not valid JSON, or nested beyond all bounds."""
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError):
            return None


class CallScanner:
    """See the module."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._raw = io.StringIO()
        self._expects = "{"
        self._key = ""
        self._value: _Value | None = None
        self._name = ""
        self._held_arguments: str | None = None
        self._has_arguments = False
        self.state = State.OPEN

    @property
    def raw(self) -> str:
        """All characters pushed, as long as it is no call."""
        return self._raw.getvalue()

    @property
    def is_call(self) -> bool:
        """Whether the name has been told."""
        return bool(self._name)

    def push(self, char: str) -> CallNews:
        """Take in a character while OPEN."""
        if not self._name:
            self._raw.write(char)
        if self._value is not None:
            if self._value.takes(char):
                return self._stream(char)
            news = self._end_of_value(self._value)
            self._value = None
            follow = self._punctuation(char)
            return CallNews(news.name or follow.name, news.arguments + follow.arguments)
        return self._punctuation(char)

    def _punctuation(self, char: str) -> CallNews:
        """Take a character between values."""
        if self.state is not State.OPEN or char in _BLANKS:
            return CallNews()
        if self._expects in ("key", "value"):
            if self._expects == "key" and char == "}":
                return self._close()
            if char in ",:}]" or (self._expects == "key" and char != '"'):
                return self._give_up()
            self._value = _Value()
            self._value.takes(char)
            return self._stream(char)
        if self._expects == "{" and char == "{":
            self._expects = "key"
        elif self._expects == ":" and char == ":":
            self._expects = "value"
        elif self._expects == "," and char == ",":
            self._expects = "key"
        elif self._expects == "," and char == "}":
            return self._close()
        else:
            return self._give_up()
        return CallNews()

    def _is_arguments(self) -> bool:
        return self._expects == "value" and self._key in ARGUMENT_KEYS and not self._has_arguments

    def _stream(self, char: str) -> CallNews:
        """Tell a character of the arguments if they are an object and the name is known."""
        value = self._value
        if value is None or not self._is_arguments() or not self._name or value.first != "{":
            return CallNews()
        value.forget()
        return CallNews(arguments=char)

    def _end_of_value(self, value: _Value) -> CallNews:
        if self._expects == "key":
            self._key, self._expects = str(value.loads()), ":"
            return CallNews()
        news = CallNews()
        if self._key == "name" and not self._name:
            name = value.loads()
            if not isinstance(name, str) or name not in self._names:
                return self._give_up()
            self._name = name
            news = CallNews(name, self._held_arguments or "")
        elif self._is_arguments():
            self._has_arguments = True
            if not (self._name and value.first == "{"):
                loaded = value.loads()
                # Some models write the arguments as a string that holds JSON.
                text = loaded if isinstance(loaded, str) else value.text
                if self._name:
                    news = CallNews(arguments=text)
                else:
                    self._held_arguments = text
        self._expects = ","
        return news

    def _close(self) -> CallNews:
        if not self._name:
            return self._give_up()
        self.state = State.DONE
        return CallNews() if self._has_arguments else CallNews(arguments="{}")

    def _give_up(self) -> CallNews:
        """What was told stays told: then the call ends here; otherwise it was none."""
        self.state = State.DONE if self._name else State.NO_CALL
        return CallNews()
