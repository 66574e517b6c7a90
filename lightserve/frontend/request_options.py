"""Sampling and service level of a request, checked once for all routes."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from pydantic import Field, TypeAdapter, create_model
from starlette.datastructures import Headers
from starlette.requests import Request

from lightserve.config import ServeConfig
from lightserve.config.fields import flag_name
from lightserve.errors import InvalidRequest
from lightserve.frontend.json_body import (
    UNKNOWN_PARAMETER,
    WHOLE_NUMBERS,
    Integer,
    ModelT,
    StrictModel,
    show,
    validated,
)
from lightserve.frontend.middleware import ARRIVAL_KEY, KEYLESS, Caller, caller_of, sharer_of
from lightserve.messages.common import Thinking, TokenSegment
from lightserve.messages.frontend_router import Submit
from lightserve.messages.images import Image, salted
from lightserve.tokenization.tokenizer import GENERATION_CONFIG_FILE, read_ids, read_optional
from lightserve.types import (
    MAX_LOGPROBS,
    MAX_PRIORITY,
    NO_SLO,
    PLAIN_SAMPLING,
    SAMPLING_FIELDS,
    SLO,
    GivenBy,
    RequestClass,
    RequestId,
    SamplingField,
    SamplingParams,
    largest_gap,
)

log = logging.getLogger(__name__)

# ----------------------------------------------------------------------
# Sampling parameters of a request: what it says, else what the model's files say, else OpenAI's.
#
# The limits of every field are here, once, for all routes.


MaxTokens = Annotated[Integer, Field(ge=1)]
MAX_BIASES = 1024
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS = 64, 32
BadWord = Annotated[str, Field(min_length=1, max_length=128, pattern=r"\S")]
StopTokenIds = Annotated[list[int], Field(max_length=64, fail_fast=True), WHOLE_NUMBERS]
NumLogprobs = Annotated[Integer, Field(ge=0, le=MAX_LOGPROBS)]
NumChoices = Annotated[Integer, Field(ge=1, le=16)]
StopString = Annotated[str, Field(min_length=1, max_length=256)]
MAX_STOP_STRINGS = 4


def _type_of(name: str, spec: SamplingField) -> Any:
    """Return the type of a number in request bodies, with its limits."""
    kind = Integer if isinstance(getattr(PLAIN_SAMPLING, name), int) else float
    low: Any = {"gt" if spec.excludes_low else "ge": spec.low}
    return Annotated[kind, Field(le=spec.high, **low)]


SAMPLING_TYPES: dict[str, Any] = {
    **{
        name: _type_of(name, spec) for name, spec in SAMPLING_FIELDS.items() if spec.low is not None
    },
    "logit_bias": Annotated[dict[str, Bias], Field(max_length=MAX_BIASES)],
    "allowed_token_ids": Annotated[
        list[int], Field(min_length=1, max_length=65536, fail_fast=True), WHOLE_NUMBERS
    ],
    "bad_words": Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS, fail_fast=True)],
}
"""Types of the sampling parameters in request bodies, by name."""


def sampling_model(api: GivenBy) -> Any:
    """Return a model with the sampling parameters that one source gives, as a base for bodies."""
    names = [name for name, spec in SAMPLING_FIELDS.items() if api in spec.given_by]
    fields: Any = {name: (SAMPLING_TYPES[name] | None, None) for name in names}
    return create_model(f"SamplingOf{api.name}", __base__=StrictModel, **fields)


def given_sampling(body: StrictModel) -> dict[str, Any]:
    """Return the sampling parameters that a body gives, by name."""
    values = {name: getattr(body, name, None) for name in SAMPLING_FIELDS}
    return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class SamplingDefaults:
    """Values for everything that a request leaves open."""

    params: SamplingParams = PLAIN_SAMPLING
    max_tokens: int | None = None
    """Most tokens of an output; None: the route has its own default."""


_Recommended = sampling_model(GivenBy.MODEL)
SUPPRESSING_BIAS = -100.0
"""Never drawn, unless a constraint leaves nothing else."""
_NO_EFFECT: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), (1,)),
    **dict.fromkeys(("length_penalty", "encoder_repetition_penalty", "guidance_scale"), (1.0,)),
    **dict.fromkeys(("penalty_alpha", "diversity_penalty", "no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "min_length", "min_new_tokens"), (0,)),
    **dict.fromkeys(("early_stopping", "renormalize_logits", "remove_invalid_values"), (False,)),
    **dict.fromkeys(("bad_words_ids", "force_words_ids", "sequence_bias"), ([], {})),
    **dict.fromkeys(("begin_suppress_tokens", "stop_strings", "forced_decoder_ids"), ([],)),
    "exponential_decay_length_penalty": (),
    "max_length": (20,),
    "max_time": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "constraints": ([],),
    "top_h": (),
    # Of a GGUF file's, by its own names.
    **dict.fromkeys(("mirostat", "xtc_probability"), (0,)),
    "sequence": (),
}
"""Further keys that change what transformers writes, and values at which they change nothing."""


def read_sampling_defaults(model_dir: Path, *, vocab_size: int) -> SamplingDefaults:
    """Return what generation_config.json recommends, under the limits of requests.

    A `top_k` above the vocabulary means all of it; `do_sample` false means greedy. Keys that
    change what transformers writes, and nothing here, are named in the log.

    Raises:
        ModelLoadError: a value is outside the limits; names file and key.
    """
    fields = read_optional(model_dir, GENERATION_CONFIG_FILE)
    known = {name: value for name, value in fields.items() if name in _Recommended.model_fields}
    try:
        given = given_sampling(validated(known, _Recommended))
    except InvalidRequest as error:
        name = str(error.param)
        raise fields.error(name, str(error).removeprefix(f"{name} ")) from None
    if not 0 < given.get("top_k", 0) <= vocab_size:
        given["top_k"] = 0
    if not fields.boolean("do_sample", default=True):
        given["temperature"] = 0.0
    suppressed = read_ids(fields, "suppress_tokens")
    if any(token_id >= vocab_size for token_id in suppressed):
        complaint = f"must hold ids below {vocab_size}, got {max(suppressed)}"
        raise fields.error("suppress_tokens", complaint)
    if len(suppressed) > MAX_BIASES:
        raise fields.error("suppress_tokens", f"must have at most {MAX_BIASES} ids")
    max_tokens = fields.integer("max_new_tokens") if fields.has("max_new_tokens") else None
    if left_out := [key for key, value in fields.items() if _has_effect(key, value)]:
        log.warning(
            "%s: %s is not taken: requests and flags say the like", fields.path, ", ".join(left_out)
        )
    given["logit_bias"] = tuple(dict.fromkeys(suppressed, SUPPRESSING_BIAS).items())
    return SamplingDefaults(params=SamplingParams(**given), max_tokens=max_tokens)


def _has_effect(key: str, value: Any) -> bool:
    return value is not None and key in _NO_EFFECT and value not in _NO_EFFECT[key]


def resolve_sampling(
    defaults: SamplingParams, given: Mapping[str, Any], *, vocab_size: int
) -> SamplingParams:
    """Return the parameters of a request; the defaults hold for everything that is not `given`.

    `given` has fields of `SamplingParams` as request bodies have them, but `bad_words` as tokens.
    Without a seed there is a random one.

    Raises:
        InvalidRequest: a number beyond the vocabulary.
    """
    top_k = given.get("top_k", defaults.top_k)
    if top_k > vocab_size:
        raise InvalidRequest(
            f"top_k must be at most {vocab_size}, the size of the vocabulary, got"
            f" {str(top_k)[:64]}",
            param="top_k",
        )
    name = "allowed_token_ids"
    own = {
        "top_k": max(0, top_k),  # -1 and 0: all tokens
        "seed": given["seed"] if "seed" in given else random_seed(),
        "logit_bias": _bias_of(given.get("logit_bias", {}), vocab_size, defaults.logit_bias),
        name: tuple(check_token_ids(given.get(name, ()), vocab_size=vocab_size, param=name)),
    }
    return msgspec.structs.replace(defaults, **{**given, **own})


def check_token_ids(token_ids: Sequence[int], *, vocab_size: int, param: str) -> list[int]:
    """Return ids, each once. Raises InvalidRequest for one that is not in the vocabulary."""
    check_token_range(token_ids, vocab_size=vocab_size, param=param)
    return list(dict.fromkeys(token_ids))


def check_token_range(token_ids: Sequence[int], *, vocab_size: int, param: str) -> None:
    """Raise InvalidRequest for an id that is not in the vocabulary."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{param} must hold token ids from 0 to {vocab_size - 1}, got {str(token_id)[:64]}",
                param=param,
            )


def _bias_of(
    biases: Mapping[str, float], vocab_size: int, defaults: Sequence[tuple[int, float]]
) -> tuple[tuple[int, float], ...]:
    """Return (token id, bias) pairs; the keys are ids in decimal, as JSON has no others."""
    for key in biases:
        if not (key.isascii() and key.isdigit() and len(key) < 20 and int(key) < vocab_size):
            raise InvalidRequest(
                f"logit_bias must have token ids from 0 to {vocab_size - 1} as keys,"
                f" got {show(key)}",
                param="logit_bias",
            )
    return tuple((dict(defaults) | {int(key): bias for key, bias in biases.items()}).items())


def random_seed() -> int:
    """Return a signed 64-bit seed that cannot be guessed."""
    return int.from_bytes(os.urandom(8), "little", signed=True)


# ----------------------------------------------------------------------
# The service level of a request: its class, targets, priority and timeout.
#
# Targets come in the body's `slo` or in headers; where both say something it has to be the same.
# What a real-time request says nothing about holds as the server promises it. Times and targets are
# checked here, once, for all routes.


MAX_TARGET_MS = 3_600_000.0
MAX_SECONDS = 86_400.0

TargetMs = Annotated[float, Field(gt=0.0, le=MAX_TARGET_MS)]
Seconds = Annotated[float, Field(gt=0.0, le=MAX_SECONDS)]
Priority = Annotated[Integer, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]

TOKEN_TARGETS = ("ttft_ms", "tpot_ms", "mtpot_ms")
"""Fields of `slo` that are about tokens; the other one is about the whole."""
_HEADER_PREFIX = "x-slo-"
_GATEWAY_PREFIX = "x-llm-d-slo-"
TARGET_HEADERS = {
    **{f"{_HEADER_PREFIX}{name.replace('_', '-')}": name for name in SLO.__struct_fields__},
    f"{_GATEWAY_PREFIX}ttft-ms": "ttft_ms",
    f"{_GATEWAY_PREFIX}tpot-ms": "tpot_ms",
}
"""Headers, in lower case, and the fields of `slo` that they stand for: our own, and those by which
llm-d's endpoint picker places requests, so that replica and picker go by the same targets."""
OBJECTIVE_HEADER = "x-gateway-inference-objective"
"""Names an InferenceObjective of a Kubernetes inference gateway: --inference-objectives."""
_NUMBER = re.compile(r"\d{1,32}(\.\d{1,32})?([eE][+-]?\d{1,3})?", re.ASCII)


class SLOFields(StrictModel):
    """`slo`; null is the same as absent."""

    ttft_ms: TargetMs | None = None
    tpot_ms: TargetMs | None = None
    mtpot_ms: TargetMs | None = None
    completion_s: Seconds | None = None


def header_schemas() -> list[dict[str, Any]]:
    """Return the headers as parameters of OpenAPI."""
    schemas = {
        name: TypeAdapter(TargetMs if name in TOKEN_TARGETS else Seconds).json_schema()
        for name in SLO.__struct_fields__
    }
    headers = {header: schemas[name] for header, name in TARGET_HEADERS.items()}
    headers[OBJECTIVE_HEADER] = {"type": "string"}
    return [
        {"name": header, "in": "header", "required": False, "schema": schema}
        for header, schema in headers.items()
    ]


@dataclass(frozen=True, kw_only=True)
class ServiceLevel:
    """Class, targets, priority and caller of a request and all its completions."""

    request_class: RequestClass
    arrival_s: float
    """Monotonic time at which the headers were there."""
    slo: SLO = NO_SLO
    """The server's targets included."""
    priority: int = 0
    timeout_s: float | None = None
    """From its arrival to its last token; what is not done by then ends with an error."""
    sharer: str = ""
    """Whose share of the work in a frontend it uses, see `sharer_of`."""
    caller: Caller = KEYLESS

    @property
    def left_s(self) -> float | None:
        """Seconds until it times out; None: it never does."""
        if self.timeout_s is None:
            return None
        return max(0.0, self.arrival_s + self.timeout_s - time.monotonic())


class _Asked(NamedTuple):
    """A target of a request."""

    value: float
    place: str
    """Header or field that has it."""


def resolve_service_level(
    request: Request,
    config: ServeConfig,
    *,
    request_class: RequestClass,
    slo: SLOFields | None,
    priority: int | None,
    timeout_s: float | None,
    param_prefix: str = "",
) -> ServiceLevel:
    """Return the service level of a request from its headers and its body (None: it says nothing).

    `param_prefix` is that of the names of these fields in the body. Raises InvalidRequest.
    """
    asked = _join(_from_headers(request.headers), _from_body(slo, param_prefix))
    _check_class(asked, request_class)
    _check_least(asked, config)
    targets = _with_defaults(asked, request_class, config)
    if targets.mtpot_ms is not None and targets.mtpot_ms < (targets.tpot_ms or 0.0):
        place = asked["mtpot_ms"].place
        raise InvalidRequest(
            f"{place} must be at least the target of the mean, {targets.tpot_ms:g}, got"
            f" {targets.mtpot_ms:g}",
            param=place,
        )
    return ServiceLevel(
        request_class=request_class,
        arrival_s=request.scope[ARRIVAL_KEY],
        slo=targets,
        priority=priority or 0,
        timeout_s=timeout_s,
        sharer=sharer_of(request.scope),
        caller=caller_of(request.scope),
    )


def _from_body(slo: SLOFields | None, param_prefix: str) -> dict[str, _Asked]:
    values = {name: getattr(slo, name, None) for name in SLO.__struct_fields__}
    return {
        name: _Asked(value, f"{param_prefix}slo.{name}")
        for name, value in values.items()
        if value is not None
    }


def server_slo(config: ServeConfig) -> SLO:
    """Return what the server promises real-time requests that bring no targets of their own."""
    tpot_ms = config.tpot_slo_ms or None
    mtpot_ms = largest_gap(tpot_ms, config.mtpot_slo_ms or None)
    return SLO(config.ttft_slo_ms or None, tpot_ms, mtpot_ms)


def _from_headers(headers: Headers) -> dict[str, _Asked]:
    asked: dict[str, _Asked] = {}
    for header, text in headers.items():
        if not header.startswith((_HEADER_PREFIX, _GATEWAY_PREFIX)):
            continue
        if header not in TARGET_HEADERS:
            raise InvalidRequest(
                f"the header {header[:64]} is not supported; known are {', '.join(TARGET_HEADERS)}",
                param=header[:64],
                code=UNKNOWN_PARAMETER,
            )
        name = TARGET_HEADERS[header]
        if name in asked and asked[name].place == header:
            raise InvalidRequest(f"the header {header} must be given once", param=header)
        value = float(text) if _NUMBER.fullmatch(text) else 0.0
        is_ms = name in TOKEN_TARGETS
        most, unit = (MAX_TARGET_MS, "milliseconds") if is_ms else (MAX_SECONDS, "seconds")
        if not 0.0 < value <= most:
            raise InvalidRequest(
                f"the header {header} must be a number of {unit} greater than 0 and at most"
                f" {most:.0f}, got {show(text)}",
                param=header,
            )
        if name in asked and asked[name].value != value:
            other = asked[name]
            raise InvalidRequest(
                f"the headers {other.place} ({other.value:g}) and {header} ({value:g}) must be"
                " equal, or only one of them given",
                param=header,
            )
        asked[name] = _Asked(value, header)
    return asked


def with_objective(
    body: ModelT, headers: Headers, objectives: Mapping[str, int], *, param: str = "priority"
) -> ModelT:
    """Return a body with what the objective that its headers name says of it.

    `body` has a `priority`. `objectives`: priority of each, as --inference-objectives has them;
    without any the header means nothing here, it is the gateway's own. An objective below 0 makes a
    request best-effort, where its body says nothing of a tier, as gateways may drop such requests.
    `param`: what errors call the body's priority.

    Raises:
        InvalidRequest: the header names an objective that is none, or contradicts the body.
    """
    values = headers.getlist(OBJECTIVE_HEADER) if objectives else []
    if not values:
        return body
    if len(values) != 1 or values[0] not in objectives:
        raise InvalidRequest(
            f"the header {OBJECTIVE_HEADER} must name one of {', '.join(sorted(objectives))}, got"
            f" {show(', '.join(values))}",
            param=OBJECTIVE_HEADER,
        )
    fields: dict[str, Any] = {"priority": objectives[values[0]]}
    given = getattr(body, "priority", None)
    if given not in (None, fields["priority"]):
        raise InvalidRequest(
            f"{param} ({given}) and the priority of the objective {values[0]}"
            f" ({fields['priority']}) must be equal, or only one of them given",
            param=param,
        )
    if fields["priority"] < 0 and getattr(body, "service_tier", "") in (None, "auto"):
        fields["service_tier"] = "flex"
    return body.model_copy(update=fields)


def _join(headers: Mapping[str, _Asked], body: Mapping[str, _Asked]) -> dict[str, _Asked]:
    for name in headers.keys() & body.keys():
        (given, header), (other, field) = headers[name], body[name]
        if given != other:
            raise InvalidRequest(
                f"the header {header} ({given:g}) and {field} ({other:g}) must be equal, or only"
                " one of them given",
                param=field,
            )
    return {**headers, **body}


def _check_class(asked: Mapping[str, _Asked], request_class: RequestClass) -> None:
    """Refuse targets that a class does not have, and those that exclude each other."""
    of_tokens = [asked[name].place for name in TOKEN_TARGETS if name in asked]
    if not of_tokens:
        return
    if request_class is RequestClass.BE:
        raise InvalidRequest(
            f"{of_tokens[0]} is for real-time requests; best-effort ones (service_tier flex) may"
            " have slo.completion_s",
            param=of_tokens[0],
        )
    if "completion_s" in asked:
        job = asked["completion_s"].place
        raise InvalidRequest(f"{job} cannot be combined with {of_tokens[0]}", param=job)


def _check_least(asked: Mapping[str, _Asked], config: ServeConfig) -> None:
    """Refuse targets below what the server lets clients ask for."""
    for name, option in (
        ("ttft_ms", "min_ttft_slo_ms"),
        ("tpot_ms", "min_tpot_slo_ms"),
        ("mtpot_ms", "min_tpot_slo_ms"),
    ):
        least_ms: float = getattr(config, option)
        if name in asked and asked[name].value < least_ms:
            value, place = asked[name]
            raise InvalidRequest(
                f"{place} must be at least {least_ms:g}, as this server sets it"
                f" ({flag_name(option)}), got {value:g}",
                param=place,
            )


def _with_defaults(
    asked: Mapping[str, _Asked], request_class: RequestClass, config: ServeConfig
) -> SLO:
    """Return the targets; where a request says nothing, the server's hold, if any can."""
    own = SLO(**{name: target.value for name, target in asked.items()})
    if request_class is RequestClass.BE or own.completion_s is not None:
        return own
    server = server_slo(config)
    mtpot_ms = largest_gap(own.tpot_ms, own.mtpot_ms) or server.mtpot_ms
    return SLO(own.ttft_ms or server.ttft_ms, own.tpot_ms or server.tpot_ms, mtpot_ms)


# ----------------------------------------------------------------------
# A request that is checked: what the router is told, and what stays here.


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """The part of a request that the router does not hear of: what to do with its output."""

    prompt_token_ids: Sequence[int]
    arrival_s: float
    """Monotonic time at which the headers were there."""
    stop_strings: tuple[str, ...] = ()
    """Any of these ends the output where it is complete."""
    includes_stop: bool = False
    """Whether the output shows the stop string that ended it."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the output only because the request says so."""
    discards_output: bool = False
    """Whether the answer is about the prompt alone: the one token that is drawn is dropped."""
    thinking: Thinking | None = None
    """Reasoning with which the output may begin; its tokens are counted."""


Prepared = tuple[Submit, OutputOptions]
"""A request that is checked. `RouterClient.submit` fills in its number, its age, and its names."""


def new_submit(prompt: TokenSegment, level: ServiceLevel, **fields: Any) -> Submit:
    """Return a message with everything but the fields that `RouterClient.submit` fills in."""
    return Submit(
        request_id=RequestId(0),
        prompt=[prompt],
        age_s=0.0,
        request_class=level.request_class,
        slo=level.slo,
        priority=level.priority,
        prefix_salt=level.caller.prefix_salt,
        client=level.caller.client,
        batch=level.caller.batch,
        **fields,
    )


def with_images(requests: Sequence[Prepared], images: Sequence[Image]) -> list[Prepared]:
    """Return the choices of a prompt with these images in place of those that they have."""
    submit, _ = requests[0]
    placed = salted(
        [
            msgspec.structs.replace(image, start=own.start)
            for image, own in zip(images, submit.images, strict=True)
        ],
        submit.prefix_salt,
    )
    return [(msgspec.structs.replace(each, images=placed), options) for each, options in requests]
