"""The OpenAPI schema, from the models that bodies are read with.

Routes read their bodies by hand (strictly, see `json_body`), so FastAPI does not know them: each
operation's body and answers are named here. Tests hold the schema against every route, against
real answers, and against what the server refuses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, Field, TypeAdapter
from pydantic.json_schema import JsonSchemaMode

from lightserve.frontend.admin import (
    DetokenizeRequest,
    DetokenizeResponse,
    KVMapObject,
    PromptObject,
    TokenizeRequest,
    TokenSpan,
)
from lightserve.frontend.anthropic.messages import AnthropicErrorObject, MessageObject, TokensCount
from lightserve.frontend.anthropic.request import CountTokensRequest, MessagesRequest
from lightserve.frontend.completion import RaisedSLOObject
from lightserve.frontend.dashboard import TimelineObject
from lightserve.frontend.json_body import StrictModel
from lightserve.frontend.middleware import Access, access_to
from lightserve.frontend.openai.batches import BATCH_QUERY, BatchObject, BatchPage, BatchRequest
from lightserve.frontend.openai.chat import ChatRequest
from lightserve.frontend.openai.completions import CompletionRequest
from lightserve.frontend.openai.embeddings import EmbeddingList, EmbeddingRequest, Tier
from lightserve.frontend.openai.files import (
    FILE_QUERY,
    UPLOAD_FORM,
    DeletedFile,
    FileObject,
    FilePage,
)
from lightserve.frontend.openai.rerank import Ranking, RerankRequest, ScoreList, ScoreRequest
from lightserve.frontend.openai.responses import ITEMS_QUERY, DeletedResponse, ItemPage
from lightserve.frontend.openai.responses_request import ResponsesRequest
from lightserve.frontend.openai.responses_writer import ResponseObject
from lightserve.frontend.request_options import header_schemas
from lightserve.frontend.tgi import GenerateRequest

# ----------------------------------------------------------------------
# What the OpenAI routes answer, for the OpenAPI schema; a test holds real answers against it.


Finish = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(StrictModel):
    """Details of the prompt's tokens."""

    cached_tokens: int = Field(ge=0)


class CompletionTokensDetails(StrictModel):
    """Details of the tokens written."""

    reasoning_tokens: int = Field(ge=0)
    accepted_prediction_tokens: int = Field(ge=0)
    rejected_prediction_tokens: int = Field(ge=0)


class UsageObject(StrictModel):
    """Tokens read and written; a prompt counts once, however many choices it has."""

    prompt_tokens: int = Field(ge=1)
    completion_tokens: int = Field(ge=0)
    total_tokens: int = Field(ge=1)
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class CompletionLogprobsObject(StrictModel):
    """One entry per token; `text_offset` in characters."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(StrictModel):
    """Log-probability of a token of the prompt, or of one that could have been in its place."""

    logprob: float
    rank: int | None
    """Among the most probable ones, from 1; null: it is none of those that were asked for."""
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""One entry per token of the prompt, by token id; null for the first."""


class EndedChoice(StrictModel):
    """How a completion ended."""

    index: int = Field(ge=0)
    finish_reason: Finish
    stop_reason: str | int | None
    """The stop string, or the token of `stop_token_ids`, that ended it."""
    matched_stop: str | int | None
    """The stop string or token that ended the choice; also the model's own token at the end."""
    token_ids: list[int] | None
    """Ids of the output's tokens, with the one that ended it; with `return_token_ids`."""


class CompletionChoice(EndedChoice):
    """One completion."""

    text: str
    logprobs: CompletionLogprobsObject | None
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None


class Completion(StrictModel):
    """The answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    service_tier: Tier
    choices: list[CompletionChoice]
    usage: UsageObject
    slo: RaisedSLOObject | None = None


class ChatTopLogprob(StrictModel):
    """A token that could have been drawn."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(ChatTopLogprob):
    """A token of the output; with `bytes`, as its text may be part of a character only."""

    top_logprobs: list[ChatTopLogprob]


class ChatLogprobsObject(StrictModel):
    """Log-probabilities of one choice."""

    content: list[ChatLogprob]
    refusal: None


class AssistantMessage(StrictModel):
    """The generated message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatChoice(EndedChoice):
    """One completion."""

    message: AssistantMessage
    logprobs: ChatLogprobsObject | None


class ChatCompletion(StrictModel):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    service_tier: Tier
    choices: list[ChatChoice]
    usage: UsageObject
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None
    slo: RaisedSLOObject | None = None


class ModelObject(StrictModel):
    """A served model, under one of its names."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    """Its first name, whichever this one is."""
    max_model_len: int


class ModelList(StrictModel):
    """Every name of the served model."""

    object: Literal["list"]
    data: list[ModelObject]


class ErrorDetailObject(StrictModel):
    """An error, in OpenAI's words."""

    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str | None


class ErrorObject(StrictModel):
    """Every answer that is none; also an event of a stream that has begun."""

    error: ErrorDetailObject


# ----------------------------------------------------------------------
# What /generate answers, for the OpenAPI schema; a test holds real answers against it.


class GeneratedToken(StrictModel):
    """A token of the output, or one that could have been."""

    id: int
    text: str
    logprob: float
    special: bool


class PrefillToken(StrictModel):
    """A token of the prompt; the first has no log-probability."""

    id: int
    text: str
    logprob: float | None


class GenerateDetails(StrictModel):
    """With `details`."""

    finish_reason: Literal["length", "eos_token", "stop_sequence"]
    generated_tokens: int
    seed: int
    prefill: list[PrefillToken]
    tokens: list[GeneratedToken]
    top_tokens: list[list[GeneratedToken]] | None = None


class GenerateAnswer(StrictModel):
    """The answer."""

    generated_text: str
    details: GenerateDetails | None = None
    slo: RaisedSLOObject | None = None


_REF = "#/components/schemas/{model}"
_JSON, _SSE, _TEXT = "application/json", "text/event-stream", "text/plain"
_HTML, _BYTES = "text/html", "application/octet-stream"
_EVENTS = {"description": "Server-sent events; `docs/api.md` lists their kinds."}
_OBJECT = {"type": "object"}


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One method of one path."""

    request: type[BaseModel] | None = None
    answers: Any = None
    """Type of the answer; None: an object that is described in words."""
    content: tuple[str, ...] = (_JSON,)
    """Media types of the answer."""
    errors: tuple[int, ...] = ()
    """Statuses besides those that every path may have."""
    error: type[BaseModel] = ErrorObject
    """Type of an answer with any of them."""
    unavailable: bool = False
    """Whether the answer's shape also comes with a 503."""
    is_upload: bool = False
    """Whether the body is a form with a file."""
    query: Mapping[str, Any] = field(default_factory=dict)
    """Schemas of parameters, by name."""
    takes_targets: bool = False
    """Whether targets may come in headers."""


_BODY_ERRORS = (400, 408, 413, 415, 429, 503)
_STREAMS_TOO = (_JSON, _SSE)
_STORE_ERRORS = (400, 404, 503)
_HEALTH = Operation(unavailable=True)


def _computed(request: type[BaseModel], answers: Any, **others: Any) -> Operation:
    """Return an operation for which the model computes something."""
    defaults: dict[str, Any] = {"errors": (404, *_BODY_ERRORS), "takes_targets": True}
    return Operation(request=request, answers=answers, **(defaults | others))


def _encoded(request: type[BaseModel], answers: Any, *errors: int) -> Operation:
    """Return an operation with a body that only the frontend looks at."""
    return Operation(request=request, answers=answers, errors=(*errors, *_BODY_ERRORS))


def _stored(answers: Any, *errors: int, **others: Any) -> Operation:
    """Return an operation on what the store has."""
    return Operation(answers=answers, errors=(*errors, *_STORE_ERRORS), **others)


_ANTHROPIC = {"error": AnthropicErrorObject}
_TGI = {"errors": _BODY_ERRORS}

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("post", "/v1/completions"): _computed(CompletionRequest, Completion, content=_STREAMS_TOO),
    ("post", "/v1/chat/completions"): _computed(ChatRequest, ChatCompletion, content=_STREAMS_TOO),
    ("post", "/v1/embeddings"): _computed(EmbeddingRequest, EmbeddingList),
    **dict.fromkeys(
        [("post", path) for path in ("/v1/rerank", "/v2/rerank", "/rerank")],
        _computed(RerankRequest, Ranking),
    ),
    **dict.fromkeys(
        [("post", path) for path in ("/v1/score", "/score")], _computed(ScoreRequest, ScoreList)
    ),
    ("post", "/v1/responses"): _computed(
        ResponsesRequest,
        ResponseObject,
        content=_STREAMS_TOO,
        errors=(404, 409, 507, *_BODY_ERRORS),
    ),
    ("get", "/v1/responses/{response_id}"): _stored(ResponseObject),
    ("delete", "/v1/responses/{response_id}"): _stored(DeletedResponse, 507),
    ("post", "/v1/responses/{response_id}/cancel"): _stored(ResponseObject, 507),
    ("get", "/v1/responses/{response_id}/input_items"): _stored(ItemPage, query=ITEMS_QUERY),
    ("post", "/v1/messages"): _computed(
        MessagesRequest, MessageObject, content=_STREAMS_TOO, **_ANTHROPIC
    ),
    ("post", "/v1/messages/count_tokens"): _computed(
        CountTokensRequest, TokensCount, takes_targets=False, **_ANTHROPIC
    ),
    ("post", "/v1/completions/render"): _encoded(CompletionRequest, list[PromptObject], 404),
    ("post", "/v1/chat/completions/render"): _encoded(ChatRequest, PromptObject, 404),
    ("get", "/v1/models"): Operation(answers=ModelList),
    ("get", "/v1/models/{model_id}"): Operation(answers=ModelObject, errors=(400, 404)),
    ("post", "/v1/files"): Operation(
        is_upload=True, answers=FileObject, errors=(404, 507, *_BODY_ERRORS)
    ),
    ("get", "/v1/files"): _stored(FilePage, query=FILE_QUERY),
    ("get", "/v1/files/{file_id}"): _stored(FileObject),
    ("get", "/v1/files/{file_id}/content"): _stored(None, content=(_BYTES,)),
    ("delete", "/v1/files/{file_id}"): _stored(DeletedFile, 409, 507),
    ("post", "/v1/batches"): _encoded(BatchRequest, BatchObject, 404, 409, 507),
    ("get", "/v1/batches"): _stored(BatchPage, query=BATCH_QUERY),
    ("get", "/v1/batches/{batch_id}"): _stored(BatchObject),
    ("post", "/v1/batches/{batch_id}/cancel"): _stored(BatchObject, 409, 507),
    ("post", "/generate"): _computed(GenerateRequest, GenerateAnswer, **_TGI),
    ("post", "/generate_stream"): _computed(GenerateRequest, None, content=(_SSE,), **_TGI),
    ("post", "/tokenize"): _encoded(TokenizeRequest, list[TokenSpan]),
    ("post", "/detokenize"): _encoded(DetokenizeRequest, DetokenizeResponse),
    ("get", "/"): Operation(),
    ("post", "/"): _computed(GenerateRequest, list[GenerateAnswer], content=_STREAMS_TOO, **_TGI),
    ("get", "/livez"): _HEALTH,
    ("get", "/readyz"): _HEALTH,
    ("get", "/health"): _HEALTH,
    ("get", "/load"): Operation(errors=(503,)),
    ("get", "/metrics"): Operation(content=(_TEXT,), errors=(503,)),
    ("get", "/version"): Operation(),
    ("get", "/v1/requests/{request_id}/timeline"): Operation(
        answers=TimelineObject, errors=(400, 404, 429, 503, 504)
    ),
    ("get", "/dashboard"): Operation(content=(_HTML,)),
    ("get", "/dashboard/events"): Operation(content=(_SSE,), errors=(503,)),
    ("get", "/debug/kv"): Operation(answers=KVMapObject, errors=(400, 429, 503, 504)),
}

_STATUSES = {
    400: "The request cannot be served as it is; the error names the field.",
    401: "A valid API key is needed.",
    403: "The key is not an operator's; without keys: a web page of another origin asks.",
    404: "There is no model, file, batch or response of this name.",
    408: "The request was not sent in time, or not done after its own timeout.",
    409: "That cannot be done any more, or not yet.",
    413: "The body is too large.",
    415: "The Content-Type is not the one that is wanted, or the body is compressed.",
    421: "The Host header names another machine.",
    429: "Too many requests are waiting; Retry-After says when to try again.",
    431: "The headers are too many or too large.",
    500: "The server has failed.",
    503: "The server is starting, draining or has lost its workers; see Retry-After.",
    504: "The router does not answer.",
    507: "The batch store is full.",
}
_ANYWHERE = (421, 431, 500)


def describe(app: FastAPI, *, needs_keys: bool) -> None:
    """Make the application answer with this schema."""

    def build() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _build(app, needs_keys=needs_keys)
        return app.openapi_schema

    app.openapi = build  # type: ignore[method-assign]  # FastAPI's own way to extend it


def _build(app: FastAPI, *, needs_keys: bool) -> dict[str, Any]:
    schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
    models = _Models()
    for path, methods in list(schema["paths"].items()):
        for method, described in methods.items():
            operation = OPERATIONS[method, path.replace(":path}", "}")]
            errors = _errors(path, operation, needs_keys)
            in_path = [each for each in described.get("parameters", ()) if each["in"] == "path"]
            own = models.describe(operation, errors=errors)
            if parameters := [*in_path, *own.pop("parameters", ())]:
                own["parameters"] = parameters
            described.update(own)
            if needs_keys and access_to(path) is not Access.OPEN:
                described["security"] = [{"key": []}, {"x-api-key": []}]
    schema["components"] = {"schemas": models.definitions}
    if needs_keys:
        schema["components"]["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    return schema


def _errors(path: str, operation: Operation, needs_keys: bool) -> set[int]:
    statuses = {*_ANYWHERE, *operation.errors}
    access = access_to(path)
    if needs_keys and access is not Access.OPEN:
        statuses |= {401, 403} if access is Access.OPERATOR else {401}
    if not needs_keys:
        statuses.add(403)
    return statuses


class _Models:
    """Collects the schemas of models that operations refer to."""

    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}

    def describe(self, operation: Operation, *, errors: set[int]) -> dict[str, Any]:
        """Return body and answers of an operation."""
        content = {
            media_type: self._content(media_type, operation) for media_type in operation.content
        }
        responses: dict[str, Any] = {"200": {"description": "The answer.", "content": content}}
        error = {_JSON: {"schema": self._schema(operation.error, "serialization")}}
        for status in sorted(errors):
            responses[str(status)] = {"description": _STATUSES[status], "content": error}
        if operation.unavailable:
            responses["503"] = {"description": "No; the reason is given.", "content": content}
        described: dict[str, Any] = {"responses": responses}
        if operation.takes_targets:
            described["parameters"] = header_schemas()
        if operation.query:
            described["parameters"] = [
                {"name": name, "in": "query", "required": False, "schema": schema}
                for name, schema in operation.query.items()
            ]
        if operation.is_upload:
            form = {"multipart/form-data": {"schema": UPLOAD_FORM}}
            described["requestBody"] = {"required": True, "content": form}
        if operation.request is not None:
            body = {"schema": self._schema(operation.request, "validation")}
            described["requestBody"] = {"required": True, "content": {_JSON: body}}
        return described

    def _content(self, media_type: str, operation: Operation) -> dict[str, Any]:
        if media_type == _JSON:
            answers = operation.answers
            return {"schema": self._schema(answers, "serialization") if answers else _OBJECT}
        return {"schema": _EVENTS if media_type == _SSE else {"type": "string"}}

    def _define(self, name: str, definition: dict[str, Any]) -> None:
        assert self.definitions.setdefault(name, definition) == definition, f"two models {name}"

    def _schema(self, model: Any, mode: JsonSchemaMode) -> dict[str, Any]:
        """Return a reference to a model, or the schema of any other type."""
        schema = TypeAdapter(model).json_schema(ref_template=_REF, mode=mode)
        for name, definition in schema.pop("$defs", {}).items():
            self._define(name, definition)
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            return schema
        self._define(model.__name__, schema)
        return {"$ref": _REF.format(model=model.__name__)}
