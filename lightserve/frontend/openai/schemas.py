"""What the OpenAI routes answer, for the OpenAPI schema; a test holds real answers against it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from lightserve.frontend.json_body import StrictModel
from lightserve.frontend.raised_targets import RaisedSLOObject

Finish = Literal["stop", "length", "tool_calls"]
Tier = Literal["default", "priority", "flex"]


class PromptTokensDetails(StrictModel):
    """Of the prompt's tokens."""

    cached_tokens: int = Field(ge=0)


class UsageObject(StrictModel):
    """Tokens read and written; a prompt counts once, however many choices it has."""

    prompt_tokens: int = Field(ge=1)
    completion_tokens: int = Field(ge=0)
    total_tokens: int = Field(ge=1)
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobsObject(StrictModel):
    """One entry per token; `text_offset` in characters."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(StrictModel):
    """Of a token of the prompt, or of one that could have been in its place."""

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
    """The same; also the model's own token at the end."""
    token_ids: list[int] | None
    """Of the output, with the one that ended it; with `return_token_ids`."""


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
    """Of one choice."""

    content: list[ChatLogprob]
    refusal: None


class AssistantMessage(StrictModel):
    """What was generated."""

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
    """What is wrong, in OpenAI's words."""

    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str | None


class ErrorObject(StrictModel):
    """Every answer that is none; also an event of a stream that has begun."""

    error: ErrorDetailObject
