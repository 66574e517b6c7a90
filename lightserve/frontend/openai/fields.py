"""Fields that many clients always send, accepted only at the values that change nothing.

The tables below are the documentation: any other value is a 400 that names the field. A value
that would change the answer is never accepted and ignored. Null is always accepted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum, auto
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import AfterValidator, BeforeValidator, Field, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError
from starlette.requests import Request

from lightserve.config.fields import flag_name
from lightserve.errors import InvalidRequest
from lightserve.frontend.json_body import UNSUPPORTED_VALUE, Integer, StrictModel, printable, show
from lightserve.frontend.request_options import (
    MAX_BAD_WORD_TOKENS,
    MAX_STOP_STRINGS,
    MaxTokens,
    NumChoices,
    NumLogprobs,
    OutputOptions,
    Prepared,
    Priority,
    Seconds,
    ServiceLevel,
    SLOFields,
    StopString,
    StopTokenIds,
    check_token_ids,
    given_sampling,
    new_submit,
    resolve_sampling,
    resolve_service_level,
    sampling_model,
)
from lightserve.frontend.service import Service
from lightserve.frontend.structured_output import (
    ALIASES,
    ConstraintSpec,
    Options,
    ResponseFormat,
    SchemaOrText,
    StructuredOutputs,
    Text,
    resolve_constraint,
    spec_of_format,
    spec_of_outputs,
    specs_of_aliases,
)
from lightserve.messages.common import Constraint, Thinking, TokenSegment, pack_int32
from lightserve.messages.images import MAX_PIXEL_BYTES, Image, salted
from lightserve.types import GivenBy, RequestClass, SamplingParams

NoEffect = Mapping[str, tuple[Any, ...] | None]
"""Names of fields, and their values besides null that change nothing; None: every value."""

_COMMON: NoEffect = {
    # vLLM's. Special tokens are never part of an answer's text.
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    # SGLang's, which its router and vLLM's write into every body, asked or not.
    "no_stop_trim": (False,),
    "return_hidden_states": (False,),
}
CHAT_NO_EFFECT: NoEffect = {
    **_COMMON,
    "store": (False,),
    "modalities": (["text"],),
    "audio": (),
    "functions": (),
    "function_call": (),
    "web_search_options": (),
    "add_special_tokens": (False,),  # the template writes them
    "echo": (False,),
    # Reasoning is told apart, and streamed, wherever there is a parser for it.
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "include_reasoning": (True,),
}
COMPLETION_NO_EFFECT: NoEffect = {**_COMMON, "add_special_tokens": (True,)}
MESSAGE_NO_EFFECT: NoEffect = {
    # What an answer's message has, as clients send it back in the next turn.
    "refusal": (),
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "parsed": None,
}


class NoEffectModel(StrictModel):
    """A strict model that also takes the fields of a table, at its values, and drops them."""

    no_effect: ClassVar[NoEffect] = {}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Return the model's JSON schema, the fields of the table included."""
        schema = handler(core_schema)
        fields = {
            name: {} if values is None else {"enum": [*values, None]}
            for name, values in cls.no_effect.items()
        }
        handler.resolve_ref_schema(schema).setdefault("properties", {}).update(fields)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _drop_no_effect(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        for field in cls.no_effect.keys() & body.keys():
            _check(field, body[field], cls.no_effect[field])
        return {key: value for key, value in body.items() if key not in cls.no_effect}


def _check(field: str, value: Any, allowed: tuple[Any, ...] | None) -> None:
    if (
        value is None
        or allowed is None
        or any(type(v) is type(value) and v == value for v in allowed)
    ):
        return
    shown = " or ".join(json.dumps(accepted) for accepted in (*allowed, None))
    context = {"field": field, "complaint": f"is not supported yet except as {shown}"}
    raise PydanticCustomError(UNSUPPORTED_VALUE, "{complaint}", context)


# ----------------------------------------------------------------------
# What the OpenAI routes share: common fields, and the requests that they become.


class UsageChunks(Enum):
    """Which chunks of a stream have the usage."""

    NONE = auto()
    LAST = auto()
    """One of its own, after all others."""
    ALL = auto()
    """That, and every other, for what its choice has used so far."""


class StreamOptions(StrictModel):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None
    """Chunks are never padded."""


DAY_S = 86_400.0
MAX_KEY_CHARS = 512
MAX_METADATA = 16

Key = Annotated[str, Field(max_length=MAX_KEY_CHARS)]
"""Who or what sends a request, for clients to choose."""
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Key], Field(max_length=MAX_METADATA)
]


StoredId = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(printable)]
"""Id of an object in the store."""


def _kept(value: int) -> int:
    if value == 0:
        raise ValueError("must be -1 or at least 1, got 0")
    return value


NumKept = Annotated[Integer, Field(ge=-1, le=2**31 - 1), AfterValidator(_kept)]
"""Tokens at a prompt's end; -1: what the context leaves."""


def _stop_list(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise ValueError(f"must be a string or a list of strings, got {show(value)}")
    return [value] if isinstance(value, str) else value


_StopList = Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)]
StopStrings = Annotated[
    _StopList, BeforeValidator(_stop_list, json_schema_input_type=StopString | _StopList)
]


class ServedFields(NoEffectModel):
    """Fields of everything that is computed; null is the same as absent."""

    default_tier: ClassVar[str] = "default"
    model: str
    service_tier: Literal["auto", "default", "priority", "flex"] | None = None
    slo: SLOFields | None = None
    priority: Priority | None = None
    timeout: Seconds | None = None
    user: Key | None = None

    @property
    def used_tier(self) -> str:
        """The tier that the response states."""
        return self.default_tier if self.service_tier in (None, "auto") else str(self.service_tier)

    @property
    def request_class(self) -> RequestClass:
        """The kind of traffic: `flex` is best-effort, everything else real-time."""
        return RequestClass.BE if self.used_tier == "flex" else RequestClass.RT

    def service_level(self, service: Service, request: Request) -> ServiceLevel:
        """Return how it is to be served. Raises InvalidRequest."""
        return resolve_service_level(
            request,
            service.config,
            request_class=self.request_class,
            slo=self.slo,
            priority=self.priority,
            timeout_s=self.timeout,
        )


class RequestFields(ServedFields, sampling_model(GivenBy.RESPONSES)):  # type: ignore[misc]
    """Fields of everything that has tokens generated."""

    stream: bool | None = None
    safety_identifier: Key | None = None
    prompt_cache_key: Key | None = None
    prompt_cache_retention: Literal["in-memory", "in_memory", "24h"] | None = None
    metadata: Metadata | None = None


class CommonFields(RequestFields, sampling_model(GivenBy.OPENAI)):  # type: ignore[misc]
    """Fields of both completions and chat completions."""

    max_tokens: MaxTokens | None = None
    truncate_prompt_tokens: NumKept | None = None
    n: NumChoices | None = None
    stop: StopStrings | None = None
    stop_token_ids: StopTokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: NumLogprobs | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: Text | None = None
    guided_grammar: Text | None = None
    guided_choice: Options | None = None
    regex: Text | None = None
    ebnf: Text | None = None
    stream_options: StreamOptions | None = None

    @property
    def num_choices(self) -> int:
        """Completions of each prompt."""
        return self.n or 1

    @property
    def echoes(self) -> bool:
        """Whether each completion begins with the prompt."""
        return False

    @property
    def prompt_items(self) -> int:
        """Entries for each token of a prompt, besides an echo: its id, log-probabilities."""
        known = 0 if self.prompt_logprobs is None else 1 + self.prompt_logprobs
        return known + bool(self.return_token_ids)

    @property
    def prediction_key(self) -> str:
        """The key that predicts this request's output length: the first one given, or none."""
        named = self.user or self.safety_identifier or self.prompt_cache_key
        return named or (json.dumps(self.metadata, sort_keys=True) if self.metadata else "")

    @property
    def keeps_prompts(self) -> bool:
        """Whether prompts are to stay longer in the prefix cache as a whole."""
        return self.prompt_cache_retention == "24h"

    @property
    def usage_chunks(self) -> UsageChunks:
        """Which chunks of a stream have the usage."""
        options = self.stream_options or StreamOptions()
        if options.include_usage:
            return UsageChunks.ALL if options.continuous_usage_stats else UsageChunks.LAST
        return UsageChunks.NONE

    def check(self, service: Service) -> None:
        """Check what types cannot. Raises InvalidRequest."""
        service.check_model(self.model)
        service.check_generates()
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
        options = self.stream_options
        if options and options.continuous_usage_stats and options.include_usage is None:
            raise InvalidRequest(
                "stream_options.continuous_usage_stats needs include_usage to be given: with true"
                " every chunk has the usage, with false none has",
                param="stream_options.continuous_usage_stats",
            )
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest(
                "prompt_logprobs needs stream to be false: they come with the whole answer",
                param="prompt_logprobs",
            )
        if self.keeps_prompts:
            name = "prompt_cache_retention"
            self.check_retention(service, name, param=name)
        if self.include_stop_str_in_output and not self.stop:
            raise InvalidRequest(
                "include_stop_str_in_output needs stop strings", param="include_stop_str_in_output"
            )

    @staticmethod
    def check_retention(service: Service, name: str, *, param: str) -> None:
        """Check that prefixes can be kept longer than others. Raises InvalidRequest."""
        if not service.config.retains_prefixes:
            raise InvalidRequest(
                f"{name} is not available: this server keeps no prefixes longer than others"
                f" ({flag_name('max_retained_tokens')}, {flag_name('cache_policy')})",
                param=param,
            )

    def check_count(self, service: Service, num_prompts: int) -> None:
        """Check how many completions are asked for. Raises InvalidRequest."""
        limit = service.config.max_completions
        if num_prompts * self.num_choices > limit:
            raise InvalidRequest(
                f"n must be at most {limit // num_prompts} for {num_prompts} prompts, got {self.n}",
                param="n",
            )

    async def resolve_constraint(
        self, service: Service, level: ServiceLevel, other: ConstraintSpec | None = None
    ) -> Constraint | None:
        """Return what the output must satisfy; `other`: what fields of one route ask for.

        Raises:
            InvalidRequest: it cannot be enforced, or not beside other fields.
            RequestFailed: too many constraints are being checked.
        """
        deciding = ("ignore_eos", "min_tokens", "allowed_token_ids", "bad_words")
        return await resolve_constraint(
            [
                other,
                spec_of_format(self.response_format),
                spec_of_outputs(self.structured_outputs),
                *specs_of_aliases({name: getattr(self, name) for name in ALIASES}),
            ],
            service.constraints,
            sharer=level.sharer,
            can_end=bool(service.model.tokenizer.eos_token_ids),
            barred=[name for name in deciding if getattr(self, name)],
            closes=service.config.closed_schemas,
        )

    async def sampling(
        self,
        service: Service,
        *,
        num_logprobs: int | None = None,
        num_prompt_logprobs: int | None = None,
    ) -> SamplingParams:
        """Return the parameters of sampling. Raises InvalidRequest, RequestFailed."""
        given = given_sampling(self)
        if "bad_words" in given:
            given["bad_words"] = tuple(
                await service.encoder.encode_words(
                    given["bad_words"], param="bad_words", max_tokens=MAX_BAD_WORD_TOKENS
                )
            )
        given |= {"num_logprobs": num_logprobs, "num_prompt_logprobs": num_prompt_logprobs}
        model = service.model
        return resolve_sampling(model.sampling_defaults.params, given, vocab_size=model.vocab_size)

    def new_requests(
        self,
        service: Service,
        prompts: Sequence[tuple[Sequence[int], int]],
        params: SamplingParams,
        level: ServiceLevel,
        constraint: Constraint | None = None,
        *,
        end_token_ids: Sequence[int] = (),
        discards_output: bool = False,
        retained: tuple[int, float] = (0, 0.0),
        thinking: Thinking | None = None,
        prediction: bytes = b"",
        images: Sequence[Image] = (),
    ) -> Iterator[Prepared]:
        """Yield one request per completion.

        Args:
            service: of this frontend.
            prompts: token ids, and how many tokens may follow them.
            params: how tokens are drawn.
            level: class, targets, caller.
            constraint: which outputs are allowed.
            end_token_ids: end the output beside those that the model and the body name.
            discards_output: whether the answer shows nothing of the output.
            retained: tokens of a prompt that stay longer in the prefix cache, and for how many
                seconds, unless the body asks for the whole prompt.
            thinking: reasoning with which the output may begin.
            prediction: tokens that the output is expected to be like, see `Submit`.
            images: of the prompt, where there is one.

        Raises:
            InvalidRequest: a token id beyond the vocabulary, min_tokens above the limit, or nothing
                left to draw.
        """
        model = service.model
        stop_ids = check_token_ids(
            self.stop_token_ids or (), vocab_size=model.vocab_size, param="stop_token_ids"
        )
        eos_ids = () if self.ignore_eos else model.tokenizer.eos_token_ids
        _check_any_allowed(params, {*eos_ids, *stop_ids}, vocab_size=model.vocab_size)
        images = salted(images, level.caller.prefix_salt)
        self._check_pixels(images)
        for prompt_token_ids, max_tokens in prompts:
            self._check_min_tokens(params, max_tokens)
            options = OutputOptions(
                prompt_token_ids=prompt_token_ids,
                arrival_s=level.arrival_s,
                stop_strings=tuple(self.stop or ()),
                includes_stop=bool(self.include_stop_str_in_output),
                stop_token_ids=frozenset(stop_ids).difference(eos_ids),
                discards_output=discards_output,
                thinking=thinking,
            )
            segment = TokenSegment(token_ids=pack_int32(prompt_token_ids))
            if self.keeps_prompts:
                retained = len(prompt_token_ids), DAY_S
            for choice in range(self.num_choices):
                request = new_submit(
                    segment,
                    level,
                    max_tokens=max_tokens,
                    eos_token_ids=[*eos_ids, *stop_ids, *end_token_ids],
                    sampling=self._of_choice(params, choice),
                    prediction_key=self.prediction_key,
                    num_retained_tokens=retained[0],
                    retention_s=retained[1],
                    needs_acknowledgement=bool(self.stop),
                    constraint=constraint,
                    thinking=thinking,
                    prediction=prediction,
                    images=images,
                )
                yield request, options

    def _of_choice(self, params: SamplingParams, choice: int) -> SamplingParams:
        """Return the parameters of one of the `n`; the first asks about the prompt for all."""
        params = msgspec.structs.replace(params, choice=choice)
        if choice == 0 or self.echoes:
            return params
        return msgspec.structs.replace(params, num_prompt_logprobs=None)

    def _check_pixels(self, images: Sequence[Image]) -> None:
        num_bytes = self.num_choices * sum(image.num_bytes for image in images)
        if num_bytes > MAX_PIXEL_BYTES:
            raise InvalidRequest(
                f"n times the images must take at most {MAX_PIXEL_BYTES} bytes, as the encoder"
                f" reads them, got {num_bytes}",
                param="n",
            )

    @staticmethod
    def _check_min_tokens(params: SamplingParams, max_tokens: int) -> None:
        if params.min_tokens > max_tokens:
            raise InvalidRequest(
                f"min_tokens must be at most {max_tokens}, the most tokens there may be, got"
                f" {show(params.min_tokens)}",
                param="min_tokens",
            )


def _check_any_allowed(params: SamplingParams, end_ids: set[int], *, vocab_size: int) -> None:
    """Raise InvalidRequest if there may be no token to draw before the output may end."""
    allowed = params.allowed_token_ids
    barred = {token_ids[-1] for token_ids in params.bad_words}
    if allowed and params.min_tokens and end_ids.issuperset(allowed):
        raise InvalidRequest(
            "allowed_token_ids must hold a token that does not end the output, as min_tokens is"
            f" {show(params.min_tokens)}",
            param="allowed_token_ids",
        )
    if not barred:
        return
    barred |= end_ids if params.min_tokens else set()
    if barred.issuperset(allowed) if allowed else len(barred) >= vocab_size:
        raise InvalidRequest(
            "bad_words must leave a token that ends none of them, among those that may be drawn",
            param="bad_words",
        )
