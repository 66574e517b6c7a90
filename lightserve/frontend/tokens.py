"""POST /tokenize (TGI's shape) and /detokenize: the served model's tokeniser, without the model."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import FailFast
from starlette.responses import JSONResponse

from lightserve.errors import InvalidRequest
from lightserve.frontend.json_body import StrictModel, read_model
from lightserve.frontend.sampling import check_token_range
from lightserve.frontend.service import Service


class TokenizeRequest(StrictModel):
    """The body: a text, and whether the model's BOS is put in front (as it is unless told)."""

    inputs: str
    add_special_tokens: bool | None = None


class DetokenizeRequest(StrictModel):
    """The body: token ids. Those of special tokens have no text."""

    tokens: Annotated[list[int], FailFast()]


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


def tokens_router(service: Service) -> APIRouter:
    """Return the routes."""
    router = APIRouter()
    tokenizer = service.model.tokenizer

    @router.post("/tokenize")
    async def tokenize(request: Request) -> JSONResponse:
        """Split a text into tokens."""
        body = await read_model(request, TokenizeRequest)
        spans = await service.encoder.spans(
            body.inputs,
            param="inputs",
            add_special_tokens=body.add_special_tokens is not False,
        )
        return JSONResponse([span._asdict() for span in spans])

    @router.post("/detokenize")
    async def detokenize(request: Request) -> JSONResponse:
        """Join tokens to a text."""
        body = await read_model(request, DetokenizeRequest)
        limit = service.model.max_model_len
        if len(body.tokens) > limit:
            raise InvalidRequest(
                f"tokens must have at most {limit} entries, this model's context, got"
                f" {len(body.tokens)}",
                param="tokens",
            )
        check_token_range(body.tokens, vocab_size=service.model.vocab_size, param="tokens")
        return JSONResponse({"text": tokenizer.decode(body.tokens)})

    return router
