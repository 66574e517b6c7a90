"""From a model's text to the parts of a chat message: reasoning, content and tool calls.

Each part is told as it comes. How the text is cut into pieces changes nothing: the joined parts
of a stream are those of the whole text. A whole message is made of the same parts.
"""

from __future__ import annotations

import io
import itertools
import json
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from enum import Enum, auto
from typing import Any, NamedTuple

from lightserve.frontend.columns import TextBuffer, json_array, json_object, json_text
from lightserve.frontend.harmony import HarmonyText
from lightserve.frontend.openai.thinking import Emit, ThinkText, Until

# ----------------------------------------------------------------------
# Reads one tool call, a JSON object, character by character as it is written.
#
#     {"name": "weather", "arguments": {"city": "Oslo"}}
#
# The name is told as soon as it is known, the text of the arguments as it comes. A text that is no
# call of a known tool is told as such, whole: it was ordinary text.


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


# ----------------------------------------------------------------------
# The two ways in which models write tool calls into their text.
#
# hermes        text <tool_call>{"name": …, "arguments": {…}}</tool_call> …
# llama3_json   {"name": …, "parameters": {…}}; {…}        and nothing else


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


Delta = dict[str, Any]
"""A `delta` object of OpenAI's chat chunks."""


class ParserOptions(NamedTuple):
    """What to look for in an output."""

    reasoning: str = "none"
    """`think`, `harmony` or `none`."""
    starts_in_reasoning: bool = False
    """Whether the prompt ended inside of the reasoning."""
    continues: bool = False
    """Whether it ended with some of the text that is to be told apart."""
    tool_format: str = "none"
    """`hermes`, `llama3_json`, `harmony` (with that `reasoning` alone) or `none`."""
    tool_names: frozenset[str] = frozenset()
    max_calls: int | None = None
    """Further calls are left out of the answer."""


class OutputParser:
    """The parts of one completion."""

    def __init__(self, options: ParserOptions) -> None:
        self.num_calls = 0
        self._max_calls = options.max_calls
        self._drops_call = False
        self._deltas: list[Delta] = []
        self._calls: HermesText | JsonText | None = None
        if options.tool_format == "hermes":
            self._calls = HermesText(options.tool_names, self._content, self._call)
        elif options.tool_format == "llama3_json":
            self._calls = JsonText(options.tool_names, self._content, self._call)
        after = self._content if self._calls is None else self._calls.push
        self._text: ThinkText | HarmonyText | None = None
        self._push = after
        if options.reasoning == "think":
            self._text = ThinkText(
                self._reasoning,
                after,
                is_inside=options.starts_in_reasoning,
                continues=options.continues,
            )
            self._push = self._text.push
        elif options.reasoning == "harmony":
            self._text = HarmonyText(
                options.tool_names if options.tool_format == "harmony" else (),
                reasoning=self._reasoning,
                content=self._content,
                call=lambda name, arguments: self._call(CallNews(name, arguments)),
                is_inside=options.continues,
            )
            self._push = self._text.push

    def push(self, text: str) -> list[Delta]:
        """Take in text; return what is certain now."""
        self._push(text)
        return self._take()

    def finish(self) -> list[Delta]:
        """Return what was held back."""
        for part in (self._text, self._calls):
            if part is not None:
                part.finish()
        return self._take()

    def _take(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _content(self, text: str) -> None:
        self._append("content", text)

    def _reasoning(self, text: str) -> None:
        self._append("reasoning_content", text)

    def _append(self, key: str, text: str) -> None:
        if not text:
            return
        if self._deltas and self._deltas[-1].keys() == {key}:
            self._deltas[-1][key] += text
        else:
            self._deltas.append({key: text})

    def _call(self, news: CallNews) -> None:
        if news.name:
            self._drops_call = self.num_calls == self._max_calls
        if self._drops_call:
            return
        if news.name:
            function = {"name": news.name, "arguments": ""}
            call = {"index": self.num_calls, "id": f"call_{uuid.uuid4().hex[:24]}"}
            self.num_calls += 1
            self._deltas.append(
                {"tool_calls": [{**call, "type": "function", "function": function}]}
            )
        if news.arguments:
            last = self._deltas[-1]["tool_calls"][0] if self._is_call_last() else None
            if last is not None and "id" not in last:
                last["function"]["arguments"] += news.arguments
                return
            index = self.num_calls - 1
            piece = {"index": index, "function": {"arguments": news.arguments}}
            self._deltas.append({"tool_calls": [piece]})

    def _is_call_last(self) -> bool:
        return bool(self._deltas) and "tool_calls" in self._deltas[-1]


class MessageBuffer:
    """The message that deltas add up to, without its role."""

    def __init__(self) -> None:
        self._texts: dict[str, TextBuffer] = {}
        """By field."""
        self._calls: list[tuple[str, str, TextBuffer]] = []
        """Id, name and arguments of each."""

    def extend(self, deltas: Iterable[Delta]) -> None:
        """Add the next ones."""
        for delta in deltas:
            for key in delta.keys() - {"tool_calls"}:
                self._texts.setdefault(key, TextBuffer()).append(delta[key])
            for piece in delta.get("tool_calls", ()):
                function = piece["function"]
                if "id" in piece:
                    self._calls.append((piece["id"], function["name"], TextBuffer()))
                self._calls[-1][2].append(function["arguments"])

    def fields(self) -> dict[str, Any]:
        """Return its fields, as `json_object` takes them."""
        fields: dict[str, Any] = {"content": None if self._calls else ""}
        fields |= {key: json_text(text.parts()) for key, text in self._texts.items()}
        if self._calls:
            fields["tool_calls"] = json_array(itertools.starmap(_call_json, self._calls))
        return fields


def _call_json(call_id: str, name: str, arguments: TextBuffer) -> Iterator[bytes]:
    function = json_object({"name": name, "arguments": json_text(arguments.parts())})
    return json_object({"id": call_id, "type": "function", "function": function})
