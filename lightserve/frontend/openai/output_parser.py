"""From a model's text to the parts of a chat message: reasoning, content and tool calls.

Each part is told as it comes. How the text is cut into pieces changes nothing: the joined parts
of a stream are those of the whole text. A whole message is made of the same parts.
"""

from __future__ import annotations

import io
import itertools
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import Enum, auto
from types import MappingProxyType
from typing import Any, NamedTuple

from lightserve.frontend.columns import TextBuffer, json_array, json_object, json_text
from lightserve.frontend.harmony import HarmonyText
from lightserve.frontend.openai.call_scanners import Call, Scanner, State, new_scanner
from lightserve.frontend.openai.thinking import Emit, ThinkText, Until
from lightserve.model_formats import CALL_FORMATS, HARMONY, NONE, REASONING_FORMATS, CallFormat

# ----------------------------------------------------------------------
# Content and tool calls in a text, told apart as it comes, in any format of
# `lightserve/model_formats.py`.
#
#     content  OPENING  before  call  behind  call …  content  OPENING …


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
        """Text before a call that is content if no call follows: blanks, an opening, marks."""
        self._held = ""
        """Text that may be the beginning of a mark."""
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


Delta = dict[str, Any]
"""A `delta` object of OpenAI's chat chunks."""


class ParserOptions(NamedTuple):
    """The parts to look for in an output."""

    reasoning: str = NONE
    """A key of `REASONING_FORMATS`, or none."""
    starts_in_reasoning: bool = False
    """Whether the prompt ended inside of the reasoning."""
    continues: bool = False
    """Whether it ended with some of the text that is to be told apart."""
    tool_format: str = NONE
    """A key of `CALL_FORMATS` (`harmony` with that `reasoning` alone), or none."""
    tool_names: frozenset[str] = frozenset()
    text_arguments: Mapping[tuple[str, str], bool | None] = MappingProxyType({})
    """See `ToolUse.text_arguments`."""
    max_calls: int | None = None
    """Further calls are left out of the answer."""
    num_earlier_calls: int = 0
    """Calls in the messages before the answer."""
    is_constrained: bool = False
    """Whether a grammar writes the answer: blanks with which it begins are its own."""


class OutputParser:
    """The parts of one completion."""

    def __init__(self, options: ParserOptions) -> None:
        has_calls = options.tool_format not in (NONE, HARMONY)
        form = CALL_FORMATS[options.tool_format] if has_calls else None
        self._parts = parts = _Parts(options, form or CALL_FORMATS[HARMONY])
        self._calls: CallsText | None = None
        if form is not None:
            self._calls = CallsText(
                form,
                options.tool_names,
                options.text_arguments,
                content=parts.content,
                call=parts.call,
            )
        after = parts.content if self._calls is None else self._calls.push
        self._text: ThinkText | HarmonyText | None = None
        self._push = after
        if options.reasoning == HARMONY and not options.is_constrained:
            self._text = HarmonyText(
                options.tool_names if options.tool_format == HARMONY else (),
                reasoning=parts.reasoning,
                content=parts.content,
                call=lambda name, arguments: parts.call(Call(name, arguments)),
                is_inside=options.continues,
            )
            self._push = self._text.push
        elif options.reasoning != NONE:
            self._text = ThinkText(
                REASONING_FORMATS[options.reasoning],
                parts.reasoning,
                after,
                is_inside=options.starts_in_reasoning,
                continues=options.continues,
                keeps_blanks=options.is_constrained,
            )
            self._push = self._text.push

    @property
    def num_calls(self) -> int:
        """Calls so far that are part of the answer."""
        return self._parts.num_calls

    def push(self, text: str) -> list[Delta]:
        """Take in text; return what is certain now."""
        self._push(text)
        return self._parts.take()

    def finish(self) -> list[Delta]:
        """Return what was held back."""
        for part in (self._text, self._calls):
            if part is not None:
                part.finish()
        return self._parts.take()


class _Parts:
    """Parts of a text that are certain, until they are taken.

    Whatever tells the text apart calls its methods. Were they the parser's, each parser would be
    part of a cycle, and stay until Python looks for garbage.
    """

    def __init__(self, options: ParserOptions, form: CallFormat) -> None:
        self.num_calls = 0
        self._max_calls = options.max_calls
        self._call_id, self._num_earlier = form.call_id, options.num_earlier_calls
        self._deltas: list[Delta] = []

    def take(self) -> list[Delta]:
        """Return those that have come since the last time."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def content(self, text: str) -> None:
        """Add a piece of the content."""
        self._append("content", text)

    def reasoning(self, text: str) -> None:
        """Add a piece of the reasoning."""
        self._append("reasoning_content", text)

    def _append(self, key: str, text: str) -> None:
        if not text:
            return
        if self._deltas and self._deltas[-1].keys() == {key}:
            self._deltas[-1][key] += text
        else:
            self._deltas.append({key: text})

    def call(self, call: Call) -> None:
        """Add a call, unless there are enough."""
        if self.num_calls == self._max_calls:
            return
        number = self._num_earlier + self.num_calls
        call_id = self._call_id.format(random=uuid.uuid4().hex, name=call.name, number=number)
        head = {"index": self.num_calls, "id": call_id, "type": "function"}
        self._deltas += [
            {"tool_calls": [{**head, "function": {"name": call.name, "arguments": ""}}]},
            {"tool_calls": [{"index": self.num_calls, "function": {"arguments": call.arguments}}]},
        ]
        self.num_calls += 1


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
