"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any, Literal

from fastapi import APIRouter, Request
from msgspec.json import encode
from pydantic import Field
from starlette.responses import Response

from lightserve.errors import InvalidRequest
from lightserve.frontend.anthropic.request import (
    CHAT_NAMES,
    CountTokensRequest,
    MessagesRequest,
    check_version,
)
from lightserve.frontend.columns import TextBuffer, json_array, json_object, json_text
from lightserve.frontend.completion import (
    Choices,
    Completion,
    RaisedSLOObject,
    TextDelta,
    raised_slo,
)
from lightserve.frontend.errors import RequestFailed, anthropic_body, renamed
from lightserve.frontend.json_body import BODY_BYTES_KEY, StrictModel
from lightserve.frontend.openai.chat import (
    ChatRequest,
    ConversationWriter,
    answer_chat,
    encode_chat,
)
from lightserve.frontend.openai.messages import AnswerPart, parts_of
from lightserve.frontend.prompts import EncodedChat
from lightserve.frontend.request_options import with_objective
from lightserve.frontend.response import prepared_for, sse_event
from lightserve.frontend.service import Service
from lightserve.types import FinishReason

_KINDS = {"text": "text", "reasoning": "thinking", "call": "tool_use"}
"""Types of blocks, by the parts that they have."""
_TEXT_FIELDS = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}
"""By type of a block: what a delta calls its text."""
_DELTA_TYPES = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\n" + sse_event(encode({"type": kind, **fields}))


PING = _event("ping")


class Block:
    """A block of the answer's content as it grows."""

    def __init__(self, kind: str, **fields: str) -> None:
        self.kind = kind
        self.text = TextBuffer()
        """Text of the block, kept for an answer that is not streamed."""
        self._fields = {"type": kind, **fields}

    def opened(self) -> dict[str, Any]:
        """Return it without its text, as a stream begins it."""
        texts: dict[str, dict[str, Any]] = {
            "text": {"text": ""},
            "thinking": {"thinking": "", "signature": ""},
            "tool_use": {"input": {}},
        }
        return self._fields | texts[self.kind]

    def frame(self, index: int) -> tuple[bytes, bytes]:
        """Return what stands before and behind the text in its deltas."""
        delta = {"type": _DELTA_TYPES[self.kind], _TEXT_FIELDS[self.kind]: ""}
        head, tail = _event("content_block_delta", index=index, delta=delta).split(b'""')
        return head, tail

    def whole(self) -> Iterator[bytes]:
        """Yield it as JSON."""
        if self.kind == "tool_use":
            return json_object(self.opened() | {"input": map(str.encode, self.text.parts())})
        return json_object(self.opened() | {self.kind: json_text(self.text.parts())})


class MessageWriter(ConversationWriter):
    """Anthropic's message objects, and the events of their streams."""

    keep_alive = PING

    def __init__(self, body: MessagesRequest) -> None:
        super().__init__()
        self.request_id = f"msg_{uuid.uuid4().hex}"
        self._model = body.model
        self._max_tokens = body.max_tokens
        self._tier = "batch" if body.service_tier == "flex" else "standard"
        self._blocks: list[Block] = []
        self._frame = (b"", b"")
        """Bytes before and behind the text in deltas of the last block."""

    def delta(self, index: int, delta: TextDelta, choices: Choices) -> Iterator[bytes]:
        """Yield the events of some news."""
        completion = choices.completions[index]
        if not self.parsers:  # its usage is known with the first news
            yield self._start(completion)
        for part in parts_of(self.parts(0, delta)):
            if (block := self._next(part)) is not None:
                yield self._begin(block)
            if part.text:
                yield self._frame[0] + encode(part.text) + self._frame[1]
        if delta.finish_reason is not None:
            if self._blocks:
                yield _event("content_block_stop", index=len(self._blocks) - 1)
            yield _event("message_delta", delta=self._end(completion), usage=_tokens(completion))

    def closing(self, choices: Choices) -> bytes:
        """Return the last event."""
        return _event("message_stop")

    def failing(self, failure: InvalidRequest | RequestFailed) -> bytes:
        """Return the event of a failure."""
        return b"event: error\n" + sse_event(anthropic_body(failure))

    def keep(self, index: int, delta: TextDelta) -> None:
        """Take in some news for `whole`."""
        for part in parts_of(self.parts(0, delta)):
            if (block := self._next(part)) is not None:
                self._blocks.append(block)
            self._blocks[-1].text.append(part.text)

    def whole(self, choices: Choices) -> Iterator[bytes]:
        """Yield the message object."""
        content = json_array(block.whole() for block in self._blocks)
        return json_object(self._message(choices.first, content, self._end(choices.first)))

    def _start(self, completion: Completion) -> bytes:
        end = {"stop_reason": None, "stop_sequence": None}
        message = self._message(completion, [], end)
        message["usage"] |= {"output_tokens": 0}
        return _event("message_start", message=message)

    def _message(self, completion: Completion, content: Any, end: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.request_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **end,
            "usage": _tokens(completion) | {"service_tier": self._tier},
            **raised_slo([completion]),
        }

    def _begin(self, block: Block) -> bytes:
        """Return the events between the last block, if there is one, and a new one's text."""
        index = len(self._blocks)
        stop = _event("content_block_stop", index=index - 1) if index else b""
        self._blocks.append(block)
        self._frame = block.frame(index)
        return stop + _event("content_block_start", index=index, content_block=block.opened())

    def _next(self, part: AnswerPart) -> Block | None:
        """Return the block that a part begins, if it does."""
        kind = _KINDS[part.kind]
        if part.call_id:
            return Block(kind, id=f"toolu_{part.call_id.removeprefix('call_')}", name=part.name)
        return None if self._blocks and self._blocks[-1].kind == kind else Block(kind)

    def _end(self, completion: Completion) -> dict[str, Any]:
        """Return why a message ended, in Anthropic's words."""
        reason = "end_turn"
        if completion.finish_reason is FinishReason.LENGTH:
            is_cut = completion.request.max_tokens < self._max_tokens
            reason = "model_context_window_exceeded" if is_cut else "max_tokens"
        elif completion.stop_string is not None:
            reason = "stop_sequence"
        elif self.parsers[0].num_calls > 0:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": completion.stop_string}


def _tokens(completion: Completion) -> dict[str, Any]:
    """Return the usage: what was found in the prefix cache is not in `input_tokens`."""
    usage = completion.usage
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def messages_router(service: Service) -> APIRouter:
    """Return the routes."""
    router = APIRouter()

    async def as_chat(request: Request, body: CountTokensRequest) -> ChatRequest:
        check_version(request.headers)
        body.check()
        size: int = request.scope[BODY_BYTES_KEY]
        with renamed(CHAT_NAMES):
            return await service.encoder.run(lambda: body.as_chat(service), size=size)

    @router.post("/v1/messages")
    async def create_message(request: Request) -> Response:
        """Answer a conversation."""
        body = await service.bodies.read(request, MessagesRequest)
        body = with_objective(body, request.headers, service.config.objectives)
        chat = await as_chat(request, body)
        return answer_chat(
            service,
            request,
            chat,
            MessageWriter(body),
            most_tokens=body.max_tokens,
            names=body.names_in(chat),
        )

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> Response:
        """Count the tokens of a conversation's prompt."""
        body = await service.bodies.read(request, CountTokensRequest)

        async def prompt_of_body() -> EncodedChat:
            chat, size = await as_chat(request, body), request.scope[BODY_BYTES_KEY]
            with renamed(body.names_in(chat)):
                chat.check(service)
                return await encode_chat(service, chat, chat.tool_use(service), size)

        prompt = await prepared_for(service, request, prompt_of_body)
        count = encode({"input_tokens": len(prompt.token_ids)})
        return Response(count, media_type="application/json")

    return router


# ----------------------------------------------------------------------
# What the routes answer, for the OpenAPI schema; a test holds real answers against it.


class ContentBlockObject(StrictModel):
    """A block of an answer: what there is besides `type` follows from that."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | None = None
    thinking: str | None = None
    signature: Literal[""] | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None


class MessageUsageObject(StrictModel):
    """Tokens read, those that were found in the prefix cache apart, and written."""

    input_tokens: int = Field(ge=0)
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: int = Field(ge=0)
    output_tokens: int = Field(ge=0)
    service_tier: Literal["standard", "batch"]


class MessageObject(StrictModel):
    """The answer of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlockObject]
    stop_reason: Literal[
        "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
    ]
    stop_sequence: str | None
    usage: MessageUsageObject
    slo: RaisedSLOObject | None = None


class TokensCount(StrictModel):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int = Field(ge=1)


class AnthropicErrorDetails(StrictModel):
    """The part of an error that programs read."""

    error_code: str
    param: str | None


class AnthropicErrorDetail(StrictModel):
    """An error, in Anthropic's words."""

    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "request_too_large",
        "rate_limit_error",
        "timeout_error",
        "overloaded_error",
        "api_error",
    ]
    message: str
    details: AnthropicErrorDetails


class AnthropicErrorObject(StrictModel):
    """Every answer of these routes that is none; also an event of a stream that has begun."""

    type: Literal["error"]
    error: AnthropicErrorDetail
