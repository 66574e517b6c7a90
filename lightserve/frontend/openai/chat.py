"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request
from pydantic import BeforeValidator, Field
from starlette.responses import Response

from lightserve.errors import InvalidRequest
from lightserve.frontend.generation import Generation, TextDelta
from lightserve.frontend.json_body import read_model, show
from lightserve.frontend.openai.fields import ChunkWriter, CommonFields, usage_object
from lightserve.frontend.openai.no_effect import CHAT_NO_EFFECT, MESSAGE_NO_EFFECT, NoEffectModel
from lightserve.frontend.responses import ARRIVAL_KEY, GenerationResponse, new_request_id
from lightserve.frontend.router_client import NewRequest
from lightserve.frontend.sampling import MaxTokens
from lightserve.frontend.service import Service
from lightserve.tokenization.chat_template import ChatMessage
from lightserve.types import RequestClass

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


class Message(NoEffectModel):
    """One turn."""

    no_effect = MESSAGE_NO_EFFECT

    role: Literal["system", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_text_of)]


class ChatRequest(CommonFields):
    """The body."""

    no_effect = CHAT_NO_EFFECT
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: MaxTokens | None = None

    @property
    def limit_param(self) -> str:
        """The name under which this request gives its limit of tokens."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def check(self, service: Service) -> None:
        """Check what types cannot. Raises InvalidRequest."""
        super().check(service)
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise InvalidRequest(
                "max_tokens and max_completion_tokens mean the same; give one of them",
                param="max_tokens",
            )


class ChatShape:
    """OpenAI's chat completion objects."""

    wants_pieces = False

    def __init__(self, request: ChatRequest) -> None:
        self.request_id = new_request_id("chatcmpl")
        self._envelope = {
            "id": self.request_id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": request.model,
        }
        chunk_envelope = self._envelope | {"object": "chat.completion.chunk"}
        self._writer = ChunkWriter(chunk_envelope, includes_usage=request.includes_usage)

    def opening(self) -> bytes:
        """Return the chunk that names the role."""
        return self._writer.chunk(_chunk_choice(_ROLE))

    def delta(self, delta: TextDelta) -> bytes:
        """Return a chunk with the text, if any, and one with the finish reason, if any."""
        data = b""
        if delta.text:
            data = self._writer.chunk(_chunk_choice({"content": delta.text}))
        if delta.finish_reason is not None:
            data += self._writer.chunk(_chunk_choice({}, delta.finish_reason))
        return data

    def closing(self, generation: Generation) -> bytes:
        """Return usage, if wanted, and the end."""
        return self._writer.closing(generation.usage)

    def whole(self, text: str, deltas: list[TextDelta], generation: Generation) -> bytes:
        """Return the chat completion object."""
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": None,
            "finish_reason": generation.finish_reason,
        }
        return msgspec.json.encode(
            {**self._envelope, "choices": [choice], "usage": usage_object(generation.usage)}
        )


def _chunk_choice(delta: dict[str, str], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def chat_router(service: Service) -> APIRouter:
    """Return the route."""
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def create_chat_completion(request: Request) -> Response:
        """Answer a conversation."""
        body = await read_model(request, ChatRequest)
        body.check(service)
        arrival_s: float = request.scope[ARRIVAL_KEY]

        async def prepare() -> NewRequest:
            return await _prepare(service, body, arrival_s)

        return GenerationResponse(service, ChatShape(body), prepare, stream=body.stream or False)

    return router


async def _prepare(service: Service, body: ChatRequest, arrival_s: float) -> NewRequest:
    """Render, encode, resolve. Raises InvalidRequest, RequestFailed."""
    sampling = body.sampling(service)
    prompt_token_ids = await service.encoder.encode_chat(
        [ChatMessage(message.role, message.content) for message in body.messages]
    )
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    max_tokens = service.resolve_max_tokens(
        len(prompt_token_ids), asked, default=None, param=body.limit_param
    )
    return NewRequest(
        prompt_token_ids=prompt_token_ids,
        max_tokens=max_tokens,
        eos_token_ids=service.model.tokenizer.eos_token_ids,
        sampling=sampling,
        request_class=RequestClass.RT,
        arrival_s=arrival_s,
        prediction_key=body.prediction_key,
    )
