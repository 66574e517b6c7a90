"""POST /generate and /generate_stream, in the shapes of text-generation-inference (TGI).

As there, decoding is greedy unless `do_sample` is true or a sampling parameter is given, and the
model's own generation_config is not consulted.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from lightserve.frontend.generation import Generation, Piece, TextDelta
from lightserve.frontend.json_body import StrictModel, read_model
from lightserve.frontend.responses import (
    ARRIVAL_KEY,
    GenerationResponse,
    new_request_id,
    sse_event,
)
from lightserve.frontend.router_client import NewRequest
from lightserve.frontend.sampling import (
    MaxTokens,
    SamplingDefaults,
    Seed,
    Temperature,
    TopK,
    TopP,
    resolve_sampling,
)
from lightserve.frontend.service import Service
from lightserve.types import FinishReason, RequestClass, SamplingParams

DEFAULT_MAX_NEW_TOKENS = 100
_GREEDY = SamplingDefaults(temperature=0.0)
_PLAIN = SamplingDefaults()


class GenerateParameters(StrictModel):
    """`parameters`; null is the same as absent."""

    max_new_tokens: MaxTokens | None = None
    do_sample: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    seed: Seed | None = None
    details: bool | None = None

    def sampling(self, *, vocab_size: int) -> SamplingParams:
        """Return how tokens are drawn. Raises InvalidRequest."""
        shaping = (self.temperature, self.top_p, self.top_k)
        samples = bool(self.do_sample) or any(value is not None for value in shaping)
        return resolve_sampling(
            _PLAIN if samples else _GREEDY,
            vocab_size=vocab_size,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
        )


class GenerateRequest(StrictModel):
    """The body; null `parameters` are the same as absent."""

    inputs: str
    parameters: GenerateParameters | None = None


class GenerateShape:
    """TGI's response and events, one event per token."""

    wants_pieces = True

    def __init__(self, service: Service, request: GenerateRequest) -> None:
        self.request_id = new_request_id("gen")
        parameters = request.parameters
        self._details = parameters is not None and bool(parameters.details)
        self._is_special = service.model.tokenizer.is_special
        self._num_sent = 0
        self._text: list[str] = []
        self._pending: dict[str, Any] | None = None

    def opening(self) -> bytes:
        """Return nothing: the first event is the first token's."""
        return b""

    def delta(self, delta: TextDelta) -> bytes:
        """Return one event per token; the last token's waits for `closing`."""
        events: list[bytes] = []
        for piece in delta.pieces:
            events.append(self._flush())
            self._num_sent += 1
            self._text.append(piece.text)
            self._pending = {
                "index": self._num_sent,
                "token": self._token(piece),
                "generated_text": None,
                "details": None,
            }
        if delta.finish_reason is None:
            events.append(self._flush())
        return b"".join(events)

    def closing(self, generation: Generation) -> bytes:
        """Return the last token's event, which has the whole text."""
        assert self._pending is not None, "a generation has at least one token"
        self._pending["generated_text"] = "".join(self._text)
        if self._details:
            input_length = generation.usage.prompt_tokens
            self._pending["details"] = {**_details(generation), "input_length": input_length}
        return self._flush()

    def whole(self, text: str, deltas: list[TextDelta], generation: Generation) -> bytes:
        """Return the response."""
        answer: dict[str, Any] = {"generated_text": text}
        if self._details:
            tokens = [self._token(piece) for delta in deltas for piece in delta.pieces]
            answer["details"] = {**_details(generation), "prefill": [], "tokens": tokens}
        return msgspec.json.encode(answer)

    def _flush(self) -> bytes:
        pending, self._pending = self._pending, None
        return b"" if pending is None else sse_event(msgspec.json.encode(pending))

    def _token(self, piece: Piece) -> dict[str, Any]:
        special = self._is_special(piece.token_id)
        return {"id": piece.token_id, "text": piece.text, "logprob": None, "special": special}


def _details(generation: Generation) -> dict[str, Any]:
    stopped = generation.finish_reason is FinishReason.STOP
    return {
        "finish_reason": "eos_token" if stopped else "length",
        "generated_tokens": generation.num_tokens,
        "seed": generation.request.sampling.seed,
    }


def native_router(service: Service) -> APIRouter:
    """Return the routes."""
    router = APIRouter()

    async def respond(request: Request, *, stream: bool) -> Response:
        body = await read_model(request, GenerateRequest)
        arrival_s: float = request.scope[ARRIVAL_KEY]

        async def prepare() -> NewRequest:
            return await _prepare(service, body, arrival_s)

        return GenerationResponse(service, GenerateShape(service, body), prepare, stream=stream)

    @router.post("/generate")
    async def generate(request: Request) -> Response:
        """Generate, answering once."""
        return await respond(request, stream=False)

    @router.post("/generate_stream")
    async def generate_stream(request: Request) -> Response:
        """Generate, one event per token."""
        return await respond(request, stream=True)

    return router


async def _prepare(service: Service, body: GenerateRequest, arrival_s: float) -> NewRequest:
    """Encode and resolve. Raises InvalidRequest, RequestFailed."""
    parameters = body.parameters or GenerateParameters()
    sampling = parameters.sampling(vocab_size=service.model.vocab_size)
    prompt_token_ids = await service.encoder.encode_text(body.inputs, param="inputs")
    max_tokens = service.resolve_max_tokens(
        len(prompt_token_ids),
        parameters.max_new_tokens,
        default=DEFAULT_MAX_NEW_TOKENS,
        param="parameters.max_new_tokens",
    )
    return NewRequest(
        prompt_token_ids=prompt_token_ids,
        max_tokens=max_tokens,
        eos_token_ids=service.model.tokenizer.eos_token_ids,
        sampling=sampling,
        request_class=RequestClass.RT,
        arrival_s=arrival_s,
    )
