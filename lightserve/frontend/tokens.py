"""POST /tokenize (TGI's shape) and /detokenize: the served model's tokeniser, without the model."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from typing import Annotated

import msgspec
from fastapi import APIRouter, Request
from pydantic import FailFast, WithJsonSchema
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from lightserve.errors import InvalidRequest
from lightserve.frontend.backlog import Backlog
from lightserve.frontend.columns import json_list
from lightserve.frontend.json_body import WHOLE_NUMBERS, StrictModel, read_model
from lightserve.frontend.sampling import check_token_range
from lightserve.frontend.service import Service
from lightserve.tokenization.tokenizer import Spans

_JSON = "application/json"
SPANS_PER_PIECE = 256
"""Written in one turn of the event loop: 1 ms or so."""


class TokenizeRequest(StrictModel):
    """The body: a text, and whether the model's BOS is put in front (as it is unless told)."""

    inputs: str
    add_special_tokens: bool | None = None


_TOKENS_SCHEMA = {
    "title": "Tokens",
    "type": "array",
    "items": {"type": "integer", "minimum": 0},
    "description": "Ids below the size of the vocabulary, at most `max_model_len` of the model.",
}
"""What is checked by the route: pydantic would take a multiple of the time for each id."""


class DetokenizeRequest(StrictModel):
    """The body: token ids. Those of special tokens have no text."""

    tokens: Annotated[list[int], FailFast(), WHOLE_NUMBERS, WithJsonSchema(_TOKENS_SCHEMA)]


class TokenSpan(StrictModel):
    """A token, and the part of the text that it stands for, in characters."""

    id: int
    text: str
    """Of special tokens their name; the whole character for each token that is part of one."""
    start: int
    stop: int


class DetokenizeResponse(StrictModel):
    """The text."""

    text: str


class SpansResponse(StreamingResponse):
    """The answer of /tokenize. Text and spans are held until its client has read it.

    So what is held for all of them together is bounded.
    """

    def __init__(self, service: Service, text: str, spans: Spans, answers: Backlog) -> None:
        super().__init__(_pieces(service, text, spans), media_type=_JSON)
        self._answers = answers
        self._size = sys.getsizeof(text) + sum(map(sys.getsizeof, spans))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it. Raises RequestFailed (429)."""
        with self._answers.admitted(self._size):
            await super().__call__(scope, receive, send)


def tokens_router(service: Service) -> APIRouter:
    """Return the routes."""
    router = APIRouter()
    answers = Backlog()
    tokenizer = service.model.tokenizer

    @router.post("/tokenize")
    async def tokenize(request: Request) -> SpansResponse:
        """Split a text into tokens."""
        body = await read_model(request, TokenizeRequest)
        spans = await service.encoder.spans(
            body.inputs,
            param="inputs",
            add_special_tokens=body.add_special_tokens is not False,
        )
        return SpansResponse(service, body.inputs, spans, answers)

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        """Join tokens to a text."""
        body = await read_model(request, DetokenizeRequest)
        limit = service.model.max_model_len
        if len(body.tokens) > limit:
            raise InvalidRequest(
                f"tokens must have at most {limit} entries, this model's context, got"
                f" {len(body.tokens)}",
                param="tokens",
            )

        def decode() -> bytes:
            check_token_range(body.tokens, vocab_size=service.model.vocab_size, param="tokens")
            return msgspec.json.encode({"text": tokenizer.decode(body.tokens)})

        return Response(await service.encoder.run(decode, size=len(body.tokens)), media_type=_JSON)

    return router


async def _pieces(service: Service, text: str, spans: Spans) -> AsyncIterator[bytes]:
    """Write a list of `TokenSpan` piece by piece: other requests have their turn in between."""
    name_of = service.model.tokenizer.name_of
    tokens = (
        {"id": i, "text": text[start:stop] or name_of(i), "start": start, "stop": stop}
        for i, start, stop in zip(*spans, strict=True)
    )
    for piece in json_list(tokens, SPANS_PER_PIECE):
        yield piece
        await service.turns.next()
