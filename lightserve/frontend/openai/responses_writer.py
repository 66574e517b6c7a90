"""Response objects and the events of their streams, and what they are for the OpenAPI schema."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any, Literal

from msgspec.json import encode
from pydantic import Field

from lightserve.errors import InvalidRequest
from lightserve.frontend.columns import TextBuffer, json_array, json_object, json_text
from lightserve.frontend.completion import (
    Choices,
    Completion,
    RaisedSLOObject,
    TextDelta,
    raised_slo,
)
from lightserve.frontend.errors import RequestFailed
from lightserve.frontend.json_body import StrictModel
from lightserve.frontend.openai.chat import ChatRequest, ConversationWriter
from lightserve.frontend.openai.messages import AnswerPart, parts_of
from lightserve.frontend.openai.responses_request import ResponsesRequest
from lightserve.frontend.response import sse_event
from lightserve.frontend.service import Service
from lightserve.types import FinishReason

_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}
"""Prefixes of the ids of items, by the parts of these."""
_EVENTS = {
    "text": "response.output_text",
    "reasoning": "response.reasoning_text",
    "call": "response.function_call_arguments",
}
"""Events of their texts, without `.delta` and `.done`."""


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


class ResponsesWriter(ConversationWriter):
    """OpenAI's response objects, and the events of their streams."""

    keeps_streamed = True  # what was said is said again as a whole

    def __init__(
        self, service: Service, body: ResponsesRequest, chat: ChatRequest, *, is_kept: bool
    ) -> None:
        super().__init__()
        self.is_kept = is_kept
        """Whether it says so: it can be retrieved."""
        self.request_id = f"resp_{uuid.uuid4().hex}"
        self._echoed = _echoed(service, body, chat)
        self._created_s = int(time.time())
        self._completed_s: int | None = None
        self._items: list[Item] = []
        self._num_events = 0
        self._frame = (b"", b"")
        """Bytes of the last item's deltas: before the text, and between it and the number."""

    def queued(self) -> bytes:
        """Return the response object before anything has begun."""
        return encode(self._response("queued", None, []))

    def opening(self) -> bytes:
        """Return the events before the first text."""
        response = self._response("in_progress", None, [])
        return b"".join(
            self._event(f"response.{kind}", response=response)
            for kind in ("created", "in_progress")
        )

    def delta(self, index: int, delta: TextDelta, choices: Choices) -> Iterator[bytes]:
        """Yield the events of some news."""
        for part in parts_of(self.parts(0, delta)):
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
        for part in parts_of(self.parts(0, delta)):
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
        return {
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
            **({} if completion is None else raised_slo([completion])),
        }

    def _usage(self, completion: Completion) -> dict[str, Any]:
        usage = completion.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
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
    defaults = service.model.sampling_defaults.params
    text = body.text
    form = (
        {"type": "text"}
        if text is None or text.format is None
        else text.format.model_dump(mode="json", by_alias=True, exclude_none=True)
    )
    choice = body.tool_choice
    return {
        "background": body.background or False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": body.model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "flex" if body.background else chat.used_tier,
        "temperature": defaults.temperature if body.temperature is None else body.temperature,
        "text": {"format": form, "verbosity": text and text.verbosity},
        "tool_choice": "auto"
        if choice is None
        else (choice if isinstance(choice, str) else choice.model_dump()),
        "tools": [tool.model_dump(mode="json") for tool in body.tools or ()],
        "top_p": defaults.top_p if body.top_p is None else body.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


# ----------------------------------------------------------------------
# What the route answers, for the OpenAPI schema; a test holds real answers against it.


class InputTokensDetails(StrictModel):
    """Details of the tokens read."""

    cached_tokens: int = Field(ge=0)
    cache_write_tokens: Literal[0]


class OutputTokensDetails(StrictModel):
    """Details of the tokens written."""

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


class ResponseError(StrictModel):
    """Why there is no answer."""

    code: Literal["server_error", "invalid_prompt"]
    message: str


class ResponseObject(StrictModel):
    """The answer of /v1/responses; what it repeats of its request is as it was there."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    output: list[OutputItemObject]
    usage: ResponseUsage | None
    background: bool
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
