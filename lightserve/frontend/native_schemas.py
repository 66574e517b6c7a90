"""What /generate answers, for the OpenAPI schema; a test holds real answers against it."""

from __future__ import annotations

from typing import Literal

from lightserve.frontend.json_body import StrictModel
from lightserve.frontend.raised_targets import RaisedSLOObject


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
