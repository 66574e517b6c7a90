"""The body of /v1/responses, and the chat completion that it becomes.

Items become messages: reasoning, texts and calls of the assistant that follow each other are one.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec.json import decode, encode
from pydantic import BeforeValidator, Field, Tag, TypeAdapter, model_validator

from lightserve.batches.records import RESPONSES
from lightserve.errors import InvalidRequest
from lightserve.frontend.json_body import (
    AN_OBJECT,
    BY_KIND,
    OTHERWISE,
    StrictModel,
    by_type,
    memory_of,
    only_type,
    show,
    type_tag,
    validated,
)
from lightserve.frontend.openai.chat import MAX_MESSAGES, ChatRequest, Effort
from lightserve.frontend.openai.fields import NoEffect, NoEffectModel, RequestFields, StoredId
from lightserve.frontend.openai.messages import names_of_pictures
from lightserve.frontend.openai.tools import FunctionName, ToolFunction
from lightserve.frontend.request_options import MaxTokens
from lightserve.frontend.structured_output import Schema

CHAT_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "tool_choice.function.name": "tool_choice.name",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
    "truncate_prompt_tokens": "truncation",
}
"""Names that errors use for fields of a chat completion."""

Id = Annotated[str, Field(min_length=1, max_length=256)]
Status = Literal["in_progress", "completed", "incomplete"]


class ItemFields(NoEffectModel):
    """Fields of an answer's items, as clients send them back; they say nothing to the model."""

    id: Id | None = None
    status: Status | None = None


class InputTextPart(NoEffectModel):
    """A text in an item."""

    no_effect: ClassVar[NoEffect] = {"annotations": ([],), "logprobs": ([],), "parsed": None}

    type: Literal["input_text", "output_text"]
    text: str


class InputImagePart(NoEffectModel):
    """A picture in a message of the user."""

    no_effect: ClassVar[NoEffect] = {"file_id": ()}

    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "low", "high"] | None = None


class ReasoningPart(StrictModel):
    """A text in an item of reasoning."""

    type: Literal["reasoning_text"]
    text: str


_TEXT_TYPES = ("input_text", "output_text")


def _parts_of(content: Any) -> Any:
    """Return a text as the only part of a list."""
    if isinstance(content, str):
        return [{"type": "input_text", "text": content}]
    if not isinstance(content, list):
        raise ValueError(f"must be a string or a list of texts, got {show(content)}")
    for part in content:
        if isinstance(part, dict) and (given := part.get("type")) not in _TEXT_TYPES:
            known = " and ".join(_TEXT_TYPES)
            raise ValueError(f"must have only parts of the types {known}, got {show(given)}")
    return content


Texts = Annotated[
    list[InputTextPart],
    BeforeValidator(_parts_of, json_schema_input_type=str | list[InputTextPart]),
]


def _message_parts(content: Any) -> Any:
    """Return a text as the only part of a list, in which there may be pictures."""
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else content


MessageParts = Annotated[
    list[
        Annotated[
            Annotated[InputTextPart, Tag(type_tag("input_text"))]
            | Annotated[InputTextPart, Tag(type_tag("output_text"))]
            | Annotated[InputImagePart, Tag(type_tag("input_image"))],
            by_type([*_TEXT_TYPES, "input_image"]),
        ]
    ],
    BeforeValidator(
        _message_parts, json_schema_input_type=str | list[InputTextPart | InputImagePart]
    ),
]


class MessageItem(ItemFields):
    """A message."""

    no_effect: ClassVar[NoEffect] = {"phase": ()}

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[MessageParts, Field(min_length=1)]

    @model_validator(mode="after")
    def _has_texts(self) -> MessageItem:
        if self.role != "user" and any(part.type == "input_image" for part in self.content):
            raise ValueError("may have input_image only if its role is user")
        return self


class CallItem(ItemFields):
    """A call by the assistant."""

    no_effect: ClassVar[NoEffect] = {
        "namespace": (),
        "caller": ({"type": "direct"},),
        "async": (False,),
        "parsed_arguments": None,
    }

    type: Literal["function_call"]
    call_id: Id
    name: FunctionName
    arguments: str


class OutputItem(ItemFields):
    """The result of a call."""

    no_effect: ClassVar[NoEffect] = {"namespace": (), "caller": ({"type": "direct"},)}

    type: Literal["function_call_output"]
    call_id: Id
    output: Texts


class ReasoningItem(ItemFields):
    """Earlier reasoning of the assistant."""

    no_effect: ClassVar[NoEffect] = {"summary": ([],), "encrypted_content": ()}

    type: Literal["reasoning"]
    content: list[ReasoningPart] | None = None


Item = Annotated[
    Annotated[MessageItem, Tag(type_tag("message"))]
    | Annotated[CallItem, Tag(type_tag("function_call"))]
    | Annotated[OutputItem, Tag(type_tag("function_call_output"))]
    | Annotated[ReasoningItem, Tag(type_tag("reasoning"))],
    by_type(["message", "function_call", "function_call_output", "reasoning"], default="message"),
]


def _items_of(value: Any) -> Any:
    """Return a text as the only item of a list: the user's message."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise ValueError(f"must be a string or a list of items, got {show(value)}")
    return value


class FunctionTool(ToolFunction, NoEffectModel):
    """`tools[]`."""

    no_effect: ClassVar[NoEffect] = {
        "defer_loading": (False,),
        "allowed_callers": (["direct"],),
        "output_schema": (),
    }
    _is_function = only_type("function")

    type: Literal["function"]


class NamedFunctionTool(StrictModel):
    """`tool_choice` as an object."""

    _is_function = only_type("function")

    type: Literal["function"]
    name: FunctionName


class TextFormat(StrictModel):
    """`text.format`."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    description: Annotated[str, Field(max_length=4096)] | None = None
    schema_: Annotated[Schema | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextFields(StrictModel):
    """`text`."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningFields(NoEffectModel):
    """`reasoning`."""

    no_effect: ClassVar[NoEffect] = {"summary": (), "generate_summary": (), "context": ("auto",)}

    effort: Effort | None = None


class StreamFields(StrictModel):
    """`stream_options`."""

    include_obfuscation: Literal[False] | None = None
    """Events are never padded."""


class ResponsesRequest(RequestFields):
    """The body; null is the same as absent."""

    no_effect: ClassVar[NoEffect] = {
        # Reasoning always comes as it is: there is none that is encrypted.
        "include": ([], ["reasoning.encrypted_content"]),
        "conversation": (),
        "prompt": (),
        "max_tool_calls": (),
        "top_logprobs": (0,),
    }

    input: Annotated[
        list[Item],
        Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
        BeforeValidator(_items_of, json_schema_input_type=str | list[Item]),
    ]
    instructions: str | None = None
    max_output_tokens: MaxTokens | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True)] | None = None
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag(OTHERWISE)]
            | Annotated[NamedFunctionTool, Tag(AN_OBJECT)],
            BY_KIND,
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: TextFields | None = None
    reasoning: ReasoningFields | None = None
    truncation: Literal["auto", "disabled"] | None = None
    stream_options: StreamFields | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: StoredId | None = None

    def check(self, *, keeps: bool, has_store: bool) -> None:
        """Check what types cannot: whether the route `keeps` answers, and has any that were kept.

        Raises:
            InvalidRequest: something is wrong.
        """
        for name, is_available in (
            ("store", keeps),
            ("background", keeps),
            ("previous_response_id", has_store),
        ):
            if is_available or getattr(self, name) in (None, False):
                continue
            why = "a line of a batch" if has_store else "this server keeps no responses"
            raise InvalidRequest(
                f"{name} is not available: {why}; send {name} as false",
                param=name,
                code="unsupported_value",
            )
        if self.background:
            self._check_background()
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
        asked = self._format
        if asked is not None and (asked.type == "json_schema") != (asked.schema_ is not None):
            raise InvalidRequest(
                "text.format.schema must be given with the type json_schema, and no other",
                param="text.format.schema",
            )

    def _check_background(self) -> None:
        """Refuse what a request that no client waits for cannot have. Raises InvalidRequest."""
        if self.stream:
            raise InvalidRequest("stream must be false with background, got true", param="stream")
        if self.store is False:
            raise InvalidRequest("store must be true with background, got false", param="store")
        if self.slo is not None:
            raise InvalidRequest("slo is not supported with background", param="slo")
        if self.service_tier not in (None, "auto", "flex"):
            raise InvalidRequest(
                "service_tier must be flex or auto with background, which is best-effort, got"
                f" {self.service_tier}",
                param="service_tier",
            )

    def as_line(self, custom_id: str) -> bytes:
        """Return a request in the background as the line of a batch."""
        body = self.model_dump(mode="json", by_alias=True, exclude={"input"})
        body |= {"background": False, "store": False, "service_tier": "flex"}
        body["input"] = self.own_items()
        line = {"custom_id": custom_id, "method": "POST", "url": RESPONSES, "body": body}
        return encode(line)

    def continuing(self, before: Sequence[bytes]) -> tuple[ResponsesRequest, int]:
        """Return the request with JSON lists of items before its own, and their memory in bytes."""
        values = [item for each in before for item in decode(each)]
        items = _ITEMS.validate_python(values)
        return self.model_copy(update={"input": [*items, *self.input]}), memory_of(values)

    def own_items(self) -> list[dict[str, Any]]:
        """Return the items of the input as they are kept, each with an id."""
        return [_kept(item) for item in self.input]

    @property
    def _format(self) -> TextFormat | None:
        return None if self.text is None else self.text.format

    def as_chat(self) -> ChatRequest:
        """Return the chat completion that it is. Raises InvalidRequest."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in RequestFields.model_fields}
        fields |= {
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "slo": None if self.slo is None else self.slo.model_dump(),
            "reasoning_effort": self.reasoning and self.reasoning.effort,
            "verbosity": self.text and self.text.verbosity,
            "response_format": self._response_format(),
            "truncate_prompt_tokens": -1 if self.truncation == "auto" else None,
        }
        if self.tools:
            functions = [
                tool.model_dump(exclude={"type"}, exclude_none=True) for tool in self.tools
            ]
            fields["tools"] = [{"type": "function", "function": f} for f in functions]
            fields["parallel_tool_calls"] = self.parallel_tool_calls
        choice = self.tool_choice
        if isinstance(choice, NamedFunctionTool):
            fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        else:
            fields["tool_choice"] = choice
        return validated(fields, ChatRequest)

    def names_in(self, chat: ChatRequest, num_before: int) -> dict[str, str]:
        """Return the names that errors use for fields of that chat completion.

        `num_before`: items of the input that are those of earlier responses.
        """
        places = [
            f"input[{item_number}].content[{number}].image_url"
            if item_number >= 0
            else "previous_response_id"
            for item_number, item in enumerate(self.input, start=-num_before)
            if isinstance(item, MessageItem)
            for number, part in enumerate(item.content)
            if isinstance(part, InputImagePart)
        ]
        return CHAT_NAMES | names_of_pictures(chat.messages, places)

    def _response_format(self) -> dict[str, Any] | None:
        asked = self._format
        if asked is None or asked.type != "json_schema":
            return None if asked is None else {"type": asked.type}
        schema = {"name": asked.name or "output", "schema": asked.schema_}
        return {"type": "json_schema", "json_schema": schema}

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        for is_own, group in itertools.groupby(self.input, key=_is_of_assistant):
            if is_own:
                messages.append(_assistant_message(list(group)))
            else:
                messages.extend(map(_message, group))
        return messages


_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}


def _kept(item: Any) -> dict[str, Any]:
    kind = item.type or "message"
    fresh = {"type": kind, "id": f"{_PREFIXES[kind]}_{uuid.uuid4().hex}", "status": "completed"}
    fields: dict[str, Any] = fresh | item.model_dump(exclude_none=True)
    return fields


def _is_of_assistant(item: Any) -> bool:
    return isinstance(item, CallItem | ReasoningItem) or getattr(item, "role", "") == "assistant"


def _text(parts: Sequence[InputTextPart | ReasoningPart]) -> str:
    return "\n".join(part.text for part in parts)


def _message(item: Any) -> dict[str, Any]:
    if isinstance(item, OutputItem):
        return {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
    return {"role": item.role, "content": _content(item.content)}


def _content(parts: Sequence[Any]) -> str | list[dict[str, Any]]:
    """Return a message's content: a text, or a list of its parts where there are pictures."""
    if not any(isinstance(part, InputImagePart) for part in parts):
        return _text(parts)
    return [
        {"type": "image_url", "image_url": {"url": part.image_url, "detail": part.detail}}
        if isinstance(part, InputImagePart)
        else {"type": "text", "text": part.text}
        for part in parts
    ]


def _assistant_message(items: Sequence[Any]) -> dict[str, Any]:
    """Return the one message of what the assistant thought, said and called."""
    texts = [
        part
        for item in items
        if isinstance(item, MessageItem)
        for part in item.content
        if isinstance(part, InputTextPart)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": _text(texts)}
    thoughts = [
        part for item in items if isinstance(item, ReasoningItem) for part in item.content or ()
    ]
    if thoughts:
        message["reasoning"] = _text(thoughts)
    calls = [item for item in items if isinstance(item, CallItem)]
    if calls:
        message["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ]
    return message
