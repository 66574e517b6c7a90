"""POST /v1/embeddings: vectors of texts, best-effort unless asked for otherwise."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request
from msgspec.json import encode
from pydantic import BeforeValidator, Field
from starlette.responses import Response

from lightserve.config.fields import flag_name
from lightserve.errors import InvalidRequest
from lightserve.frontend.columns import json_array, json_object
from lightserve.frontend.completion import Choices, RaisedSLOObject, TextDelta, raised_slo
from lightserve.frontend.json_body import Integer, StrictModel
from lightserve.frontend.openai.completions import texts_or_ids
from lightserve.frontend.openai.fields import NumKept, ServedFields
from lightserve.frontend.request_options import (
    OutputOptions,
    Prepared,
    ServiceLevel,
    new_submit,
    with_objective,
)
from lightserve.frontend.response import CompletionResponse, ResponseWriter, new_request_id
from lightserve.frontend.service import Service
from lightserve.messages.common import TokenSegment, pack_int32
from lightserve.models.pooling import Embedding
from lightserve.types import RequestOutput, SamplingParams

Tier = Literal["default", "priority", "flex"]
"""That an answer states."""
MAX_INPUTS = 2048
INPUTS_PER_TURN = 8
"""That are encoded in one turn of the event loop."""
NUMBERS_PER_ITEM = 4
"""So many numbers of a vector count as one token of an answer (--max-answer-items)."""

Input = str | list[int]


def _inputs_of(value: Any) -> Any:
    return texts_or_ids(value, most=MAX_INPUTS, name="inputs")


_GivenInput = str | list[int] | Annotated[list[Input], Field(min_length=1, max_length=MAX_INPUTS)]
"""Input of `_inputs_of`."""


class EmbeddingRequest(ServedFields):
    """The body: `input` is a text, a list of token ids, or a list of these."""

    default_tier = "flex"
    input: Annotated[list[Any], BeforeValidator(_inputs_of, json_schema_input_type=_GivenInput)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[Integer, Field(ge=1)] | None = None
    truncate_prompt_tokens: NumKept | None = None

    def check(self, service: Service) -> Embedding:
        """Check what types cannot; return how vectors are made. Raises InvalidRequest."""
        service.check_model(self.model)
        embedding = service.embedding()
        size = embedding.size if self.dimensions is None else self.dimensions
        if not embedding.can_have(size):
            known = ", ".join(map(str, sorted({*embedding.sizes, embedding.size})[-8:]))
            raise InvalidRequest(
                f"dimensions must be one of this model's ({known}), got {str(size)[:64]}",
                param="dimensions",
            )
        limit = service.config.max_answer_items * NUMBERS_PER_ITEM
        if len(self.input) * size > limit:
            raise InvalidRequest(
                f"the answer must have at most {limit} numbers ({NUMBERS_PER_ITEM} times"
                f" {flag_name('max_answer_items')}), got {len(self.input)} inputs times {size}",
                param="input",
                code="answer_too_large",
            )
        return embedding


class EmbeddingObject(StrictModel):
    """The vector of one input, of length 1; as base64 its numbers are float32, little-endian."""

    object: Literal["embedding"]
    index: int = Field(ge=0)
    embedding: list[float] | str


class EmbeddingUsage(StrictModel):
    """Tokens of all inputs, with their special ones."""

    prompt_tokens: int = Field(ge=1)
    total_tokens: int = Field(ge=1)


class EmbeddingList(StrictModel):
    """Vectors of all inputs, in their order."""

    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingUsage
    service_tier: Tier
    slo: RaisedSLOObject | None = None


class VectorWriter(ResponseWriter):
    """An answer that is made of vectors, or of scores; it is never streamed."""

    def keep(self, index: int, delta: TextDelta) -> None:
        """Keep nothing: the completions have their vectors."""


class EmbeddingWriter(VectorWriter):
    """OpenAI's list of embeddings."""

    def __init__(self, request: EmbeddingRequest) -> None:
        self.request_id = new_request_id("embd")
        self._request = request

    def whole(self, choices: Choices) -> Iterator[bytes]:
        """Yield the list."""
        num_tokens = choices.usage.prompt_tokens
        answer = {
            "object": "list",
            "data": json_array(
                self._object(index, completion.vector)
                for index, completion in enumerate(choices.completions)
            ),
            "model": self._request.model,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
            "service_tier": self._request.used_tier,
        }
        return json_object(answer | raised_slo(choices.completions))

    def _object(self, index: int, data: bytes) -> Iterator[bytes]:
        vector = np.frombuffer(data, dtype="<f4")
        if self._request.dimensions is not None:
            vector = shortened(vector, self._request.dimensions)
        value: list[float] | str
        if self._request.encoding_format == "base64":
            value = base64.b64encode(vector.tobytes()).decode()
        else:
            value = vector.tolist()
        yield encode({"object": "embedding", "index": index, "embedding": value})


def shortened(vector: npt.NDArray[np.float32], size: int) -> npt.NDArray[np.float32]:
    """Return the first numbers of a vector, of length 1 again."""
    cut = vector[:size].astype(np.float64)
    length = float(np.linalg.norm(cut))
    return (cut / length if length > 0.0 else cut).astype(np.float32)


def embeddings_router(service: Service) -> APIRouter:
    """Return the route."""
    router = APIRouter()

    @router.post("/v1/embeddings")
    async def create_embeddings(request: Request) -> Response:
        """Return the vectors of one or several texts."""
        body = await service.bodies.read(request, EmbeddingRequest)
        body = with_objective(body, request.headers, service.config.objectives)
        embedding = body.check(service)
        level = body.service_level(service, request)

        async def prepare() -> list[Prepared]:
            return await _requests(service, body, embedding, level)

        return CompletionResponse(service, EmbeddingWriter(body), prepare, level, stream=False)

    return router


async def _requests(
    service: Service, body: EmbeddingRequest, embedding: Embedding, level: ServiceLevel
) -> list[Prepared]:
    """Encode each input. Raises InvalidRequest, RequestFailed."""
    most = min(service.context_len, embedding.max_tokens or service.context_len)
    asked = body.truncate_prompt_tokens
    keep = None if asked is None else min(most, asked if asked > 0 else most)
    is_alone = len(body.input) == 1
    requests: list[Prepared] = []
    for number, given in enumerate(body.input):
        param = "input" if is_alone else f"input[{number}]"
        token_ids = await service.encoder.encode_input(given, param=param, most=most, keep=keep)
        requests.append(vector_request(token_ids, body, embedding, level))
        if len(requests) % INPUTS_PER_TURN == 0:
            await service.turns.next()
    return requests


def vector_request(
    token_ids: Sequence[int],
    body: ServedFields,
    embedding: Embedding,
    level: ServiceLevel,
    *,
    asked: tuple[int, ...] = (),
) -> Prepared:
    """Return the request for a prompt's vector; `asked`: for the logits of tokens behind it."""
    submit = new_submit(
        TokenSegment(token_ids=pack_int32(token_ids)),
        level,
        max_tokens=1,
        eos_token_ids=[],
        sampling=SamplingParams(temperature=0.0, allowed_token_ids=asked),
        prediction_key=body.user or "",
        output=RequestOutput.WHOLE_VECTOR if embedding.is_whole else RequestOutput.VECTOR,
    )
    options = OutputOptions(
        prompt_token_ids=token_ids, arrival_s=level.arrival_s, discards_output=True
    )
    return submit, options
