"""Sampling parameters of a request: what it says, else what the model's files say, else OpenAI's.

The limits of every field are here, once, for all routes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from lightserve.errors import InvalidRequest
from lightserve.frontend.json_body import WHOLE_NUMBERS, Integer, show
from lightserve.models.json_fields import JsonFields
from lightserve.tokenization.tokenizer import GENERATION_CONFIG_FILE, read_optional
from lightserve.types import SamplingParams

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
LogitBias = Annotated[dict[str, Bias], Field(max_length=1024)]
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


def read_sampling_defaults(model_dir: Path, *, vocab_size: int) -> SamplingDefaults:
    """Return what generation_config.json recommends, under the limits of requests.

    A `top_k` above the vocabulary means all of it.

    Raises:
        ModelLoadError: a value is outside the limits; names file and key.
    """
    fields = read_optional(model_dir, GENERATION_CONFIG_FILE)
    top_p = fields.number("top_p", default=1.0)
    if top_p > 1.0:
        raise fields.error("top_p", f"must be at most 1, got {top_p}")
    top_k = fields.integer("top_k", default=0, low=-1) if fields.has("top_k") else 0
    return SamplingDefaults(
        temperature=_temperature(fields),
        top_p=top_p,
        top_k=max(top_k, 0) if top_k <= vocab_size else 0,
        repetition_penalty=_repetition_penalty(fields),
    )


@dataclass(frozen=True, kw_only=True)
class SamplingRequest:
    """What a request says about sampling, whatever its fields are called; None: nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[str, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[tuple[int, ...]] = ()
    """As tokens."""
    min_tokens: int | None = None
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None

    def resolve(self, defaults: SamplingDefaults, *, vocab_size: int) -> SamplingParams:
        """Return the parameters; without a seed they get a random one.

        Raises:
            InvalidRequest: a number beyond the vocabulary.
        """
        if self.top_k is not None and self.top_k > vocab_size:
            raise InvalidRequest(
                f"top_k must be at most {vocab_size}, the size of the vocabulary, got"
                f" {str(self.top_k)[:64]}",
                param="top_k",
            )
        top_k = defaults.top_k if self.top_k is None else self.top_k
        return SamplingParams(
            temperature=_first(self.temperature, defaults.temperature),
            top_p=_first(self.top_p, defaults.top_p),
            top_k=max(0, top_k),  # -1 and 0: all tokens
            min_p=_first(self.min_p, 0.0),
            seed=random_seed() if self.seed is None else self.seed,
            frequency_penalty=_first(self.frequency_penalty, 0.0),
            presence_penalty=_first(self.presence_penalty, 0.0),
            repetition_penalty=_first(self.repetition_penalty, defaults.repetition_penalty),
            logit_bias=_bias_of(self.logit_bias or {}, vocab_size),
            allowed_token_ids=tuple(
                check_token_ids(
                    self.allowed_token_ids or (), vocab_size=vocab_size, param="allowed_token_ids"
                )
            ),
            bad_words=tuple(self.bad_words),
            min_tokens=self.min_tokens or 0,
            num_logprobs=self.num_logprobs,
            num_prompt_logprobs=self.num_prompt_logprobs,
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


def _bias_of(biases: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Return (token id, bias) pairs; the keys are ids in decimal, as JSON has no others."""
    for key in biases:
        if not (key.isascii() and key.isdigit() and len(key) < 20 and int(key) < vocab_size):
            raise InvalidRequest(
                f"logit_bias must have token ids from 0 to {vocab_size - 1} as keys,"
                f" got {show(key)}",
                param="logit_bias",
            )
    return tuple({int(key): bias for key, bias in biases.items()}.items())


def random_seed() -> int:
    """Return a signed 64-bit seed that nobody can guess."""
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
