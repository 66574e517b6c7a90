"""Reads one tool call, character by character as it is written, in any of the ways of
`lightserve/model_formats.py`.

    {"name": "weather", "arguments": {"city": "Oslo"}}        CallScanner
    weather[ARGS]{"city": "Oslo"}                             NamedScanner
    weather(city="Oslo")                                      PythonScanner
    weather\n<arg_key>city</arg_key>…                         TagScanner
    call:weather{city:<|"|>Oslo<|"|>}                         BareScanner

A call is told when it is whole, and its arguments are a JSON object. A text that is no call of a
known tool, or breaks off, is told as such, whole: it was ordinary text.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from enum import Enum, auto
from typing import NamedTuple

from lightserve.model_formats import BARE_QUOTE, Body, CallFormat

ARGUMENT_KEYS = ("arguments", "parameters")
_BLANKS = " \t\r\n"


class Call(NamedTuple):
    """A call of a known tool."""

    name: str
    arguments: str
    """JSON of an object."""


class State(Enum):
    """How far a scanner is."""

    OPEN = auto()
    DONE = auto()
    """`call` is there."""
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

    @property
    def text(self) -> str:
        """All of it."""
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


def arguments_json(text: str) -> str | None:
    """Return arguments as JSON of an object; None: they cannot be made one.

    No arguments, written as null, an empty string or an empty list, are an empty object. Line
    breaks that stand in strings as they are are escaped, and so are halves of characters.
    """
    escaped = _STRING.sub(lambda string: _CONTROL.sub(_escape, string[0]), text.strip() or "{}")
    try:
        value = json.loads(escaped, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict):
        return escaped
    return "{}" if value in (None, "", []) else None


_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f\ud800-\udfff]")


def _escape(match: re.Match[str]) -> str:
    return json.dumps(match[0])[1:-1]


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
        self.call: Call | None = None
        self.state = State.OPEN

    @property
    def raw(self) -> str:
        """All characters pushed."""
        return self._raw.getvalue()

    def push(self, char: str) -> None:
        """Take in a character while OPEN."""
        self._raw.write(char)
        if self._head is None:
            self._take(char)
            return
        try:
            found = self._head.push(char)
        except ValueError:
            self._give_up()
            return
        if found is not None:
            self._head = None
            self._name, mark = found
            self._take_mark(mark)

    def finish(self) -> None:
        """No further character comes: it is a call if nothing of it but an end is missing."""
        self._give_up()

    @abstractmethod
    def _take(self, char: str) -> None:
        """Take in a character behind the head."""

    @abstractmethod
    def _take_mark(self, mark: str) -> None:
        """Take in the mark behind the name."""

    def _give_up(self) -> None:
        self.state = State.NO_CALL

    def _close(self, arguments: str | None) -> None:
        """It is a call with these arguments; None: with none that are JSON, so that it is none."""
        if arguments is None or not self._name:
            self._give_up()
        else:
            self.call, self.state = Call(self._name, arguments), State.DONE


class CallScanner(Scanner):
    """A JSON object."""

    def __init__(self, names: Collection[str], *, needs_arguments: bool) -> None:
        """`needs_arguments`: without any it is no call."""
        super().__init__()
        self._names = names
        self._needs_arguments = needs_arguments
        self._expects = "{"
        self._key = ""
        self._value: _Value | None = None
        self._arguments: str | None = None

    def _take(self, char: str) -> None:
        if self._value is not None:
            if self._value.takes(char):
                return
            self._end_value()
        if self.state is State.OPEN:
            self._punctuation(char)

    def _punctuation(self, char: str) -> None:
        """Take a character between values."""
        if char in _BLANKS:
            return
        if self._expects in ("key", "value"):
            if self._expects == "key" and char == "}":
                self._close_object()
            elif char in ",:}]" or (self._expects == "key" and char != '"'):
                self._give_up()
            else:
                self._value = _Value()
                self._value.takes(char)
        elif self._expects == char == "{" or (self._expects == char == ","):
            self._expects = "key"
        elif self._expects == char == ":":
            self._expects = "value"
        elif self._expects == "," and char == "}":
            self._close_object()
        else:
            self._give_up()

    def _end_value(self) -> None:
        value, self._value = self._value, None
        assert value is not None
        if self._expects == "key":
            self._key, self._expects = str(value.loads()), ":"
            return
        if self._key == "name" and not self._name:
            name = value.loads()
            if not isinstance(name, str) or name not in self._names:
                self._give_up()
                return
            self._name = name
        elif self._key in ARGUMENT_KEYS and self._arguments is None:
            loaded = value.loads()
            # Some models write the arguments as a string that holds JSON.
            self._arguments = loaded if isinstance(loaded, str) else value.text
        self._expects = ","

    def _take_mark(self, mark: str) -> None:
        """There is none: an object names itself."""

    def _close_object(self) -> None:
        is_none = self._arguments is None and self._needs_arguments
        self._close(None if is_none else arguments_json(self._arguments or ""))

    def finish(self) -> None:
        """See `Scanner.finish`: the object's own end may be missing."""
        if self._value is not None and self._value.is_whole:
            self._end_value()
        if self._expects == "," and self._arguments is not None:
            self._close_object()
        else:
            self._give_up()


class NamedScanner(Scanner):
    """A name, a mark and a JSON object."""

    def __init__(self, names: Collection[str], form: CallFormat) -> None:
        ends = (*form.name_ends, form.id_mark) if form.id_mark else form.name_ends
        super().__init__(_Name(names, form.name_start, ends))
        self._form = form
        self._id: str | None = None
        """The part of the id behind the name that has come; None: there is none."""
        self._value = _Value()

    def _take_mark(self, mark: str) -> None:
        self._id = "" if mark == self._form.id_mark else None

    def _take(self, char: str) -> None:
        if self._id is not None:
            self._id += char
            if self._id.endswith(self._form.name_ends):
                self._id = None
        elif self._value.first or char == "{":
            self._value.takes(char)
            if self._value.is_whole:
                self._close(arguments_json(self._value.text))
        elif char not in _BLANKS:
            self._give_up()


class PythonScanner(Scanner):
    """A call as Python writes it, of literals by name."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(_Name(names, "", ("(",)))
        self._depth = 0
        self._quote = ""
        self._is_escaped = False

    def _take_mark(self, mark: str) -> None:
        """It is the bracket, behind which arguments begin."""

    def _take(self, char: str) -> None:
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
                text = self.raw[self.raw.index("(") + 1 : -1]
                self._close(_json_of_python(text) if char == ")" else None)
            self._depth -= 1


_TOKEN = re.compile(
    r"""\s*(?:(?P<string>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
    r"""|(?P<key>[A-Za-z_]\w*)\s*=|(?P<word>[\w.+-]+)|(?P<sign>[][{}(),:]))\s*""",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(U[0-9a-fA-F]{8}|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|[0-7]{1,3}|.)", re.DOTALL)
_ESCAPES = dict(zip("abfnrtv\n\\'\"", "\a\b\f\n\r\t\v\0\\'\"", strict=True)) | {"\n": ""}
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_PYTHON_WORD = re.compile(r"\b(?:True|False|None)\b")
_JSON_SIGNS = {"(": "[", ")": "]"}


def _json_of_python(text: str) -> str | None:
    """Return what stands between the brackets of a call as JSON; None: it is none."""
    pieces = ["{"]
    brackets: list[int] = []
    """Where those that are open stand in `pieces`."""
    lists: set[int] = set()
    """Open brackets with a comma behind them."""
    place = 0
    while place < len(text):
        token = _TOKEN.match(text, place)
        if token is None:
            return None
        place = token.end()
        if token["string"]:
            piece = json.dumps(_ESCAPE.sub(_escaped, token["string"][1:-1]), ensure_ascii=False)
        elif token["key"]:
            piece = f'"{token["key"]}": '
        elif token["word"]:
            piece = _PYTHON_WORDS.get(token["word"]) or _number(token["word"])
        else:
            piece = _JSON_SIGNS.get(token["sign"], token["sign"])
            if piece in "]}":
                opening = brackets.pop() if brackets else 0
                if pieces[-1] == ", ":
                    pieces.pop()
                if token["sign"] == ")" and len(pieces) > opening + 1 and opening not in lists:
                    pieces[opening] = piece = ""  # a value in brackets, no tuple
            elif piece in "[{":
                brackets.append(len(pieces))
            elif piece == ",":
                lists.update(brackets[-1:])
            piece = ", " if piece == "," else ": " if piece == ":" else piece
        pieces.append(piece)
    if pieces[-1] == ", ":
        pieces.pop()
    return arguments_json("".join([*pieces, "}"]))


def _escaped(match: re.Match[str]) -> str:
    code = match[1]
    if code[0] in "01234567":
        return chr(int(code, 8))
    if len(code) == 1:
        return _ESCAPES.get(code, match[0])
    number = int(code[1:], 16)
    return chr(number) if number <= sys.maxunicode else match[0]


def _number(word: str) -> str:
    """Return a number as JSON has it, or what is none as it is."""
    if _JSON_NUMBER.fullmatch(word):
        return word
    with contextlib.suppress(ValueError):
        return str(int(word, 0))
    with contextlib.suppress(ValueError, OverflowError):
        return json.dumps(float(word), allow_nan=False)
    return word


_BARE_KEY = re.compile(r"(^\s*|[{,]\s*)([^\s{}\[\],:]+)\s*:")


class BareScanner(Scanner):
    """A name and an object whose keys are bare and whose strings stand between marks."""

    def __init__(self, names: Collection[str], form: CallFormat) -> None:
        super().__init__(_Name(names, form.name_start, form.name_ends))
        self._body = io.StringIO()
        self._tail = ""
        self._is_quoted = False
        self._depth = 0

    def _take_mark(self, mark: str) -> None:
        """It is the bracket, behind which arguments begin."""

    def _take(self, char: str) -> None:
        self._body.write(char)
        self._tail = (self._tail + char)[-len(BARE_QUOTE) :]
        if self._tail == BARE_QUOTE:
            self._is_quoted = not self._is_quoted
        elif self._is_quoted:
            return
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            if self._depth == 0:
                self._close(_json_of_bare(self._body.getvalue()[:-1]) if char == "}" else None)
            self._depth -= 1


def _json_of_bare(text: str) -> str | None:
    """Return what stands between the brackets of such an object as JSON; None: it is none."""
    pieces = text.split(BARE_QUOTE)
    for place, piece in enumerate(pieces):
        if place % 2:
            pieces[place] = json.dumps(piece, ensure_ascii=False)
        else:
            words = _PYTHON_WORD.sub(lambda word: _PYTHON_WORDS[word[0]], piece)
            pieces[place] = _BARE_KEY.sub(r'\1"\2":', words)
    return arguments_json(f"{{{''.join(pieces)}}}")


class TagScanner(Scanner):
    """A name and its arguments between tags.

    A value ends where the next argument or the end of the call begins, so that it may have the tag
    in it that ends values, and may lack it.
    """

    def __init__(
        self,
        names: Collection[str],
        form: CallFormat,
        text_arguments: Mapping[tuple[str, str], bool | None],
    ) -> None:
        """`text_arguments`: names of a tool and of an argument that is a string, whatever it looks
        like; True: or null, by that word; None: it need not be one. Without a name: of others."""
        super().__init__(_Name(names, form.name_start, form.name_ends))
        assert form.tags is not None
        self._tags = form.tags
        self._texts = text_arguments
        self._ends = tuple(mark for mark in form.behind if mark != form.tags.end)
        """Marks that also end a call, behind the tag that ends a value."""
        self._body = io.StringIO()
        """Behind the name."""
        self._tail = ""
        """Its end, as long as a mark can be."""
        self._first: str | None = ""
        """The part of the first tag that has come; None: it is complete."""
        self._since: str | None = None
        """Text behind the tag that ends a value, without blanks; None: too much."""
        self._tail_size = max(map(len, (*self._tags, *self._ends)))

    def _take_mark(self, mark: str) -> None:
        if mark == self._tags.end:
            self._close("{}")
        elif mark == self._tags.key:
            self._first = None
            self._body.write(mark)

    def _take(self, char: str) -> None:
        if self._first is not None:
            self._take_first(char)
            return
        self._body.write(char)
        self._tail = (self._tail + char)[-self._tail_size :]
        if self._tail.endswith(self._tags.end):
            self._end(self._tags.end)
        elif self._tail.endswith(self._tags.value_end):
            self._since = ""
        elif self._since is not None and (self._since or char not in _BLANKS):
            self._since = self._since + char if len(self._since) < self._tail_size else None
            if self._since in self._ends and self._since is not None:
                self._end(self._since)

    def _take_first(self, char: str) -> None:
        """Take in a character before the first argument, or the end of a call without any."""
        assert self._first is not None
        if not self._first and char in _BLANKS:
            return
        self._first += char
        if self._first == self._tags.end:
            self._close("{}")
        elif self._first == self._tags.key:
            self._body.write(self._first)
            self._first = None
        elif not any(tag.startswith(self._first) for tag in (self._tags.key, self._tags.end)):
            self._give_up()

    def _end(self, mark: str) -> None:
        body = self._body.getvalue().removesuffix(mark)
        self._close(self._arguments(body.removeprefix(self._tags.key)))

    def _arguments(self, body: str) -> str | None:
        """Return JSON of what stands behind the first tag; None: an argument has no value."""
        tags, found = self._tags, {}
        for piece in body.split(tags.key):
            key, mark, value = piece.partition(tags.key_end)
            if tags.value:
                blanks, opening, value = value.partition(tags.value)
                mark = opening if mark and not blanks.strip() else ""
            if not mark:
                return None
            whole = value.rstrip()
            if whole.endswith(tags.value_end):
                value = whole.removesuffix(tags.value_end)
            kind = ""
            if tags.kind:
                key, _, kind = key.partition(tags.kind)
            key = key.strip()
            found[key] = self._json_of(key, value, kind)
        parts = (f"{json.dumps(key, ensure_ascii=False)}: {item}" for key, item in found.items())
        return f"{{{', '.join(parts)}}}"

    def _json_of(self, key: str, text: str, kind: str) -> str:
        """Return a value as JSON: a string if it has to be one, or is nothing else.

        `kind`: what the call says of it, see `ArgumentTags.kind`; empty: nothing.
        """
        if kind == "true":
            return json.dumps(text, ensure_ascii=False)
        if not self._tags.value:
            text = text.removeprefix("\n").removesuffix("\n")
        may_be_null = self._texts.get((self._name, key), self._texts.get((self._name, "")))
        if kind == "false":
            may_be_null = None
        if may_be_null and text.lower() == "null":
            return "null"
        if may_be_null is None:
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
    text_arguments: Mapping[tuple[str, str], bool | None],
) -> Scanner:
    """Return what reads a call that begins with this character."""
    if form.tags is not None:
        return TagScanner(names, form, text_arguments)
    if form.body is Body.PYTHON:
        return PythonScanner(names)
    if form.body is Body.BARE:
        return BareScanner(names, form)
    if form.body is Body.NAMED or (form.body is Body.OBJECT_OR_NAMED and first != "{"):
        return NamedScanner(names, form)
    return CallScanner(names, needs_arguments=form.at_start)
