"""A conversation, and the forms in which chat templates take what it has.

Templates differ in what they make of the same message: one takes a text, another a list of its
parts; one an object of arguments, another their JSON; one shows a call only where the content is
null. `Forms` says which of these a template shows, as `template_probes` has found.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

JOINT = "\n"
"""Between the parts of a content where it is one text."""


@dataclass(frozen=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str
    others: dict[str, Any] = field(default_factory=dict)
    """Further fields for templates: name, tool_calls, tool_call_id, reasoning. Arguments of calls
    are JSON."""
    parts: tuple[str, ...] = ()
    """The texts of which the content is made; none: it is one text."""
    is_null: bool = False
    """Whether there is no content, not even an empty one."""

    def with_insertion(self, text: str, num_chars: int) -> ChatMessage:
        """Return it with a text behind so many characters of the content."""
        content = f"{self.content[:num_chars]}{text}{self.content[num_chars:]}"
        parts = list(self.parts)
        for number, part in enumerate(parts):
            if num_chars <= len(part):
                parts[number] = f"{part[:num_chars]}{text}{part[num_chars:]}"
                break
            num_chars -= len(part) + len(JOINT)
        return replace(self, content=content, parts=tuple(parts), is_null=False)


class Ending(Enum):
    """The end of a prompt."""

    ANSWER = "answer"
    """What begins an answer of the assistant."""
    MESSAGE = "message"
    """The last message and what the template puts behind it."""
    OPEN = "open"
    """The last message alone, as far as it goes: the output continues it."""


class Place(NamedTuple):
    """A place in the messages: behind so many characters of one's content."""

    message: int
    num_chars: int


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """All that a prompt is made of."""

    messages: Sequence[ChatMessage]
    tools: Sequence[dict[str, Any]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Values of `ChatTemplate.option_names`."""
    ending: Ending = Ending.ANSWER
    mark: Place | None = None
    """Where `ChatTemplate.marked_length` ends."""


class Need(Enum):
    """A thing of conversations that a template may leave out."""

    USER = "messages of the user"
    EARLIER = "messages of the user before the last one"
    ASSISTANT = "messages of the assistant"
    SYSTEM = "a message of the system"
    LATER_SYSTEM = "messages of the system behind others"
    RESULT = "results of tools"
    RESULTS = "several results of tools in a row"
    CALL = "tool_calls"
    CALLS = "several tool_calls in one message"
    ARGUMENTS = "the arguments of tool_calls"
    CONTENT_BESIDE_CALL = "content beside tool_calls"
    TOOL = "tools"
    """Without a message of the system."""
    SYSTEM_TOOL = "tools beside a message of the system"
    TOOLS = "more than one tool"


class Empty(Enum):
    """A form of no content."""

    TEXT = "an empty text"
    ABSENT = "no field"
    NULL = "null"


class Texts(NamedTuple):
    """The forms of contents that a role's messages have."""

    is_plain: bool = True
    """A text; otherwise it is a list of one part."""
    takes_parts: bool = False
    """Whether a list of several parts is shown as it is."""


@dataclass(frozen=True, kw_only=True)
class Forms:
    """How a template shows things, and what it leaves out in every form."""

    texts: Mapping[str, Texts] = field(default_factory=dict)
    """By role."""
    empty: tuple[Empty, ...] = (Empty.TEXT,)
    """Contents beside which calls are shown; at least one."""
    has_text_arguments: bool = False
    """Whether arguments are JSON and no object."""
    splits_calls: bool = False
    """Whether a message with content and calls becomes one with each."""
    tools_name: str = "tools"
    """The variable that holds the tools."""
    left_out: frozenset[Need] = frozenset()

    def rendered(self, messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
        """Return messages as the template takes them."""
        return [self._fields(one) for message in messages for one in self._split(message)]

    def _split(self, message: ChatMessage) -> Iterator[ChatMessage]:
        if not self.splits_calls or not message.content or "tool_calls" not in message.others:
            yield message
            return
        others = {name: value for name, value in message.others.items() if name != "tool_calls"}
        yield replace(message, others=others)
        calls = {"tool_calls": message.others["tool_calls"]}
        yield ChatMessage(message.role, "", calls, is_null=True)

    def _fields(self, message: ChatMessage) -> dict[str, Any]:
        fields = {"role": message.role, "content": self._content(message), **message.others}
        if calls := message.others.get("tool_calls"):
            fields["tool_calls"] = [self._call(call) for call in calls]
            if not message.content:
                empty = self._empty(message)
                fields["content"] = None if empty is Empty.NULL else fields["content"]
                if empty is Empty.ABSENT:
                    del fields["content"]
        return fields

    def _empty(self, message: ChatMessage) -> Empty:
        order = (Empty.ABSENT, Empty.NULL, Empty.TEXT) if message.is_null else tuple(Empty)
        return next(form for form in order if form in self.empty)

    def _content(self, message: ChatMessage) -> Any:
        texts = self.texts.get(message.role, Texts())
        if len(message.parts) > 1 and texts.takes_parts:
            return [_part(text) for text in message.parts]
        return message.content if texts.is_plain else [_part(message.content)]

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments: Any = function["arguments"] or "{}"
        if not self.has_text_arguments:
            # What is no JSON a model once wrote: the template shows it as it is.
            with contextlib.suppress(ValueError, RecursionError):
                arguments = json.loads(arguments, parse_float=_finite, parse_constant=_finite)
        return {**call, "function": {**function, "arguments": arguments}}


def _finite(text: str) -> float:
    """Return a number that JSON can have again. Raises ValueError: it is too large, or none."""
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is not finite")
    return value


def _part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def needs_of(conversation: Conversation) -> Iterator[tuple[Need, str]]:
    """Yield all that a conversation has of what templates may leave out, and where it is."""
    messages = conversation.messages
    roles = [message.role for message in messages]
    last_user = max((n for n, role in enumerate(roles) if role == "user"), default=-1)
    for number, message in enumerate(messages):
        for need in _needs_of(message, number, roles, last_user):
            yield need, f"messages[{number}]"
    first = Need.SYSTEM_TOOL if roles[:1] == ["system"] else Need.TOOL
    for number in range(len(conversation.tools or ())):
        yield (Need.TOOLS if number else first), f"tools[{number}]"


def _needs_of(
    message: ChatMessage, number: int, roles: Sequence[str], last_user: int
) -> Iterator[Need]:
    has_text = bool(message.content.strip())
    match message.role:
        case "user" if has_text:
            yield Need.USER if number == last_user else Need.EARLIER
        case "assistant" if has_text:
            yield Need.ASSISTANT
        case "system" if has_text:
            yield Need.LATER_SYSTEM if number else Need.SYSTEM
        case "tool" if has_text:
            yield Need.RESULT
            if number and roles[number - 1] == "tool":
                yield Need.RESULTS
    if calls := message.others.get("tool_calls"):
        yield Need.CALL
        if len(calls) > 1:
            yield Need.CALLS
        if any(call["function"]["arguments"].strip(" {}\n") for call in calls):
            yield Need.ARGUMENTS
        if has_text:
            yield Need.CONTENT_BESIDE_CALL
