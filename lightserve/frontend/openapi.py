"""The OpenAPI schema, from the models that bodies are read with.

Routes read their bodies by hand (strictly, see `json_body`), so FastAPI does not know them: each
operation's body and answers are named here. Tests hold the schema against every route, against
real answers, and against what the server refuses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import JsonSchemaMode

from lightserve.frontend.access import Access, access_to
from lightserve.frontend.debug_schemas import KVMapObject
from lightserve.frontend.native import GenerateRequest
from lightserve.frontend.native_schemas import GenerateAnswer
from lightserve.frontend.openai import schemas
from lightserve.frontend.openai.chat import ChatRequest
from lightserve.frontend.openai.completions import CompletionRequest
from lightserve.frontend.terms import header_schemas
from lightserve.frontend.tokens import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenSpan,
)

_REF = "#/components/schemas/{model}"
_JSON, _SSE, _TEXT = "application/json", "text/event-stream", "text/plain"
_EVENTS = {"description": "Server-sent events; `docs/api.md` says of what kinds."}
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
    unavailable: bool = False
    """Whether the answer's shape also comes with a 503."""
    takes_targets: bool = False
    """Whether targets may come in headers."""


_BODY_ERRORS = (400, 408, 413, 415, 429, 503)
_STREAMS_TOO = (_JSON, _SSE)
_HEALTH = Operation(unavailable=True)

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("post", "/v1/completions"): Operation(
        request=CompletionRequest,
        answers=schemas.Completion,
        content=_STREAMS_TOO,
        errors=(404, *_BODY_ERRORS),
        takes_targets=True,
    ),
    ("post", "/v1/chat/completions"): Operation(
        request=ChatRequest,
        answers=schemas.ChatCompletion,
        content=_STREAMS_TOO,
        errors=(404, *_BODY_ERRORS),
        takes_targets=True,
    ),
    ("get", "/v1/models"): Operation(answers=schemas.ModelList),
    ("get", "/v1/models/{model_id}"): Operation(answers=schemas.ModelObject, errors=(404,)),
    ("post", "/generate"): Operation(
        request=GenerateRequest, answers=GenerateAnswer, errors=_BODY_ERRORS, takes_targets=True
    ),
    ("post", "/generate_stream"): Operation(
        request=GenerateRequest, content=(_SSE,), errors=_BODY_ERRORS, takes_targets=True
    ),
    ("post", "/tokenize"): Operation(
        request=TokenizeRequest, answers=list[TokenSpan], errors=_BODY_ERRORS
    ),
    ("post", "/detokenize"): Operation(
        request=DetokenizeRequest, answers=DetokenizeResponse, errors=_BODY_ERRORS
    ),
    ("get", "/"): Operation(),
    ("post", "/"): Operation(
        request=GenerateRequest,
        answers=list[GenerateAnswer],
        content=_STREAMS_TOO,
        errors=_BODY_ERRORS,
        takes_targets=True,
    ),
    ("get", "/livez"): _HEALTH,
    ("get", "/readyz"): _HEALTH,
    ("get", "/health"): _HEALTH,
    ("get", "/load"): Operation(errors=(503,)),
    ("get", "/metrics"): Operation(content=(_TEXT,), errors=(503,)),
    ("get", "/version"): Operation(),
    ("get", "/debug/kv"): Operation(answers=KVMapObject, errors=(400, 429, 503, 504)),
}

_STATUSES = {
    400: "The request cannot be served as it is; the error names the field.",
    401: "A valid API key is needed.",
    403: "The key is not an operator's; without keys: a web page of another origin asks.",
    404: "There is no model of this name.",
    408: "The request was not sent in time, or not done after its own timeout.",
    413: "The body is too large.",
    415: "The Content-Type is not application/json, or the body is compressed.",
    421: "The Host header names another machine.",
    429: "Too many requests are waiting; Retry-After says when to try again.",
    431: "The headers are too many or too large.",
    500: "The server has failed.",
    503: "The server is starting, draining or has lost its workers; see Retry-After.",
    504: "The router does not answer.",
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
            described.update(models.describe(operation, errors=errors))
            if needs_keys and access_to(path) is not Access.OPEN:
                described["security"] = [{"key": []}]
    schema["components"] = {"schemas": models.definitions}
    if needs_keys:
        schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
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
        error = {_JSON: {"schema": self._schema(schemas.ErrorObject, "serialization")}}
        for status in sorted(errors):
            responses[str(status)] = {"description": _STATUSES[status], "content": error}
        if operation.unavailable:
            responses["503"] = {"description": "No; the reason is given.", "content": content}
        described: dict[str, Any] = {"responses": responses}
        if operation.takes_targets:
            described["parameters"] = header_schemas()
        if operation.request is not None:
            body = {"schema": self._schema(operation.request, "validation")}
            described["requestBody"] = {"required": True, "content": {_JSON: body}}
        return described

    def _content(self, media_type: str, operation: Operation) -> dict[str, Any]:
        if media_type == _JSON:
            answers = operation.answers
            return {"schema": self._schema(answers, "serialization") if answers else _OBJECT}
        return {"schema": _EVENTS if media_type == _SSE else {"type": "string"}}

    def _schema(self, model: Any, mode: JsonSchemaMode) -> dict[str, Any]:
        """Return a reference to a model, or the schema of any other type."""
        schema = TypeAdapter(model).json_schema(ref_template=_REF, mode=mode)
        self.definitions |= schema.pop("$defs", {})
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            return schema
        self.definitions[model.__name__] = schema
        return {"$ref": _REF.format(model=model.__name__)}
