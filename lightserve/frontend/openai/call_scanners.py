"""Reads one tool call, character by character as it is written, in any of the ways of
`lightserve/model_formats.py`.

    {"name": "weather", "arguments": {"city": "Oslo"}}        CallScanner
    weather[ARGS]{"city": "Oslo"}                             NamedScanner
    weather(city="Oslo")                                      PythonScanner
    weather\n<arg_key>city</arg_key>…                         TagScanner

The name is told as soon as it is known, the text of the arguments as it comes, where it is JSON
already. A text that is no call of a known tool is told as such, whole: it was ordinary text.
"""

from __future__ import annotations

import io
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection
from enum import Enum, auto
from typing import NamedTuple

from lightserve.model_formats import Body, CallFormat

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
        self.is_whole = False

    def takes(self, char: str) -> bool:
        """Take a character of the value; False: it is the first after the value."""
        if self.is_whole:
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
            self.is_whole = self._depth == 0
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
            self.is_whole = self._depth == 0

    def loads(self) -> object:
        """Return the value, None if it is not valid JSON, or nested beyond all bounds."""
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError):
            return None


class _Name:
    """A known tool's name and one of the marks that may follow it."""

    def __init__(self, names: Collection[str], start: str, ends: Collection[str]) -> None:
        self._whole = {f"{start}{name}{end}": (name, end) for name in names for end in ends}
        self._text = ""

    def push(self, char: str) -> tuple[str, str] | None:
        """Return name and mark once they are there. Raises ValueError: they cannot come."""
        self._text = text = self._text + char
        if (found := self._whole.get(text)) is None and not any(
            whole.startswith(text) for whole in self._whole
        ):
            raise ValueError("no known name")
        return found


class Scanner(ABC):
    """One call being read."""

    def __init__(self, head: _Name | None = None) -> None:
        """`head`: what a call begins with, where that is its name."""
        self._head = head
        self._name = ""
        self._raw = io.StringIO()
        self.is_call = False
        """Whether the name has been told."""
        self.state = State.OPEN

    @property
    def raw(self) -> str:
        """All characters pushed, as long as it is no call."""
        return self._raw.getvalue()

    def push(self, char: str) -> CallNews:
        """Take in a character while OPEN."""
        if not self.is_call:
            self._raw.write(char)
        if self._head is None:
            return self._take(char)
        try:
            found = self._head.push(char)
        except ValueError:
            return self._give_up()
        if found is None:
            return CallNews()
        self._head = None
        self._name, mark = found
        return self._take_mark(mark)

    @abstractmethod
    def _take(self, char: str) -> CallNews:
        """Take in a character behind the head."""

    def _take_mark(self, mark: str) -> CallNews:
        """Take in the mark behind the name."""
        return CallNews()

    def _give_up(self) -> CallNews:
        """What was told stays told: then the call ends here; otherwise it was none."""
        self.state = State.DONE if self.is_call else State.NO_CALL
        return CallNews()


class CallScanner(Scanner):
    """A JSON object."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = names
        self._expects = "{"
        self._key = ""
        self._value: _Value | None = None
        self._held_arguments: str | None = None
        self._has_arguments = False

    def _take(self, char: str) -> CallNews:
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
            self._name, self.is_call = name, True
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


class NamedScanner(Scanner):
    """A name, a mark and a JSON object."""

    def __init__(self, names: Collection[str], form: CallFormat) -> None:
        ends = (*form.name_ends, form.id_mark) if form.id_mark else form.name_ends
        super().__init__(_Name(names, form.name_start, ends))
        self._form = form
        self._id: str | None = None
        """What has come of the id behind the name; None: there is none."""
        self._value = _Value()

    def _take_mark(self, mark: str) -> CallNews:
        self._id = "" if mark == self._form.id_mark else None
        return CallNews()

    def _take(self, char: str) -> CallNews:
        if self._id is not None:
            self._id += char
            if self._id.endswith(self._form.name_ends):
                self._id = None
        elif self.is_call or char not in _BLANKS:
            return self._take_value(char)
        return CallNews()

    def _take_value(self, char: str) -> CallNews:
        name = "" if self.is_call else self._name
        if name and char != "{":
            return self._give_up()
        self.is_call = True
        self._value.takes(char)
        self._value.forget()
        if self._value.is_whole:
            self.state = State.DONE
        return CallNews(name, char)


class PythonScanner(Scanner):
    """A call as Python writes it, of literals by name; it is told when it is whole."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(_Name(names, "", ("(",)))
        self._depth = 0
        self._quote = ""
        self._is_escaped = False

    def _take(self, char: str) -> CallNews:
        if self._quote:
            if self._is_escaped or char == "\\":
                self._is_escaped = not self._is_escaped
            elif char == self._quote:
                self._quote = ""
        elif char in "'\"":
            self._quote = char
        elif char in "([{":
            self._depth += 1
        elif char in ")]}":
            if self._depth == 0:
                return self._close()
            self._depth -= 1
        return CallNews()

    def _close(self) -> CallNews:
        try:
            arguments = _json_of_python(self.raw[self.raw.index("(") + 1 : -1])
        except (ValueError, RecursionError):
            return self._give_up()
        self.is_call, self.state = True, State.DONE
        return CallNews(self._name, arguments)


_TOKEN = re.compile(
    r"""\s*(?:(?P<string>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
    r"""|(?P<key>[A-Za-z_]\w*)\s*=|(?P<word>[\w.+-]+)|(?P<sign>[][{}(),:]))\s*""",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_JSON_SIGNS = {"(": "[", ")": "]"}


def _json_of_python(text: str) -> str:
    """Return what stands between the brackets of a call as JSON. Raises ValueError: it is none."""
    pieces = ["{"]
    place = 0
    while place < len(text):
        token = _TOKEN.match(text, place)
        if token is None:
            raise ValueError("no literal")
        place = token.end()
        if token["string"]:
            piece = json.dumps(_ESCAPE.sub(_escaped, token["string"][1:-1]), ensure_ascii=False)
        elif token["key"]:
            piece = f'"{token["key"]}": '
        elif token["word"]:
            piece = _PYTHON_WORDS.get(token["word"], token["word"])
        else:
            piece = _JSON_SIGNS.get(token["sign"], token["sign"])
            if piece in "]}" and pieces[-1] == ", ":
                pieces.pop()
            piece = ", " if piece == "," else ": " if piece == ":" else piece
        pieces.append(piece)
    if pieces[-1] == ", ":
        pieces.pop()
    return json.dumps(
        json.loads("".join([*pieces, "}"]), parse_constant=_refuse), ensure_ascii=False
    )


def _escaped(match: re.Match[str]) -> str:
    code = match[1]
    if len(code) > 1:
        return chr(int(code[1:], 16))
    return _ESCAPES.get(code, code)


class TagScanner(Scanner):
    """A name and its arguments between tags, each told when it is whole."""

    def __init__(
        self,
        names: Collection[str],
        form: CallFormat,
        text_arguments: Collection[tuple[str, str]],
    ) -> None:
        """`text_arguments`: names of a tool and of an argument that is a string in any case."""
        super().__init__(_Name(names, form.name_start, form.name_ends))
        assert form.tags is not None
        self._tags = form.tags
        self._texts = text_arguments
        self._marks: tuple[str, ...] = ()
        """What ends that which is being read."""
        self._is_blank = True
        """Whether nothing else may stand before one of them."""
        self._piece = io.StringIO()
        """What has been read of it."""
        self._tail = ""
        """Its end, as long as a mark can be."""
        self._key = ""
        self._num_arguments = 0

    def _take(self, char: str) -> CallNews:
        if self._is_blank and not self._tail and char in _BLANKS:
            return CallNews()
        self._piece.write(char)
        self._tail = (self._tail + char)[-max(map(len, self._marks)) :]
        mark = next((mark for mark in self._marks if self._tail.endswith(mark)), None)
        if mark is not None:
            return self._end_piece(mark, self._piece.getvalue().removesuffix(mark))
        if self._is_blank and not any(mark.startswith(self._tail) for mark in self._marks):
            return self._give_up()
        return CallNews()

    def _take_mark(self, mark: str) -> CallNews:
        if mark in (self._tags.key, self._tags.end):
            return self._end_piece(mark, "")
        self._expect(self._tags.key, self._tags.end, is_blank=True)
        return CallNews()

    def _expect(self, *marks: str, is_blank: bool) -> None:
        self._marks, self._is_blank = marks, is_blank
        self._piece, self._tail = io.StringIO(), ""

    def _end_piece(self, mark: str, text: str) -> CallNews:
        """Take in what stood before a mark."""
        tags, name = self._tags, "" if self.is_call else self._name
        if mark in (tags.key, tags.end):
            self.is_call = True
        if mark == tags.end:
            self.state = State.DONE
            return CallNews(name, "}" if self._num_arguments else "{}")
        if mark == tags.key:
            self._expect(tags.key_end, is_blank=False)
        elif mark == tags.key_end:
            self._key = text.strip()
            if tags.value:
                self._expect(tags.value, is_blank=True)
            else:
                self._expect(tags.value_end, is_blank=False)
        elif mark == tags.value:
            self._expect(tags.value_end, is_blank=False)
        else:
            self._expect(tags.key, tags.end, is_blank=True)
            self._num_arguments += 1
            before = ", " if self._num_arguments > 1 else "{"
            key = json.dumps(self._key, ensure_ascii=False)
            return CallNews(name, f"{before}{key}: {self._json_of(text)}")
        return CallNews(name)

    def _json_of(self, text: str) -> str:
        """Return a value as JSON: a string if it has to be one, or is nothing else."""
        if not self._tags.value:
            text = text.removeprefix("\n").removesuffix("\n")
        if (self._name, self._key) not in self._texts:
            plain = text.strip()
            if plain in _PYTHON_WORDS:
                return _PYTHON_WORDS[plain]
            try:
                json.loads(plain, parse_constant=_refuse)
            except (ValueError, RecursionError):
                pass
            else:
                return plain
        return json.dumps(text, ensure_ascii=False)


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def new_scanner(
    form: CallFormat,
    first: str,
    names: Collection[str],
    text_arguments: Collection[tuple[str, str]],
) -> Scanner:
    """Return what reads a call that begins with this character."""
    if form.tags is not None:
        return TagScanner(names, form, text_arguments)
    if form.body is Body.PYTHON:
        return PythonScanner(names)
    if form.body is Body.NAMED or (form.body is Body.OBJECT_OR_NAMED and first != "{"):
        return NamedScanner(names, form)
    return CallScanner(names)
