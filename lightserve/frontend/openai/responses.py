"""/v1/responses: create; with a store also retrieve, delete, and list what was asked."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from fastapi import APIRouter, Request
from msgspec.json import decode, encode
from pydantic import Field
from starlette.responses import JSONResponse, Response

from lightserve.batches.access import Store
from lightserve.batches.records import NewResponse
from lightserve.errors import InvalidRequest
from lightserve.frontend.columns import TextBuffer, json_array, json_object, json_text
from lightserve.frontend.completion import (
    Choices,
    Completion,
    RaisedSLOObject,
    TextDelta,
    raised_slo,
)
from lightserve.frontend.errors import RequestFailed, renamed
from lightserve.frontend.json_body import BODY_BYTES_KEY, StrictModel, show
from lightserve.frontend.middleware import caller_of
from lightserve.frontend.openai.chat import ChatRequest, answer_chat
from lightserve.frontend.openai.files import (
    Page,
    check_choice,
    in_store,
    page_object,
    read_limit,
    read_query,
)
from lightserve.frontend.openai.messages import AnswerPart, parts_of
from lightserve.frontend.openai.output_parser import OutputParser, ParserOptions
from lightserve.frontend.openai.responses_request import CHAT_NAMES, ResponsesRequest
from lightserve.frontend.response import KEEP_ALIVE, BeforeEnd, sse_event
from lightserve.frontend.service import Service
from lightserve.types import FinishReason

log = logging.getLogger(__name__)

MAX_ITEMS_LISTED = 100
DEFAULT_ITEMS_LISTED = 20
_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}
"""Of ids of items, by the parts that they have."""
_EVENTS = {
    "text": "response.output_text",
    "reasoning": "response.reasoning_text",
    "call": "response.function_call_arguments",
}
"""Of their texts: with `.delta` and `.done`."""


class Item:
    """An item of the output as it grows."""

    def __init__(self, part: AnswerPart) -> None:
        self.kind = part.kind
        self.id = f"{_PREFIXES[part.kind]}_{uuid.uuid4().hex}"
        self.text = TextBuffer()
        self._call = {"call_id": part.call_id, "name": part.name}

    def content(self, text: Any) -> dict[str, Any]:
        """Return the one part of its content; `text` may come in pieces."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def fields(self, status: str, *, text: Any, content: Any) -> dict[str, Any]:
        """Return it; of a call `text` counts, otherwise `content`."""
        if self.kind == "call":
            kind = {"type": "function_call", **self._call, "arguments": text}
        elif self.kind == "reasoning":
            kind = {"type": "reasoning", "summary": [], "content": content}
        else:
            kind = {"type": "message", "role": "assistant", "content": content}
        return {"id": self.id, "status": status, **kind}

    def whole(self, status: str) -> Iterator[bytes]:
        """Yield it as JSON."""
        content = json_array([json_object(self.content(json_text(self.text.parts())))])
        text = json_text(self.text.parts())
        return json_object(self.fields(status, text=text, content=content))


class ResponsesWriter:
    """OpenAI's response objects, and the events of their streams."""

    wants_pieces = False
    keep_alive = KEEP_ALIVE
    keeps_streamed = True  # what was said is said again as a whole

    def __init__(
        self, service: Service, body: ResponsesRequest, chat: ChatRequest, *, is_kept: bool
    ) -> None:
        self.is_kept = is_kept
        """Whether it says so: it can be retrieved."""
        self.request_id = f"resp_{uuid.uuid4().hex}"
        self.parser_options = ParserOptions()
        """What to look for in the output; set before it begins."""
        self._echoed = _echoed(service, body, chat)
        self._created_s = int(time.time())
        self._completed_s: int | None = None
        self._parser: OutputParser | None = None
        self._items: list[Item] = []
        self._num_events = 0
        self._frame = (b"", b"")
        """Of deltas of the last item: what is before the text, and between it and the number."""

    def opening(self) -> bytes:
        """Return the events before the first text."""
        response = self._response("in_progress", None, [])
        return b"".join(
            self._event(f"response.{kind}", response=response)
            for kind in ("created", "in_progress")
        )

    def delta(self, index: int, delta: TextDelta, choices: Choices) -> Iterator[bytes]:
        """Yield the events of some news."""
        for part in self._parts(delta):
            if self._begins(part):
                if self._items:
                    yield self._item_end("completed")
                yield self._item_start(part)
            if part.text:
                self._items[-1].text.append(part.text)
                yield self._text_event(part.text)
        if delta.finish_reason is not None and self._items:
            yield self._item_end(_status(choices.first))

    def closing(self, choices: Choices) -> bytes:
        """Return the last event, with all of the response."""
        status = _status(choices.first)
        return self._event(
            f"response.{status}",
            response=self._response(status, choices.first, self._plain(status)),
        )

    def failing(self, failure: InvalidRequest | RequestFailed) -> bytes:
        """Return the event of a failure."""
        begun = b"" if self._num_events else self.opening()
        response = self._response("failed", None, self._plain("incomplete"))
        response["error"] = {"code": _error_code(failure), "message": failure.message}
        return begun + self._event("response.failed", response=response)

    def keep(self, index: int, delta: TextDelta) -> None:
        """Take in some news for `whole`."""
        for part in self._parts(delta):
            if self._begins(part):
                self._items.append(Item(part))
            self._items[-1].text.append(part.text)

    def whole(self, choices: Choices) -> Iterator[bytes]:
        """Yield the response object."""
        status = _status(choices.first)
        output = json_array(
            item.whole(status if item is self._items[-1] else "completed") for item in self._items
        )
        return json_object(self._response(status, choices.first, output))

    def _parts(self, delta: TextDelta) -> Iterator[AnswerPart]:
        if self._parser is None:
            self._parser = OutputParser(self.parser_options)
        return parts_of(self._parser, delta)

    def _begins(self, part: AnswerPart) -> bool:
        return bool(part.call_id) or not self._items or self._items[-1].kind != part.kind

    # ------------------------------------------------------------------ events

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return b"event: " + kind.encode() + b"\n" + sse_event(encode(event))

    def _place(self) -> dict[str, Any]:
        """Return what events of the last item's text say of where it is."""
        item = self._items[-1]
        place: dict[str, Any] = {"item_id": item.id, "output_index": len(self._items) - 1}
        if item.kind != "call":
            place["content_index"] = 0
        return place | ({"logprobs": []} if item.kind == "text" else {})

    def _part_place(self) -> dict[str, Any]:
        """Return the same for events of the part of content that has it."""
        return {name: value for name, value in self._place().items() if name != "logprobs"}

    def _item_start(self, part: AnswerPart) -> bytes:
        item = Item(part)
        self._items.append(item)
        index = len(self._items) - 1
        fields = item.fields("in_progress", text="", content=[])
        events = self._event("response.output_item.added", output_index=index, item=fields)
        if item.kind != "call":
            begun = item.content("")
            events += self._event("response.content_part.added", **self._part_place(), part=begun)
        self._frame = self._text_frame()
        return events

    def _text_frame(self) -> tuple[bytes, bytes]:
        kind = f"{_EVENTS[self._items[-1].kind]}.delta"
        event = encode({"type": kind, **self._place(), "delta": ""})
        head = b"event: " + kind.encode() + b"\ndata: " + event.removesuffix(b'""}')
        return head, b',"sequence_number":'

    def _text_event(self, text: str) -> bytes:
        head, between = self._frame
        number = str(self._num_events).encode()
        self._num_events += 1
        return head + encode(text) + between + number + b"}\n\n"

    def _item_end(self, status: str) -> bytes:
        item, place, text = self._items[-1], self._place(), str(self._items[-1].text)
        kind = f"{_EVENTS[item.kind]}.done"
        if item.kind == "call":
            events = self._event(kind, **place, arguments=text)
        else:
            events = self._event(kind, **place, text=text)
            part = item.content(text)
            events += self._event("response.content_part.done", **self._part_place(), part=part)
        fields = item.fields(status, text=text, content=[item.content(text)])
        index = place["output_index"]
        return events + self._event("response.output_item.done", output_index=index, item=fields)

    def _plain(self, status: str) -> list[dict[str, Any]]:
        """Return the output as it has been streamed."""
        output = []
        for item in self._items:
            own, text = status if item is self._items[-1] else "completed", str(item.text)
            output.append(item.fields(own, text=text, content=[item.content(text)]))
        return output

    # ------------------------------------------------------------------ the response

    def _response(self, status: str, completion: Completion | None, output: Any) -> dict[str, Any]:
        """Return the response; `completion`: what it has come to, once it is over."""
        is_done = status == "completed"
        if is_done and self._completed_s is None:
            self._completed_s = int(time.time())
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        response = {
            "id": self.request_id,
            "object": "response",
            "created_at": self._created_s,
            "completed_at": self._completed_s if is_done else None,
            "status": status,
            "error": None,
            "incomplete_details": reason,
            **self._echoed,
            "store": self.is_kept,
            "output": output,
            "usage": None if completion is None else self._usage(completion),
        }
        if completion is not None and (slo := raised_slo([completion])) is not None:
            response["slo"] = slo
        return response

    def _usage(self, completion: Completion) -> dict[str, Any]:
        usage = completion.usage
        sizes = [(item.kind, item.text.num_bytes) for item in self._items]
        num_bytes = sum(size for _, size in sizes)
        share = sum(size for kind, size in sizes if kind == "reasoning") / max(1, num_bytes)
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": round(share * usage.completion_tokens)},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def _status(completion: Completion) -> str:
    return "incomplete" if completion.finish_reason is FinishReason.LENGTH else "completed"


def _error_code(failure: InvalidRequest | RequestFailed) -> str:
    if isinstance(failure, InvalidRequest):
        return "invalid_prompt"
    return "rate_limit_exceeded" if failure.status == 429 else "server_error"


def _echoed(service: Service, body: ResponsesRequest, chat: ChatRequest) -> dict[str, Any]:
    """Return what a response says of its request."""
    defaults = service.model.sampling_defaults
    text = body.text
    form = (
        {"type": "text"}
        if text is None or text.format is None
        else text.format.model_dump(by_alias=True, exclude_none=True)
    )
    choice = body.tool_choice
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": body.model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": chat.used_tier,
        "temperature": defaults.temperature if body.temperature is None else body.temperature,
        "text": {"format": form, "verbosity": text and text.verbosity},
        "tool_choice": "auto"
        if choice is None
        else (choice if isinstance(choice, str) else choice.model_dump()),
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "top_p": defaults.top_p if body.top_p is None else body.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


def responses_router(service: Service, *, is_for_lines: bool = False) -> APIRouter:
    """Return the route that answers; what lines of batches are answered is not kept."""
    router = APIRouter()
    has_store = service.store is not None
    keeps = has_store and not is_for_lines

    @router.post("/v1/responses")
    async def create_response(request: Request) -> Response:
        """Answer a conversation, as a list of items."""
        asked = await service.bodies.read(request, ResponsesRequest)
        asked.check(keeps=keeps, has_store=has_store)
        body = await _continued(service, request, asked)
        size: int = request.scope[BODY_BYTES_KEY]
        with renamed(CHAT_NAMES):
            chat = await service.encoder.run(body.as_chat, size=size)
        is_kept = keeps and body.store is not False
        writer = ResponsesWriter(service, body, chat, is_kept=is_kept)
        keep = _keeper(service, request, asked, writer) if is_kept else None
        return answer_chat(service, request, chat, writer, names=CHAT_NAMES, before_end=keep)

    return router


async def _continued(
    service: Service, request: Request, asked: ResponsesRequest
) -> ResponsesRequest:
    """Return a request with the conversation that it goes on from.

    Raises:
        InvalidRequest: that is not there, or too long.
        RequestFailed: the store cannot be read.
    """
    previous_id = asked.previous_response_id
    if previous_id is None:
        return asked
    key_name, most = caller_of(request.scope).name, service.config.max_body_bytes
    before = await in_store(
        service,
        lambda store: store.responses.conversation(
            key_name, previous_id, time.time(), max_bytes=most
        ),
    )
    num_bytes = sum(map(len, before))
    request.scope[BODY_BYTES_KEY] += num_bytes
    return await service.encoder.run(lambda: asked.continuing(before), size=num_bytes)


def _keeper(
    service: Service, request: Request, asked: ResponsesRequest, writer: ResponsesWriter
) -> BeforeEnd:
    """Return what keeps a response that has come to its end.

    Where the request did not say that it has to be kept, one that cannot be says so, and is
    answered all the same.
    """
    key_name, config = caller_of(request.scope).name, service.config

    async def keep(choices: Choices) -> None:
        def add(store: Store) -> None:
            new = NewResponse(
                id=writer.request_id,
                key_name=key_name,
                previous_id=asked.previous_response_id,
                input=encode(asked.own_items()),
                response=b"".join(writer.whole(choices)),
            )
            ttl_s, quota = config.responses_ttl_s, config.batch_max_stored_bytes
            store.responses.add(new, time.time(), ttl_s=ttl_s, quota=quota)

        try:
            await in_store(service, add)
        except (InvalidRequest, RequestFailed) as failure:
            if asked.store:
                raise
            writer.is_kept = False
            log.warning("response %s was not kept: %s", writer.request_id, failure.code)

    return keep


ITEMS_QUERY: Mapping[str, Any] = {
    "order": {"enum": ["asc", "desc"]},
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_ITEMS_LISTED},
    "after": {"type": "string"},
}
"""Schemas of what a list of items is asked with."""


def stored_responses_router(service: Service) -> APIRouter:
    """Return the routes of responses that were kept."""
    router = APIRouter()

    @router.get("/v1/responses/{response_id}")
    async def retrieve_response(request: Request, response_id: str) -> Response:
        """Return a response as it was answered."""
        read_query(request, ())
        key_name = caller_of(request.scope).name
        body = await in_store(
            service, lambda store: store.responses.get(key_name, response_id, time.time())
        )
        return Response(body, media_type="application/json")

    @router.delete("/v1/responses/{response_id}")
    async def delete_response(request: Request, response_id: str) -> Response:
        """Delete a response."""
        key_name = caller_of(request.scope).name
        await in_store(
            service, lambda store: store.responses.delete(key_name, response_id, time.time())
        )
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    @router.get("/v1/responses/{response_id}/input_items")
    async def list_input_items(request: Request, response_id: str) -> JSONResponse:
        """List what was asked, the last first, without what came before."""
        query = read_query(request, ("limit", "order", "after"))
        limit = read_limit(query, default=DEFAULT_ITEMS_LISTED, most=MAX_ITEMS_LISTED)
        check_choice(query, "order", ("desc", "asc"))
        key_name = caller_of(request.scope).name
        found = await in_store(
            service, lambda store: store.responses.input(key_name, response_id, time.time())
        )
        items: list[dict[str, Any]] = decode(found)
        if query.get("order") != "asc":
            items.reverse()
        if (after := query.get("after")) is not None:
            ids = [item["id"] for item in items]
            if after not in ids:
                raise InvalidRequest(f"after: there is no item {show(after)}", param="after")
            items = items[ids.index(after) + 1 :]
        return page_object(items[:limit], len(items) > limit)

    return router


# ----------------------------------------------------------------------
# What the route answers, for the OpenAPI schema; a test holds real answers against it.


class InputTokensDetails(StrictModel):
    """Of the tokens read."""

    cached_tokens: int = Field(ge=0)
    cache_write_tokens: Literal[0]


class OutputTokensDetails(StrictModel):
    """Of the tokens written."""

    reasoning_tokens: int = Field(ge=0)
    """By the share of the text."""


class ResponseUsage(StrictModel):
    """Tokens read and written."""

    input_tokens: int = Field(ge=1)
    input_tokens_details: InputTokensDetails
    output_tokens: int = Field(ge=0)
    output_tokens_details: OutputTokensDetails
    total_tokens: int = Field(ge=1)


class OutputItemObject(StrictModel):
    """An item of the output: what there is besides `type` follows from that."""

    type: Literal["message", "reasoning", "function_call"]
    id: str
    status: Literal["completed", "incomplete"]
    role: Literal["assistant"] | None = None
    content: list[dict[str, Any]] | None = None
    summary: list[dict[str, Any]] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None


class IncompleteDetails(StrictModel):
    """Why an answer was cut off."""

    reason: Literal["max_output_tokens"]


class ResponseObject(StrictModel):
    """The answer of /v1/responses; what it repeats of its request is as it was there."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: IncompleteDetails | None
    output: list[OutputItemObject]
    usage: ResponseUsage
    background: Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: Literal["default", "priority", "flex"]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, str]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["auto", "disabled"]
    user: str | None
    slo: RaisedSLOObject | None = None


class DeletedResponse(StrictModel):
    """What is left of a response."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ItemPage(Page):
    """Of what was asked."""

    data: list[dict[str, Any]]
