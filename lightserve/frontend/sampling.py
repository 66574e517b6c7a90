"""Sampling parameters of a request: what it says, else what the model's files say, else OpenAI's.

The limits of every field are here, once, for all routes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from lightserve.errors import InvalidRequest
from lightserve.models.json_fields import JsonFields
from lightserve.tokenization.tokenizer import GENERATION_CONFIG_FILE, read_optional
from lightserve.types import SamplingParams

MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1

MAX_TEMPERATURE = 2.0

Temperature = Annotated[float, Field(ge=0.0, le=MAX_TEMPERATURE)]
TopP = Annotated[float, Field(gt=0.0, le=1.0)]
TopK = Annotated[int, Field(ge=-1)]
Seed = Annotated[int, Field(ge=MIN_SEED, le=MAX_SEED)]
MaxTokens = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, kw_only=True)
class SamplingDefaults:
    """What holds where a request says nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


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
    )


def resolve_sampling(
    defaults: SamplingDefaults,
    *,
    vocab_size: int,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    seed: int | None,
) -> SamplingParams:
    """Return the parameters of one completion; without a seed it gets a random one.

    Raises:
        InvalidRequest: `top_k` is larger than the vocabulary.
    """
    if top_k is not None and top_k > vocab_size:
        raise InvalidRequest(
            f"top_k must be at most {vocab_size}, the size of the vocabulary, got"
            f" {str(top_k)[:64]}",
            param="top_k",
        )
    return SamplingParams(
        temperature=defaults.temperature if temperature is None else temperature,
        top_p=defaults.top_p if top_p is None else top_p,
        top_k=max(0, defaults.top_k if top_k is None else top_k),  # -1 and 0: all tokens
        seed=random_seed() if seed is None else seed,
    )


def random_seed() -> int:
    """Return a signed 64-bit seed that nobody can guess."""
    return int.from_bytes(os.urandom(8), "little", signed=True)


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
