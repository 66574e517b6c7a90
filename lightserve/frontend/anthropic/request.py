"""The body of /v1/messages, and the chat completion that it becomes.

Turns of blocks become messages: one of the assistant for all its consecutive turns, one of a tool
for each result, one of the user for the text between them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, Tag
from starlette.datastructures import Headers

from lightserve.errors import InvalidRequest
from lightserve.frontend.json_body import (
    Integer,
    StrictModel,
    by_type,
    only_type,
    show,
    type_tag,
    validated,
)
from lightserve.frontend.openai.chat import MAX_MESSAGES, ChatRequest, Effort
from lightserve.frontend.openai.fields import Key, NoEffect, NoEffectModel
from lightserve.frontend.openai.messages import CacheControl, names_of_pictures
from lightserve.frontend.openai.tools import FunctionName
from lightserve.frontend.request_options import (
    MAX_STOP_STRINGS,
    MaxTokens,
    Priority,
    Seconds,
    SLOFields,
    StopString,
    given_sampling,
    sampling_model,
)
from lightserve.frontend.service import Service
from lightserve.frontend.structured_output import Schema
from lightserve.model_formats import NONE
from lightserve.tokenization.conversation import THINKING_SWITCHES
from lightserve.types import GivenBy

VERSION_HEADER = "anthropic-version"
VERSIONS = ("2023-06-01", "2026-10-21")
"""Answers are the same in both; what the later one forbids for Claude's models is taken in both."""
CHAT_NAMES = {
    "messages": "messages",  # not which of them: results are messages of their own
    "tool_choice.function.name": "tool_choice.name",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "response_format": "output_config.format",
    "response_format.json_schema.schema": "output_config.format.schema",
}
"""Names that errors use for fields of a chat completion."""
ERROR_PREFIX = "Error: "
"""In front of a tool's result that is an error: chat templates know no other way to say so."""

Id = Annotated[str, Field(min_length=1, max_length=256)]


class TextBlock(NoEffectModel):
    """A piece of text."""

    no_effect: ClassVar[NoEffect] = {"citations": ([],), "parsed_output": None}

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class Base64Source(StrictModel):
    """`source` of an image: a file in base64."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str

    @property
    def address(self) -> str:
        """The picture as a data URL."""
        return f"data:{self.media_type};base64,{self.data}"


class URLSource(StrictModel):
    """`source` of an image: where it is."""

    type: Literal["url"]
    url: str

    @property
    def address(self) -> str:
        """The URL."""
        return self.url


class ImageBlock(StrictModel):
    """A picture."""

    type: Literal["image"]
    source: Annotated[
        Annotated[Base64Source, Tag(type_tag("base64"))]
        | Annotated[URLSource, Tag(type_tag("url"))],
        by_type(["base64", "url"]),
    ]
    cache_control: CacheControl | None = None


class ThinkingBlock(NoEffectModel):
    """Earlier reasoning of the assistant; its signature is that of this server's answers."""

    no_effect: ClassVar[NoEffect] = {"signature": ("",)}

    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(NoEffectModel):
    """A call by the assistant."""

    no_effect: ClassVar[NoEffect] = {"caller": ({"type": "direct"},), "toolset_name": ()}

    type: Literal["tool_use"]
    id: Id
    name: FunctionName
    input: dict[str, Any]
    cache_control: CacheControl | None = None


def _blocks_of(content: Any) -> Any:
    """Return a text as the only block of a list."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise ValueError(f"must be a string or a list of blocks, got {show(content)}")
    return content


def _texts_of(content: Any) -> Any:
    """Return a content that may have text alone as a list of blocks."""
    for block in (blocks := _blocks_of(content)):
        if isinstance(block, dict) and (given := block.get("type")) != "text":
            raise ValueError(f"must have only blocks of the type text, got {show(given)}")
    return blocks


Texts = Annotated[
    list[TextBlock], BeforeValidator(_texts_of, json_schema_input_type=str | list[TextBlock])
]


class ToolResultBlock(NoEffectModel):
    """The result of a call."""

    no_effect: ClassVar[NoEffect] = {"toolset_name": ()}

    type: Literal["tool_result"]
    tool_use_id: Id
    content: Texts | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


_Text = Annotated[TextBlock, Tag(type_tag("text"))]
UserBlock = Annotated[
    _Text
    | Annotated[ImageBlock, Tag(type_tag("image"))]
    | Annotated[ToolResultBlock, Tag(type_tag("tool_result"))],
    by_type(["text", "image", "tool_result"]),
]
AssistantBlock = Annotated[
    _Text
    | Annotated[ThinkingBlock, Tag(type_tag("thinking"))]
    | Annotated[ToolUseBlock, Tag(type_tag("tool_use"))],
    by_type(["text", "thinking", "tool_use"]),
]


class UserTurn(StrictModel):
    """`messages[]` of the user."""

    role: Literal["user"]
    content: Annotated[
        list[UserBlock],
        Field(min_length=1),
        BeforeValidator(_blocks_of, json_schema_input_type=str | list[UserBlock]),
    ]


class AssistantTurn(StrictModel):
    """`messages[]` of the assistant."""

    role: Literal["assistant"]
    content: Annotated[
        list[AssistantBlock],
        Field(min_length=1),
        BeforeValidator(_blocks_of, json_schema_input_type=str | list[AssistantBlock]),
    ]


class SystemTurn(StrictModel):
    """`messages[]` of the system, in the middle of a conversation."""

    role: Literal["system"]
    content: Annotated[Texts, Field(min_length=1)]


Turn = Annotated[
    Annotated[UserTurn, Tag(type_tag("user"))]
    | Annotated[AssistantTurn, Tag(type_tag("assistant"))]
    | Annotated[SystemTurn, Tag(type_tag("system"))],
    by_type(["user", "assistant", "system"], field="role"),
]


class ToolFields(NoEffectModel):
    """`tools[]`: a tool that the client runs."""

    no_effect: ClassVar[NoEffect] = {
        "defer_loading": (False,),
        "eager_input_streaming": (True,),  # inputs always come as the model writes them
        "allowed_callers": (["direct"],),
        "input_examples": ([],),
    }

    _is_custom = only_type("custom", None)

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None

    def as_chat(self) -> dict[str, Any]:
        """Return it as chat completions have it."""
        function = {"name": self.name, "parameters": self.input_schema}
        for name in ("description", "strict"):
            if (value := getattr(self, name)) is not None:
                function[name] = value
        return {"type": "function", "function": function}


class ToolChoiceFields(StrictModel):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None

    def as_chat(self) -> dict[str, Any]:
        """Return the fields of a chat completion that say the same."""
        choice: Any = {"any": "required"}.get(self.type, self.type)
        if self.type == "tool":
            choice = {"type": "function", "function": {"name": self.name}}
        fields = {"tool_choice": choice}
        if self.disable_parallel_tool_use is not None:
            fields["parallel_tool_calls"] = not self.disable_parallel_tool_use
        return fields


class MetadataFields(StrictModel):
    """`metadata`."""

    user_id: Key | None = None


class ThinkingFields(NoEffectModel):
    """`thinking`: whether the model thinks, where its template can be told, and how much."""

    no_effect: ClassVar[NoEffect] = {"display": ("summarized",)}

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[Integer, Field(ge=1)] | None = None


class FormatFields(StrictModel):
    """`output_config.format`."""

    type: Literal["json_schema"]
    schema_: Annotated[Schema, Field(alias="schema")]


class OutputFields(StrictModel):
    """`output_config`."""

    effort: Effort | None = None
    format: FormatFields | None = None


class CountTokensRequest(StrictModel):
    """The body of /v1/messages/count_tokens: what the prompt is made of."""

    model: str
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: Texts | None = None
    tools: Annotated[list[ToolFields], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoiceFields | None = None
    thinking: ThinkingFields | None = None
    output_config: OutputFields | None = None
    cache_control: CacheControl | None = None

    def check(self) -> None:
        """Check what types cannot. Raises InvalidRequest."""
        choice = self.tool_choice
        if choice is not None and (choice.type == "tool") != (choice.name is not None):
            raise InvalidRequest(
                "tool_choice.name must be given with the type tool, and no other",
                param="tool_choice.name",
            )
        if choice is not None and choice.type == "none" and choice.disable_parallel_tool_use:
            raise InvalidRequest(
                "tool_choice.disable_parallel_tool_use cannot be combined with the type none",
                param="tool_choice.disable_parallel_tool_use",
            )
        if choice is not None and choice.type != "none" and not self.tools:
            raise InvalidRequest("tool_choice needs tools", param="tool_choice")
        thinking = self.thinking
        if thinking and (thinking.type == "enabled") != (thinking.budget_tokens is not None):
            raise InvalidRequest(
                "thinking.budget_tokens must be given with the type enabled, and no other",
                param="thinking.budget_tokens",
            )
        last = self.messages[-1]
        if last.role == "assistant" and not all(block.type == "text" for block in last.content):
            raise InvalidRequest(
                "messages must end with a turn of the user, or with one of the assistant that has"
                " only text, which the answer continues",
                param="messages",
            )

    def as_chat(self, service: Service) -> ChatRequest:
        """Return the chat completion that it is. Raises InvalidRequest."""
        return validated(self._chat_fields(service), ChatRequest)

    def names_in(self, chat: ChatRequest) -> dict[str, str]:
        """Return the names that errors use for fields of that chat completion."""
        places = [
            f"messages[{turn_number}].content[{number}].source"
            for turn_number, turn in enumerate(self.messages)
            for number, block in enumerate(turn.content)
            if isinstance(block, ImageBlock)
        ]
        return CHAT_NAMES | names_of_pictures(chat.messages, places)

    def _chat_fields(self, service: Service) -> dict[str, Any]:
        fields: dict[str, Any] = {"model": self.model, "messages": self._chat_messages()}
        if self.messages[-1].role == "assistant":
            fields["continue_final_message"] = True
        if self.tools:
            fields["tools"] = [tool.as_chat() for tool in self.tools]
            fields |= {} if self.tool_choice is None else self.tool_choice.as_chat()
        if self.thinking is not None:
            fields |= self._thinking_options(self.thinking, service)
        output = self.output_config or OutputFields()
        if output.effort is not None:
            fields["reasoning_effort"] = output.effort
        if output.format is not None:
            schema = {"name": "output", "schema": output.format.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return fields

    def _thinking_options(self, thinking: ThinkingFields, service: Service) -> dict[str, Any]:
        """Return what tells the template whether the model is to think. Raises InvalidRequest."""
        is_on = thinking.type != "disabled"
        budget = {"thinking_token_budget": thinking.budget_tokens}
        for switch in THINKING_SWITCHES:
            if switch in service.encoder.template.option_names:
                return {"chat_template_kwargs": {switch: is_on}, **budget}
        # Adaptive: the model thinks as much as it does by itself.
        if not is_on and service.formats.reasoning != NONE:
            raise InvalidRequest(
                "thinking.type cannot be disabled: the model's chat template has no"
                f" {' or '.join(THINKING_SWITCHES)}",
                param="thinking.type",
            )
        return budget

    def _chat_messages(self) -> list[dict[str, Any]]:
        messages = [_message("system", self.system)] if self.system else []
        num_system = len(messages)
        for role, turns in itertools.groupby(self.messages, key=lambda turn: turn.role):
            blocks = [block for turn in turns for block in turn.content]
            if role == "user":
                messages.extend(_user_messages(blocks))
            else:
                is_own = role == "assistant"
                messages.append(_assistant_message(blocks) if is_own else _message(role, blocks))
        for tool in self.tools or ():  # templates put tools in front of what the user says first
            _mark(messages[num_system], tool.cache_control)
        _mark(messages[-1], self.cache_control)
        return messages


def _part(text: str, control: CacheControl | None, *, url: str = "") -> dict[str, Any]:
    """Return a part of a content: a text, or the picture of a URL."""
    part: dict[str, Any] = {"type": "text", "text": text}
    if url:
        part = {"type": "image_url", "image_url": {"url": url}}
    if control is not None:
        part["cache_control"] = control.model_dump()
    return part


def _message(role: str, blocks: Sequence[Any], **fields: Any) -> dict[str, Any]:
    """Return a message that has the texts and pictures of these blocks."""
    parts = [
        _part("", block.cache_control, url=block.source.address)
        if isinstance(block, ImageBlock)
        else _part(block.text, block.cache_control)
        for block in blocks
    ]
    return {"role": role, "content": parts or [_part("", None)], **fields}


def _mark(message: dict[str, Any], control: CacheControl | None) -> None:
    """Have a prefix that ends with a message stay in the cache."""
    if control is not None:
        part = message["content"][-1]
        known = part.get("cache_control") or {}
        longest = "1h" if "1h" in (known.get("ttl"), control.ttl) else control.ttl
        part["cache_control"] = {"type": "ephemeral", "ttl": longest}


def _user_messages(blocks: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Yield a message for each result, and one for what is between them."""
    for is_result, group in itertools.groupby(blocks, lambda block: block.type == "tool_result"):
        if is_result:
            yield from map(_result_message, group)
        else:
            yield _message("user", list(group))


def _result_message(result: Any) -> dict[str, Any]:
    message = _message("tool", result.content or (), tool_call_id=result.tool_use_id)
    if result.is_error:
        first = message["content"][0]
        first["text"] = ERROR_PREFIX + first["text"]
    _mark(message, result.cache_control)
    return message


def _assistant_message(blocks: Sequence[Any]) -> dict[str, Any]:
    """Return the one message of what the assistant thought, said and called."""
    message = _message("assistant", [block for block in blocks if block.type == "text"])
    if thoughts := [block.thinking for block in blocks if block.type == "thinking"]:
        message["reasoning"] = "\n".join(thoughts)
    calls = [block for block in blocks if block.type == "tool_use"]
    if calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(call.input, ensure_ascii=False),
                },
            }
            for call in calls
        ]
    for call in calls:
        _mark(message, call.cache_control)
    return message


class MessagesRequest(
    CountTokensRequest,
    NoEffectModel,
    sampling_model(GivenBy.ANTHROPIC),  # type: ignore[misc]
):
    """The body of /v1/messages; null is the same as absent."""

    no_effect: ClassVar[NoEffect] = {
        "container": (),
        "mcp_servers": ([],),
        "inference_geo": (),
        "diagnostics": (),
        "speed": ("standard",),
    }

    max_tokens: MaxTokens
    stop_sequences: (
        Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None
    ) = None
    metadata: MetadataFields | None = None
    stream: bool | None = None
    service_tier: Literal["auto", "standard_only", "flex"] | None = None
    slo: SLOFields | None = None
    priority: Priority | None = None
    timeout: Seconds | None = None

    def _chat_fields(self, service: Service) -> dict[str, Any]:
        fields = super()._chat_fields(service) | given_sampling(self)
        for name in ("stream", "priority", "timeout"):
            fields[name] = getattr(self, name)
        fields["stop"] = self.stop_sequences
        fields["user"] = None if self.metadata is None else self.metadata.user_id
        fields["service_tier"] = "flex" if self.service_tier == "flex" else None
        fields["slo"] = None if self.slo is None else self.slo.model_dump()
        return fields


def check_version(headers: Headers) -> None:
    """Check that a request speaks a known version, if it names one. Raises InvalidRequest."""
    given = headers.get(VERSION_HEADER, VERSIONS[-1])
    if given not in VERSIONS:
        raise InvalidRequest(
            f"the header {VERSION_HEADER} must be {' or '.join(VERSIONS)}, got {show(given)}",
            param=VERSION_HEADER,
        )
