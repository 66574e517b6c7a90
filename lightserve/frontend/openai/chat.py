"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request
from pydantic import BeforeValidator, Field
from starlette.responses import Response

from lightserve.errors import InvalidRequest
from lightserve.frontend.choices import Choices
from lightserve.frontend.generation import TextDelta
from lightserve.frontend.json_body import StrictModel, read_model, show
from lightserve.frontend.openai.chunks import ChunkWriter, usage_object
from lightserve.frontend.openai.fields import CommonFields
from lightserve.frontend.openai.logprobs import chat_logprobs
from lightserve.frontend.openai.no_effect import CHAT_NO_EFFECT, MESSAGE_NO_EFFECT, NoEffectModel
from lightserve.frontend.responses import ARRIVAL_KEY, GenerationResponse, new_request_id
from lightserve.frontend.router_client import NewRequest
from lightserve.frontend.sampling import MaxTokens, NumLogprobs
from lightserve.frontend.service import Service
from lightserve.tokenization.chat_template import ChatMessage

MAX_MESSAGES = 2048
_ROLE = {"role": "assistant", "content": ""}


def _text_of(content: Any) -> Any:
    """Reduce a list of text parts to one string, the parts on lines of their own."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"must be a string or a list of text parts, got {show(content)}")
    if not content:
        raise ValueError("must have at least one part, got 0")
    for part in content:
        is_text = isinstance(part, dict) and part.get("type") == "text"
        if not is_text or set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise ValueError('must have only parts of the form {"type": "text", "text": "…"}')
    return "\n".join(part["text"] for part in content)


class TextPart(StrictModel):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


_Content = str | Annotated[list[TextPart], Field(min_length=1)]
"""What `_text_of` takes."""


class Message(NoEffectModel):
    """One turn; `developer` is another word for `system`."""

    no_effect = MESSAGE_NO_EFFECT

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_text_of, json_schema_input_type=_Content)]

    def rendered(self) -> ChatMessage:
        """Return it as chat templates know it."""
        return ChatMessage("system" if self.role == "developer" else self.role, self.content)


class ChatRequest(CommonFields):
    """The body."""

    no_effect = CHAT_NO_EFFECT
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None

    @property
    def limit_param(self) -> str:
        """The name under which this request gives its limit of tokens."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def check(self, service: Service) -> None:
        """Check what types cannot. Raises InvalidRequest."""
        super().check(service)
        self.check_count(service, 1)
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise InvalidRequest(
                "max_tokens and max_completion_tokens mean the same; give one of them",
                param="max_tokens",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")


class ChatShape:
    """OpenAI's chat completion objects."""

    def __init__(self, service: Service, request: ChatRequest) -> None:
        self.request_id = new_request_id("chatcmpl")
        self.wants_pieces = bool(request.logprobs)
        self._tokenizer = service.model.tokenizer
        self._envelope = {
            "id": self.request_id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": request.model,
            "service_tier": request.used_tier,
        }
        chunk_envelope = self._envelope | {"object": "chat.completion.chunk"}
        self._writer = ChunkWriter(chunk_envelope, includes_usage=request.includes_usage)
        self._begun: set[int] = set()

    def opening(self) -> bytes:
        """Return nothing: each choice names its role when it begins."""
        return b""

    def delta(self, index: int, delta: TextDelta, choices: Choices) -> bytes:
        """Return a chunk with the text, if any, and one with the finish reason, if any."""
        data = b""
        if index not in self._begun:
            self._begun.add(index)
            data = self._chunk(index, _ROLE)
        if delta.text or delta.pieces:
            data += self._chunk(index, {"content": delta.text}, logprobs=self._logprobs([delta]))
        if delta.finish_reason is not None:
            data += self._chunk(index, {}, finish_reason=delta.finish_reason)
        return data

    def closing(self, choices: Choices) -> bytes:
        """Return usage, if wanted, and the end."""
        return self._writer.closing(choices.usage)

    def whole(self, deltas: Sequence[Sequence[TextDelta]], choices: Choices) -> bytes:
        """Return the chat completion object."""
        objects = []
        for index, (own, generation) in enumerate(zip(deltas, choices.generations, strict=True)):
            text = "".join(delta.text for delta in own)
            objects.append(
                {
                    "index": index,
                    "message": {"role": "assistant", "content": text, "refusal": None},
                    "logprobs": self._logprobs(own),
                    "finish_reason": generation.finish_reason,
                }
            )
        return msgspec.json.encode(
            {**self._envelope, "choices": objects, "usage": usage_object(choices.usage)}
        )

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        return self._writer.chunk(
            {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        )

    def _logprobs(self, deltas: Sequence[TextDelta]) -> dict[str, Any] | None:
        if not self.wants_pieces:
            return None
        return chat_logprobs(self._tokenizer, (p for delta in deltas for p in delta.pieces))


def chat_router(service: Service) -> APIRouter:
    """Return the route."""
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def create_chat_completion(request: Request) -> Response:
        """Answer a conversation."""
        body = await read_model(request, ChatRequest)
        body.check(service)
        arrival_s: float = request.scope[ARRIVAL_KEY]

        async def prepare() -> list[NewRequest]:
            return await _prepare(service, body, arrival_s)

        return GenerationResponse(
            service,
            ChatShape(service, body),
            prepare,
            stream=body.stream or False,
            per_prompt=body.num_choices,
        )

    return router


async def _prepare(service: Service, body: ChatRequest, arrival_s: float) -> list[NewRequest]:
    """Render, encode, resolve. Raises InvalidRequest, RequestFailed."""
    messages = [message.rendered() for message in body.messages]
    prompt_token_ids = await service.encoder.encode_chat(messages)
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    max_tokens = service.resolve_max_tokens(
        len(prompt_token_ids), asked, default=None, param=body.limit_param
    )
    sampling = body.sampling_request(
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else None
    )
    constraint = await body.resolve_constraint(service)
    prompts = [(prompt_token_ids, max_tokens)]
    return list(body.new_requests(service, prompts, sampling, arrival_s, constraint))
