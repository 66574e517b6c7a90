"""POST /v1/rerank and /v1/score: how well documents answer a query, best-effort unless asked.

A pair of texts is one prompt. An encoder's head makes a number of it; of a decoder such as
Qwen3-Reranker the logits of two tokens behind it do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from msgspec.json import encode
from pydantic import AliasChoices, BeforeValidator, Field
from starlette.responses import Response

from lightserve.config.fields import flag_name
from lightserve.errors import InvalidRequest
from lightserve.frontend.columns import json_array, json_object
from lightserve.frontend.completion import Choices, RaisedSLOObject, raised_slo
from lightserve.frontend.json_body import Integer, StrictModel
from lightserve.frontend.openai.embeddings import (
    INPUTS_PER_TURN,
    MAX_INPUTS,
    EmbeddingUsage,
    Tier,
    VectorWriter,
    vector_request,
)
from lightserve.frontend.openai.fields import ServedFields
from lightserve.frontend.request_options import Prepared, ServiceLevel, with_objective
from lightserve.frontend.response import CompletionResponse, new_request_id
from lightserve.frontend.service import Service
from lightserve.models.pooling import Embedding, Pooling
from lightserve.tokenization.conversation import ChatMessage, Conversation, Ending
from lightserve.tokenization.tokenizer import Tokenizer

_PROMPT = """\
<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. \
Note that the answer can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: Given a web search query, retrieve relevant passages that answer the query
<Query>: {query}
<Document>: {document}<|im_end|>
<|im_start|>assistant
<think>

</think>

"""
"""Prompt of Qwen3-Reranker (Zhang et al., 2025, section 2)."""

Passage = Annotated[str, Field(min_length=1)]


def _texts(value: Any) -> Any:
    """Return a text as a list of one, and a list as it is unless it is too long to be looked at."""
    if isinstance(value, list) and len(value) > MAX_INPUTS:
        raise ValueError(f"must have at most {MAX_INPUTS} texts, got {len(value)}")
    return [value] if isinstance(value, str) else value


_TextList = Annotated[list[Passage], Field(min_length=1, max_length=MAX_INPUTS)]
Texts = Annotated[_TextList, BeforeValidator(_texts, json_schema_input_type=Passage | _TextList)]
"""At least one text, none empty."""


class PairFields(ServedFields):
    """Fields of both routes."""

    default_tier = "flex"
    max_tokens_per_doc: Annotated[Integer, Field(ge=1)] | None = None

    def check(self, service: Service) -> Embedding:
        """Check what types cannot; return how scores are made. Raises InvalidRequest."""
        service.check_model(self.model)
        return service.scoring()


class RerankRequest(PairFields):
    """The body of /v1/rerank, as Cohere has it."""

    query: Passage
    documents: Texts
    top_n: Annotated[Integer, Field(ge=1)] | None = None
    return_documents: bool | None = None


class ScoreRequest(PairFields):
    """The body of /v1/score, as vLLM has it, with vLLM's other names of the two."""

    text_1: Annotated[Texts, Field(validation_alias=AliasChoices("text_1", "queries", "data_1"))]
    text_2: Annotated[
        Texts, Field(validation_alias=AliasChoices("text_2", "documents", "items", "data_2"))
    ]

    def pairs(self) -> list[tuple[str, str, str]]:
        """Return the pairs of texts, with the field of the second. Raises InvalidRequest."""
        first, second = self.text_1, self.text_2
        if len(first) not in (1, len(second)):
            raise InvalidRequest(
                f"text_1 must have one text or as many as text_2, {len(second)}, got {len(first)}",
                param="text_1",
            )
        firsts = first * len(second) if len(first) == 1 else first
        return [(*pair, f"text_2[{n}]") for n, pair in enumerate(zip(firsts, second, strict=True))]


class PairsAnswer(StrictModel):
    """The common part of the answers of /v1/rerank and /v1/score."""

    id: str
    model: str
    usage: EmbeddingUsage
    service_tier: Tier
    slo: RaisedSLOObject | None = None


class TextObject(StrictModel):
    """A document."""

    text: str


class RankedDocument(StrictModel):
    """A document's place among those of the request, and how well it answers the query."""

    index: int = Field(ge=0)
    relevance_score: float
    document: TextObject | None = None


class Ranking(PairsAnswer):
    """The answer of /v1/rerank, the best document first."""

    results: list[RankedDocument]


class ScoreObject(StrictModel):
    """Score of one pair."""

    index: int = Field(ge=0)
    object: Literal["score"]
    score: float


class ScoreList(PairsAnswer):
    """The answer of /v1/score."""

    object: Literal["list"]
    created: int
    data: list[ScoreObject]


class PairWriter(VectorWriter):
    """Either answer."""

    def __init__(
        self,
        body: PairFields,
        scoring: Embedding,
        entries: Callable[[Sequence[float]], Iterator[bytes]],
        fields: Mapping[str, Any],
    ) -> None:
        """`entries`: makes those of a list of scores; it takes the place of None in `fields`."""
        self.request_id = new_request_id("score")
        self._body, self._scoring, self._entries = body, scoring, entries
        self._fields = {"id": self.request_id, **fields, "model": body.model}

    def whole(self, choices: Choices) -> Iterator[bytes]:
        """Yield the answer."""
        num_tokens = choices.usage.prompt_tokens
        scores = [_score(each.vector, self._scoring) for each in choices.completions]
        entries = json_array(iter((entry,)) for entry in self._entries(scores))
        answer: dict[str, Any] = {
            **{name: value or entries for name, value in self._fields.items()},
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
            "service_tier": self._body.used_tier,
        }
        return json_object(answer | raised_slo(choices.completions))


def _ranked(body: RerankRequest, scores: Sequence[float]) -> Iterator[bytes]:
    """Yield the best first, equal ones in the order of the documents."""
    for index in sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]:
        fields: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
        if body.return_documents:
            fields["document"] = {"text": body.documents[index]}
        yield encode(fields)


def _scored(scores: Sequence[float]) -> Iterator[bytes]:
    for index, score in enumerate(scores):
        yield encode({"index": index, "object": "score", "score": score})


def _score(data: bytes, scoring: Embedding) -> float:
    """Return the score that a model's numbers mean."""
    numbers = np.frombuffer(data, dtype="<f4").astype(np.float64)
    logit = float(numbers[0] if scoring.kind is Pooling.SCORE else numbers[0] - numbers[1])
    return logit if scoring.has_plain_scores else 0.5 * (1.0 + math.tanh(0.5 * logit))


def rerank_router(service: Service) -> APIRouter:
    """Return the routes."""
    router = APIRouter()

    @router.post("/v1/rerank")
    @router.post("/v2/rerank")
    @router.post("/rerank")
    async def rerank(request: Request) -> Response:
        """Return documents by how well they answer a query."""
        body = await service.bodies.read(request, RerankRequest)
        body = with_objective(body, request.headers, service.config.objectives)
        scoring = body.check(service)
        writer = PairWriter(body, scoring, partial(_ranked, body), {"results": None})
        pairs = [
            (body.query, document, f"documents[{number}]")
            for number, document in enumerate(body.documents)
        ]
        return _answer(service, request, body, writer, pairs)

    @router.post("/v1/score")
    @router.post("/score")
    async def score(request: Request) -> Response:
        """Return the score of each pair of texts."""
        body = await service.bodies.read(request, ScoreRequest)
        body = with_objective(body, request.headers, service.config.objectives)
        fields = {"object": "list", "created": int(time.time()), "data": None}
        writer = PairWriter(body, body.check(service), _scored, fields)
        return _answer(service, request, body, writer, body.pairs())

    return router


def _answer(
    service: Service,
    request: Request,
    body: PairFields,
    writer: PairWriter,
    pairs: Sequence[tuple[str, str, str]],
) -> CompletionResponse:
    """Return the answer to pairs of texts, each with the name of its field."""
    level = body.service_level(service, request)
    limit = service.config.max_body_bytes
    num_chars = sum(len(first) + len(second) for first, second, _ in pairs)
    if num_chars > limit:
        param = pairs[0][2].partition("[")[0]
        raise InvalidRequest(
            f"{param} and the query, once for each, must have at most {limit} characters together"
            f" ({flag_name('max_body_bytes')}), got {num_chars}",
            param=param,
        )

    async def prepare() -> list[Prepared]:
        requests = []
        for number, pair in enumerate(pairs, 1):
            requests.append(await _request(service, body, pair, level))
            if number % INPUTS_PER_TURN == 0:
                await service.turns.next()
        return requests

    return CompletionResponse(service, writer, prepare, level, stream=False)


async def _request(
    service: Service, body: PairFields, pair: tuple[str, str, str], level: ServiceLevel
) -> Prepared:
    """Encode a pair. Raises InvalidRequest, RequestFailed."""
    query, document, param = pair
    scoring, limit, most = service.scoring(), body.max_tokens_per_doc, service.context_len

    def pair_ids(tokenizer: Tokenizer) -> list[int]:
        step = scoring.type_step
        return tokenizer.encode_pair(query, document, most_of_second=limit, type_step=step)

    def judged_ids(tokenizer: Tokenizer) -> list[int]:
        kept = document if limit is None else tokenizer.cut(document, limit)
        return tokenizer.encode(_text_of(service, query, kept), add_special_tokens=False)

    is_encoder = scoring.kind is Pooling.SCORE
    token_ids = await service.encoder.encode_made(
        *(pair_ids if is_encoder else judged_ids, query, document),
        param=param,
        most=min(most, scoring.max_tokens or most) if is_encoder else most,
    )
    asked = () if is_encoder else scoring.yes_no or ()
    return vector_request(token_ids, body, scoring, level, asked=asked)


def _text_of(service: Service, query: str, document: str) -> str:
    """Return the prompt of a document: the model's own, or that of Qwen3-Reranker."""
    if service.model.judge is None:
        return _PROMPT.format(query=query, document=document)
    messages = [ChatMessage("query", query), ChatMessage("document", document)]
    return service.model.judge.render(Conversation(messages=messages, ending=Ending.ANSWER))
