"""From a model's text to the parts of a chat message: reasoning, content and tool calls.

Each part is told as it comes. How the text is cut into pieces changes nothing: the joined parts
of a stream are those of the whole text. A whole message is made of the same parts.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from lightserve.frontend.columns import TextBuffer, json_array, json_object, json_text
from lightserve.frontend.harmony import HarmonyText
from lightserve.frontend.openai.call_scanners import Call
from lightserve.frontend.openai.call_text import CallsText
from lightserve.frontend.openai.thinking import ThinkText
from lightserve.model_formats import CALL_FORMATS, HARMONY, NONE, REASONING_FORMATS

Delta = dict[str, Any]
"""A `delta` object of OpenAI's chat chunks."""


class ParserOptions(NamedTuple):
    """What to look for in an output."""

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
    is_constrained: bool = False
    """Whether a grammar writes the answer: blanks with which it begins are its own."""


class OutputParser:
    """The parts of one completion."""

    def __init__(self, options: ParserOptions) -> None:
        has_calls = options.tool_format not in (NONE, HARMONY)
        form = CALL_FORMATS[options.tool_format] if has_calls else None
        self._parts = parts = _Parts(
            options.max_calls, has_short_ids=form is not None and form.short_ids
        )
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

    def __init__(self, max_calls: int | None, *, has_short_ids: bool) -> None:
        self.num_calls = 0
        self._max_calls = max_calls
        self._has_short_ids = has_short_ids
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
        number = uuid.uuid4().hex
        call_id = number[:9] if self._has_short_ids else f"call_{number[:24]}"
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
