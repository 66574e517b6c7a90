"""POST /v1/completions."""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request
from pydantic import BeforeValidator
from starlette.responses import Response

from lightserve.frontend.generation import Generation, TextDelta
from lightserve.frontend.json_body import read_model, show
from lightserve.frontend.openai.fields import ChunkWriter, CommonFields, usage_object
from lightserve.frontend.openai.no_effect import COMPLETION_NO_EFFECT
from lightserve.frontend.responses import ARRIVAL_KEY, GenerationResponse, new_request_id
from lightserve.frontend.router_client import NewRequest
from lightserve.frontend.service import Service
from lightserve.types import RequestClass

DEFAULT_MAX_TOKENS = 16


def _one_prompt(value: Any) -> Any:
    """Reduce every accepted form of a prompt to a string or a list of ids."""
    is_list_of_one = isinstance(value, list) and len(value) == 1
    if is_list_of_one and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError(f"must be a string or a list of token ids, got {show(value)}")
    for item in value:
        if isinstance(item, str | list):
            raise ValueError(f"must be one prompt, got a list of {len(value)}")
        if isinstance(item, bool) or not isinstance(item, int):
            raise ValueError(f"must hold token ids, which are integers, got {show(item)}")
    return value


class CompletionRequest(CommonFields):
    """The body: `prompt` is a string, a list of token ids, or a list of one of these."""

    no_effect = COMPLETION_NO_EFFECT
    prompt: Annotated[str | list[Any], BeforeValidator(_one_prompt)]


class CompletionShape:
    """OpenAI's text completion objects."""

    wants_pieces = False

    def __init__(self, request: CompletionRequest) -> None:
        self.request_id = new_request_id("cmpl")
        self._envelope = {
            "id": self.request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": request.model,
        }
        self._writer = ChunkWriter(self._envelope, includes_usage=request.includes_usage)

    def opening(self) -> bytes:
        """Return nothing: completions have no first chunk of their own."""
        return b""

    def delta(self, delta: TextDelta) -> bytes:
        """Return one chunk."""
        return self._writer.chunk(_choice(delta.text, delta.finish_reason))

    def closing(self, generation: Generation) -> bytes:
        """Return usage, if wanted, and the end."""
        return self._writer.closing(generation.usage)

    def whole(self, text: str, deltas: list[TextDelta], generation: Generation) -> bytes:
        """Return the completion object."""
        return msgspec.json.encode(
            {
                **self._envelope,
                "choices": [_choice(text, generation.finish_reason)],
                "usage": usage_object(generation.usage),
            }
        )


def _choice(text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}


def completions_router(service: Service) -> APIRouter:
    """Return the route."""
    router = APIRouter()

    @router.post("/v1/completions")
    async def create_completion(request: Request) -> Response:
        """Complete a prompt."""
        body = await read_model(request, CompletionRequest)
        body.check(service)
        arrival_s: float = request.scope[ARRIVAL_KEY]

        async def prepare() -> NewRequest:
            return await _prepare(service, body, arrival_s)

        return GenerationResponse(
            service, CompletionShape(body), prepare, stream=body.stream or False
        )

    return router


async def _prepare(service: Service, body: CompletionRequest, arrival_s: float) -> NewRequest:
    """Encode and resolve. Raises InvalidRequest, RequestFailed."""
    sampling = body.sampling(service)
    if isinstance(body.prompt, str):
        prompt_token_ids = await service.encoder.encode_text(body.prompt, param="prompt")
    else:
        prompt_token_ids = service.encoder.check_ids(body.prompt, param="prompt")
    max_tokens = service.resolve_max_tokens(
        len(prompt_token_ids), body.max_tokens, default=DEFAULT_MAX_TOKENS, param="max_tokens"
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
