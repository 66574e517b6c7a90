"""POST /v1/chat/completions/render and /v1/completions/render, as vLLM has them: the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from msgspec.json import encode
from starlette.responses import Response

from lightserve.frontend.json_body import BODY_BYTES_KEY, StrictModel
from lightserve.frontend.openai.chat import ChatRequest, encode_chat
from lightserve.frontend.openai.completions import CompletionRequest, encode_prompts
from lightserve.frontend.response import new_request_id
from lightserve.frontend.service import Service


class PromptObject(StrictModel):
    """The prompt of a body."""

    request_id: str
    token_ids: list[int]


def render_router(service: Service) -> APIRouter:
    """Return the routes."""
    router = APIRouter()

    @router.post("/v1/chat/completions/render")
    async def render_chat(request: Request) -> Response:
        """Return the prompt that the same body would have at /v1/chat/completions."""
        body = await service.bodies.read(request, ChatRequest)
        body.check(service)
        size: int = request.scope[BODY_BYTES_KEY]
        prompt = await encode_chat(service, body, body.tool_use(service), size)
        return _answer(_object("chatcmpl", prompt.token_ids))

    @router.post("/v1/completions/render")
    async def render_completion(request: Request) -> Response:
        """Return the prompts that the same body would have at /v1/completions."""
        body = await service.bodies.read(request, CompletionRequest)
        body.check(service)
        prompts = await encode_prompts(service, body)
        return _answer([_object("cmpl", token_ids) for token_ids in prompts])

    return router


def _object(prefix: str, token_ids: Sequence[int]) -> dict[str, Any]:
    return {"request_id": new_request_id(prefix), "token_ids": list(token_ids)}


def _answer(value: Any) -> Response:
    return Response(encode(value), media_type="application/json")
