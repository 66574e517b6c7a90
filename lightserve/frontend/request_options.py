"""What a request says about sampling and its service, checked once for all routes."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field, TypeAdapter
from starlette.datastructures import Headers

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
)
from lightserve.messages.common import Thinking, TokenSegment
from lightserve.messages.frontend_router import Submit
from lightserve.models.json_fields import JsonFields
from lightserve.tokenization.tokenizer import GENERATION_CONFIG_FILE, read_ids, read_optional
from lightserve.types import (
    MAX_PRIORITY,
    NO_SLO,
    SLO,
    RequestClass,
    RequestId,
    SamplingParams,
    largest_gap,
)

log = logging.getLogger(__name__)

# ----------------------------------------------------------------------
# Sampling parameters of a request: what it says, else what the model's files say, else OpenAI's.
#
# The limits of every field are here, once, for all routes.


MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1

MAX_TEMPERATURE = 2.0

Temperature = Annotated[float, Field(ge=0.0, le=MAX_TEMPERATURE)]
TopP = Annotated[float, Field(gt=0.0, le=1.0)]
TopK = Annotated[Integer, Field(ge=-1)]
Seed = Annotated[Integer, Field(ge=MIN_SEED, le=MAX_SEED)]
MaxTokens = Annotated[Integer, Field(ge=1)]
MinP = Annotated[float, Field(ge=0.0, le=1.0)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 10.0
"""Logits are divided by it: far below the least of these they would be infinite."""
RepetitionPenalty = Annotated[float, Field(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
MAX_BIASES = 1024
LogitBias = Annotated[dict[str, Bias], Field(max_length=MAX_BIASES)]
TokenIds = Annotated[
    list[int], Field(min_length=1, max_length=65536, fail_fast=True), WHOLE_NUMBERS
]
MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS = 64, 32
BadWord = Annotated[str, Field(min_length=1, max_length=128, pattern=r"\S")]
BadWords = Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS, fail_fast=True)]
StopTokenIds = Annotated[list[int], Field(max_length=64, fail_fast=True), WHOLE_NUMBERS]
MinTokens = Annotated[Integer, Field(ge=0)]
NumLogprobs = Annotated[Integer, Field(ge=0, le=20)]
NumChoices = Annotated[Integer, Field(ge=1, le=16)]
StopString = Annotated[str, Field(min_length=1, max_length=256)]
MAX_STOP_STRINGS = 4


@dataclass(frozen=True, kw_only=True)
class SamplingDefaults:
    """What holds where a request says nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    suppressed: tuple[int, ...] = ()
    """Tokens that get `SUPPRESSING_BIAS`."""
    max_tokens: int | None = None
    """Of an output; None: as the route has it."""


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
    top_p = fields.number("top_p", default=1.0)
    if top_p > 1.0:
        raise fields.error("top_p", f"must be at most 1, got {top_p}")
    top_k = fields.integer("top_k", default=0, low=-1) if fields.has("top_k") else 0
    is_greedy = not fields.boolean("do_sample", default=True)
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
    return SamplingDefaults(
        temperature=0.0 if is_greedy else _temperature(fields),
        top_p=top_p,
        top_k=max(top_k, 0) if top_k <= vocab_size else 0,
        repetition_penalty=_repetition_penalty(fields),
        min_p=_share(fields, "min_p", default=0.0),
        typical_p=_share(fields, "typical_p", default=1.0) or 1.0,
        suppressed=tuple(dict.fromkeys(suppressed)),
        max_tokens=max_tokens,
    )


def _share(fields: JsonFields, key: str, *, default: float) -> float:
    """Return a number from 0 to 1. Raises ModelLoadError."""
    value: Any = dict(fields.items()).get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise fields.error(key, f"must be a number from 0 to 1, got {str(value)[:40]}")
    return float(value)


def _has_effect(key: str, value: Any) -> bool:
    return value is not None and key in _NO_EFFECT and value not in _NO_EFFECT[key]


def resolve_sampling(
    defaults: SamplingDefaults,
    *,
    vocab_size: int,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    typical_p: float | None = None,
    seed: int | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    repetition_penalty: float | None = None,
    logit_bias: Mapping[str, float] | None = None,
    allowed_token_ids: Sequence[int] | None = None,
    bad_words: Sequence[tuple[int, ...]] = (),
    min_tokens: int | None = None,
    num_logprobs: int | None = None,
    num_prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Return the parameters of a request; where it says nothing (None), the defaults hold.

    `bad_words` are tokens. Without a seed there is a random one.

    Raises:
        InvalidRequest: a number beyond the vocabulary.
    """
    if top_k is not None and top_k > vocab_size:
        raise InvalidRequest(
            f"top_k must be at most {vocab_size}, the size of the vocabulary, got"
            f" {str(top_k)[:64]}",
            param="top_k",
        )
    top_k = defaults.top_k if top_k is None else top_k
    return SamplingParams(
        temperature=_first(temperature, defaults.temperature),
        top_p=_first(top_p, defaults.top_p),
        top_k=max(0, top_k),  # -1 and 0: all tokens
        min_p=_first(min_p, defaults.min_p),
        typical_p=_first(typical_p, defaults.typical_p),
        seed=random_seed() if seed is None else seed,
        frequency_penalty=_first(frequency_penalty, 0.0),
        presence_penalty=_first(presence_penalty, 0.0),
        repetition_penalty=_first(repetition_penalty, defaults.repetition_penalty),
        logit_bias=_bias_of(logit_bias or {}, vocab_size, defaults.suppressed),
        allowed_token_ids=tuple(
            check_token_ids(
                allowed_token_ids or (), vocab_size=vocab_size, param="allowed_token_ids"
            )
        ),
        bad_words=tuple(bad_words),
        min_tokens=min_tokens or 0,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
    )


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


def _first(given: float | None, default: float) -> float:
    return default if given is None else given


def _bias_of(
    biases: Mapping[str, float], vocab_size: int, suppressed: Sequence[int]
) -> tuple[tuple[int, float], ...]:
    """Return (token id, bias) pairs; the keys are ids in decimal, as JSON has no others.

    `suppressed` have `SUPPRESSING_BIAS` unless there is another one for them.
    """
    for key in biases:
        if not (key.isascii() and key.isdigit() and len(key) < 20 and int(key) < vocab_size):
            raise InvalidRequest(
                f"logit_bias must have token ids from 0 to {vocab_size - 1} as keys,"
                f" got {show(key)}",
                param="logit_bias",
            )
    found = dict.fromkeys(suppressed, SUPPRESSING_BIAS)
    return tuple((found | {int(key): bias for key, bias in biases.items()}).items())


def random_seed() -> int:
    """Return a signed 64-bit seed that cannot be guessed."""
    return int.from_bytes(os.urandom(8), "little", signed=True)


def _repetition_penalty(fields: JsonFields) -> float:
    if not fields.has("repetition_penalty"):
        return 1.0
    penalty = fields.number("repetition_penalty")
    if not MIN_REPETITION_PENALTY <= penalty <= MAX_REPETITION_PENALTY:
        limits = f"from {MIN_REPETITION_PENALTY:g} to {MAX_REPETITION_PENALTY:g}"
        raise fields.error("repetition_penalty", f"must be {limits}, got {penalty}")
    return penalty


def _temperature(fields: JsonFields) -> float:
    value: Any = dict(fields.items()).get("temperature")
    if value is None:
        return 1.0
    if value == 0 and not isinstance(value, bool):
        return 0.0
    temperature = fields.number("temperature")
    if temperature > MAX_TEMPERATURE:
        raise fields.error("temperature", f"must be at most {MAX_TEMPERATURE}, got {temperature}")
    return temperature


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
    """What a request, and all its completions, may expect."""

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
    headers: Headers,
    config: ServeConfig,
    *,
    arrival_s: float,
    request_class: RequestClass,
    slo: SLOFields | None,
    priority: int | None,
    timeout_s: float | None,
    sharer: str = "",
    param_prefix: str = "",
) -> ServiceLevel:
    """Return the service level of a request from its headers and its body (None: it says nothing).

    `param_prefix` is that of the names of these fields in the body. Raises InvalidRequest.
    """
    asked = _join(_from_headers(headers), _from_body(slo, param_prefix))
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
        arrival_s=arrival_s,
        slo=targets,
        priority=priority or 0,
        timeout_s=timeout_s,
        sharer=sharer,
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
    """What the frontend does with an output: all of a request that the router does not hear of."""

    prompt_token_ids: Sequence[int]
    arrival_s: float
    """Monotonic time at which the headers were there."""
    stop_strings: tuple[str, ...] = ()
    """Any of these ends the output where it is complete."""
    includes_stop: bool = False
    """Whether the output shows the stop string that ended it."""
    stop_token_ids: frozenset[int] = frozenset()
    """Of the tokens that end the output, those that do so only because the request says it."""
    discards_output: bool = False
    """What is wanted is of the prompt: the one token that is drawn is dropped."""
    thinking: Thinking | None = None
    """Reasoning with which the output may begin; its tokens are counted."""


Prepared = tuple[Submit, OutputOptions]
"""A request that is checked; what differs each time it is sent is filled in then: its number, its
age, its names, and the salt of its prefix."""


def new_submit(prompt: TokenSegment, **fields: Any) -> Submit:
    """Return a message without what is filled in when it is sent."""
    return Submit(request_id=RequestId(0), prompt=[prompt], age_s=0.0, **fields)
