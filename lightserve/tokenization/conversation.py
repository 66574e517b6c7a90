"""A conversation, the forms in which chat templates take it, and which of them a template shows.

Templates differ in the form that they take of the same message: one takes a text, another a list
of its parts; one an object of arguments, another their JSON; one shows a call only where the
content is null. `Forms` says which forms a template shows. `find_forms` finds them by rendering
small conversations: each probe has words that no template has; a form is kept if every word comes
out. A template leaves out a part that comes out in no form: a conversation with it cannot be
answered. A probe that the template refuses, or that fails, says nothing: such a conversation is
refused when it comes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

from lightserve.tokenization.template_sandbox import TemplateLimit

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
    parts: tuple[str | None, ...] = ()
    """The texts that the content is made of, and None for each image; none: it is one text."""
    is_null: bool = False
    """Whether there is no content, not even an empty one."""

    def with_insertion(self, text: str, num_chars: int) -> ChatMessage:
        """Return it with a text behind so many characters of the content."""
        content = f"{self.content[:num_chars]}{text}{self.content[num_chars:]}"
        parts = list(self.parts)
        for number, part in enumerate(parts):
            if part is None:
                continue
            if num_chars <= len(part):
                parts[number] = f"{part[:num_chars]}{text}{part[num_chars:]}"
                break
            num_chars -= len(part) + len(JOINT)
        return replace(self, content=content, parts=tuple(parts), is_null=False)


class Ending(Enum):
    """The end of a prompt."""

    ANSWER = "answer"
    """The beginning of an answer of the assistant."""
    MESSAGE = "message"
    """The last message and the template's text behind it."""
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
    """Position at which `ChatTemplate.marked_length` ends."""


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
    """The forms in which a template shows things, and the parts that it shows in no form."""

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
        if None in message.parts or (len(message.parts) > 1 and texts.takes_parts):
            return [_part(text) for text in message.parts]
        return message.content if texts.is_plain else [_part(message.content)]

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments: Any = function["arguments"] or "{}"
        if not self.has_text_arguments:
            # What is no JSON a model once wrote: the template shows it as it is.
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(arguments, parse_float=_finite, parse_constant=_finite)
                if "\\u" in arguments:
                    json.dumps(value, ensure_ascii=False).encode()  # fails on half of a character
                arguments = value
        return {**call, "function": {**function, "arguments": arguments}}


def _finite(text: str) -> float:
    """Return a number that JSON can have again. Raises ValueError: it is too large, or none."""
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is not finite")
    return value


def _part(text: str | None) -> dict[str, Any]:
    return {"type": "image"} if text is None else {"type": "text", "text": text}


def needs_of(conversation: Conversation) -> Iterator[tuple[Need, str]]:
    """Yield the parts of a conversation that templates may leave out, and their places."""
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


# Which forms a template shows.


THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates are told whether the model is to think."""
TOOLS_NAMES = ("tools", "xml_tools")
"""Variables in which templates look for tools: SmolLM3's has a name of its own."""
Render = Callable[[Conversation, Forms], str]
_PLAIN, _PARTS = Texts(), Texts(is_plain=False, takes_parts=True)
_ONE_PART = Texts(is_plain=False)
_SHOWN_AS_OBJECT = re.compile(r"""["']type["']: ?["']text["']""")
"""Parts that a template writes as they are, in place of their text."""

_EARLIER, _ANSWER, _USER = "quvest", "quvers", "quvist"
_SYSTEM, _LATER_SYSTEM, _SAID = "quvomm", "quvolt", "quvond"
_NAME, _KEY, _VALUE = "quvint", "quvirk", "quvild"
_OTHER_NAME, _OTHER_VALUE = "quvunt", "quvuld"
_RESULT, _OTHER_RESULT = "quvelm", "quvelt"
_TOOL, _OTHER_TOOL, _PARAMETER = "quvopt", "quvork", "quvush"
_ARGUMENTS = {_KEY: _VALUE, "flag": True}
_IDS = ("quvcall01", "quvcall02")  # nine characters, as Mistral's templates want them


def _call(number: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": _IDS[number], "type": "function", "function": function}


_ONE_CALL = [_call(0, _NAME, _ARGUMENTS)]
_TWO_CALLS = [*_ONE_CALL, _call(1, _OTHER_NAME, {_KEY: _OTHER_VALUE})]


def _user(text: str) -> ChatMessage:
    return ChatMessage("user", text)


def _assistant(content: str, **others: Any) -> ChatMessage:
    return ChatMessage("assistant", content, others, is_null=not content)


def _result(number: int, text: str) -> ChatMessage:
    return ChatMessage("tool", text, {"tool_call_id": _IDS[number]})


_TURNS = (_user(_EARLIER), _assistant(_ANSWER), _user(_USER))
_CALLED = (_user(_EARLIER), _assistant("", tool_calls=_ONE_CALL), _result(0, _RESULT))


def _tool(name: str) -> dict[str, Any]:
    properties = {_PARAMETER: {"type": "string", "description": "What."}}
    parameters = {"type": "object", "properties": properties, "required": [_PARAMETER]}
    function = {"name": name, "description": "Does it.", "parameters": parameters}
    return {"type": "function", "function": function}


PROBED_TOOL = _tool(_TOOL)


class _Probe(NamedTuple):
    """A conversation, and the words that stand for things in it."""

    words: dict[Need, str]
    messages: Sequence[ChatMessage]
    is_of_two: bool = False
    """Whether there are two tools, where there are any."""


@dataclass(frozen=True)
class _Seen:
    """The output of a template for a probe."""

    text: str
    left_out: frozenset[Need]

    @property
    def is_whole(self) -> bool:
        return not self.left_out


PROBES_S = 5.0
"""Processor seconds for all probes of a template; forms that are unknown by then are not used."""


class _Prober:
    def __init__(self, render: Render, variables: Collection[str], *, has_tools: bool) -> None:
        self._render = render
        self._tools = [PROBED_TOOL, _tool(_OTHER_TOOL)] if has_tools else []
        switches = [name for name in THINKING_SWITCHES if name in variables]
        self._options: list[dict[str, Any]] = [{}]
        self._options += [{name: is_on} for name in switches for is_on in (True, False)]
        self._is_over = False
        """Whether one took too long: others may as well."""
        self._end_s = time.thread_time() + PROBES_S

    def see(self, probe: _Probe, forms: Forms) -> _Seen | None:
        """Return the text of a probe with thinking on and off; None: the template fails on it."""
        self._is_over |= time.thread_time() > self._end_s
        first: _Seen | None = None
        for options in () if self._is_over else self._options:
            tools = (self._tools if probe.is_of_two else self._tools[:1]) or None
            conversation = Conversation(messages=probe.messages, tools=tools, options=options)
            try:
                text = self._render(conversation, forms)
            except TemplateLimit:
                self._is_over = True
                return None
            except Exception:  # a template can raise anything
                continue
            folded = text.casefold()
            missing = frozenset(need for need, word in probe.words.items() if word not in folded)
            left_out = missing | (first.left_out if first is not None else frozenset())
            first = _Seen(text if first is None else first.text, left_out)
        return first

    def best(self, probe: _Probe, choices: Sequence[Forms], *, is_good: _Test) -> Forms | None:
        """Return the first of the forms in which everything comes out as it should."""
        for forms in choices:
            seen = self.see(probe, forms)
            if seen is not None and seen.is_whole and is_good(seen.text):
                return forms
        return None


_Test = Callable[[str], bool]


def find_forms(render: Render, variables: Collection[str], *, has_tools: bool) -> Forms:
    """Return how a template shows conversations, and which parts it leaves out.

    Args:
        render: gives a conversation's text in some forms, and passes errors of templates on.
        variables: those of the template.
        has_tools: whether the conversations have tools.
    """
    prober = _Prober(render, variables, has_tools=has_tools)
    with_tool = _Probe({Need.TOOL: _TOOL}, _TURNS[2:])
    named = [Forms(tools_name=name) for name in TOOLS_NAMES if name in variables and has_tools]
    forms = prober.best(with_tool, named, is_good=lambda _: True) or Forms()
    forms = _find_calls(prober, replace(forms, texts=_find_texts(prober, forms)))
    left_out: set[Need] = set()
    for probe in _probes(has_tools=has_tools):
        seen = prober.see(probe, forms)
        # Where not even the first tool comes out, the second says nothing of its own.
        if seen is not None and (not probe.is_of_two or _TOOL in seen.text.casefold()):
            left_out |= seen.left_out
    return replace(forms, left_out=frozenset(left_out))


def _probes(*, has_tools: bool) -> Iterator[_Probe]:
    """Yield the probes for the forms that are chosen."""
    yield _Probe({Need.USER: _USER}, _TURNS[2:])
    turns = {Need.USER: _USER, Need.EARLIER: _EARLIER, Need.ASSISTANT: _ANSWER}
    yield _Probe(turns, _TURNS)
    system = ChatMessage("system", _SYSTEM)
    yield _Probe({Need.SYSTEM: _SYSTEM}, [system, *_TURNS])
    later = [*_TURNS[:2], ChatMessage("system", _LATER_SYSTEM), _TURNS[2]]
    yield _Probe({Need.LATER_SYSTEM: _LATER_SYSTEM}, [system, *later])
    yield _Probe({Need.LATER_SYSTEM: _SYSTEM}, [system, *later])
    called = {Need.CALL: _NAME, Need.ARGUMENTS: _VALUE, Need.RESULT: _RESULT}
    yield _Probe(called, _CALLED)
    yield _Probe({Need.CALL: _NAME, Need.ARGUMENTS: _VALUE}, [*_CALLED[:2], _user(_USER)])
    yield _Probe(called, [*_CALLED, _assistant(_ANSWER), _user(_USER)])
    beside = [_CALLED[0], _assistant(_SAID, tool_calls=_ONE_CALL), *_CALLED[2:]]
    said = {Need.CONTENT_BESIDE_CALL: _SAID}
    yield _Probe(said | {Need.CALL: _NAME}, beside)
    several = [_CALLED[0], _assistant("", tool_calls=_TWO_CALLS)]
    yield _Probe({Need.CALLS: _OTHER_VALUE}, [*several, _result(0, _RESULT), _result(1, "x")])
    both = [*several, _result(0, _RESULT), _result(1, _OTHER_RESULT)]
    for word in (_RESULT, _OTHER_RESULT):
        yield _Probe({Need.RESULTS: word}, both)
    if has_tools:
        for need, messages in ((Need.TOOL, _TURNS[2:]), (Need.SYSTEM_TOOL, [system, _TURNS[2]])):
            yield _Probe({need: _TOOL}, messages)
            yield _Probe({Need.TOOLS: _OTHER_TOOL}, messages, is_of_two=True)


def _find_texts(prober: _Prober, forms: Forms) -> dict[str, Texts]:
    """Return the forms of the contents of all roles."""
    words = {Need.USER: _USER, Need.EARLIER: _EARLIER, Need.ASSISTANT: _ANSWER}
    texts = _fitting(prober, forms, ("user", "assistant"), _Probe(words, _TURNS))
    user = _Probe({Need.USER: _USER}, _TURNS[2:])
    texts = texts or _fitting(prober, forms, ("user",), user)
    system = _Probe({Need.SYSTEM: _SYSTEM}, [ChatMessage("system", _SYSTEM), *_TURNS[2:]])
    texts |= _fitting(prober, replace(forms, texts=texts), ("system",), system)
    result = _Probe({Need.RESULT: _RESULT}, _CALLED)
    texts |= _fitting(prober, replace(forms, texts=texts), ("tool",), result)
    known = replace(forms, texts=texts)
    return {role: _with_parts(prober, known, role) for role in _ROLES}


_ROLES = ("user", "assistant", "system", "tool")


def _fitting(
    prober: _Prober, forms: Forms, roles: Sequence[str], probe: _Probe
) -> dict[str, Texts]:
    """Return the forms of some roles' contents in which a probe comes out, {} if in none."""
    choices = [
        replace(forms, texts={**forms.texts, **dict(zip(roles, each, strict=True))}, empty=(empty,))
        for empty in Empty
        for each in itertools.product((_PLAIN, _PARTS, _ONE_PART), repeat=len(roles))
    ]
    best = prober.best(probe, choices, is_good=lambda text: not _SHOWN_AS_OBJECT.search(text))
    return {} if best is None else {role: best.texts[role] for role in roles}


def _with_parts(prober: _Prober, forms: Forms, role: str) -> Texts:
    """Return the form of a role's contents, with whether several parts are shown as they are."""
    own = forms.texts.get(role, _PLAIN)
    if not own.is_plain and not own.takes_parts:
        return own
    place = {"user": 2, "assistant": 1, "system": 0, "tool": 2}[role]
    system = ChatMessage("system", _SYSTEM)
    messages = {"system": (system, *_TURNS[2:]), "tool": _CALLED}.get(role, _TURNS)
    word = messages[place].content

    def shown(content: str, form: Texts, *parts: str) -> str | None:
        probed = [*messages]
        probed[place] = replace(probed[place], content=content, parts=parts)
        tried = replace(forms, texts={**forms.texts, role: form}, empty=tuple(Empty))
        seen = prober.see(_Probe({}, probed), tried)
        return None if seen is None else seen.text

    several = shown(f"{word}\n{_SAID}", own._replace(takes_parts=True), word, _SAID)
    is_shown = several is not None and word in several.casefold() and _SAID in several.casefold()
    if own.is_plain:
        # A list that is shown as its only text would be is not shown as an object.
        plain = shown(word, own)
        is_shown = is_shown and plain is not None and plain == shown(word, _PARTS)
    return own._replace(takes_parts=is_shown)


def _find_calls(prober: _Prober, forms: Forms) -> Forms:
    """Return the forms with the forms in which calls are shown."""
    words = {Need.CALL: _NAME, Need.ARGUMENTS: _VALUE}
    probe = _Probe(words, _CALLED)
    written = json.dumps(json.dumps(_ARGUMENTS))[1:-1]
    as_python = repr(_ARGUMENTS)
    choices = [
        replace(forms, empty=(empty,), has_text_arguments=has_text)
        for has_text in (False, True)
        for empty in Empty
    ]

    def is_good(text: str) -> bool:
        return as_python not in text and written not in text

    best = prober.best(probe, choices, is_good=is_good)
    if best is None:
        best = prober.best(probe, choices, is_good=lambda _: True) or forms
    plain = prober.see(probe, replace(best, empty=(Empty.TEXT,)))
    num_none = plain.text.count("None") if plain is not None else 0
    empty = [
        form
        for form in Empty
        if prober.best(
            probe,
            [replace(best, empty=(form,))],
            is_good=lambda text: is_good(text) and text.count("None") <= num_none,
        )
    ]
    best = replace(best, empty=tuple(empty) or best.empty)
    return _find_split(prober, best)


def _find_split(prober: _Prober, forms: Forms) -> Forms:
    """Return the forms, with calls apart from content where only that shows both."""
    words = {Need.CALL: _NAME, Need.ARGUMENTS: _VALUE, Need.CONTENT_BESIDE_CALL: _SAID}
    beside = [_CALLED[0], _assistant(_SAID, tool_calls=_ONE_CALL), *_CALLED[2:]]
    choices = [forms, replace(forms, splits_calls=True)]
    found = prober.best(_Probe(words, beside), choices, is_good=lambda _: True)
    return forms if found is None else found
