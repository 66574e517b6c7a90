"""How the OpenAI routes write: usage, chunks of a stream, and its end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import Enum, auto
from typing import Any

from msgspec.json import encode

from lightserve.frontend.choices import Choices
from lightserve.frontend.columns import json_array, json_object
from lightserve.frontend.generation import Generation, Usage
from lightserve.frontend.raised_targets import raised_slo
from lightserve.frontend.responses import sse_event

NO_FIELDS: Mapping[str, Any] = {}
DONE = sse_event(b"[DONE]")


class UsageChunks(Enum):
    """Which chunks of a stream have the usage."""

    NONE = auto()
    LAST = auto()
    """One of its own, after all others."""
    ALL = auto()
    """That, and every other, for what its choice has used so far."""


def usage_object(usage: Usage) -> dict[str, Any]:
    """Return OpenAI's usage object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def end_fields(generation: Generation, finish_reason: str | None) -> dict[str, Any]:
    """Return how a choice ended, if it has: in OpenAI's words, and what it was, as vLLM and SGLang
    tell it."""
    if finish_reason is None:
        return {"finish_reason": None}
    return {
        "finish_reason": finish_reason,
        "stop_reason": generation.stop_reason,
        "matched_stop": generation.matched_stop,
    }


def whole_answer(
    envelope: dict[str, Any],
    objects: Iterable[Iterator[bytes]],
    choices: Choices,
    fields: Mapping[str, Any] = NO_FIELDS,
) -> Iterator[bytes]:
    """Yield the body of an answer that is not streamed; values of `fields` may come in pieces."""
    usage = usage_object(choices.usage)
    answer = {**envelope, "choices": json_array(objects), "usage": usage, **fields}
    if (slo := raised_slo(choices.generations)) is not None:
        answer["slo"] = slo
    return json_object(answer)


class ChunkWriter:
    """Writes chunks of one stream; what never changes within it is encoded once."""

    def __init__(self, envelope: dict[str, Any], *, usage: UsageChunks) -> None:
        """`envelope`: id, object, created, model, service_tier."""
        self._prefix = b"data: " + encode(envelope)[:-1]
        self._usage = usage
        self._suffix = b"}\n\n" if usage is UsageChunks.NONE else b',"usage":null}\n\n'

    def chunk(
        self, choice: dict[str, Any], usage: Usage, fields: dict[str, Any] | None = None
    ) -> bytes:
        """Return one chunk with this choice, and with `fields` of its own that are not null.

        `usage` is the choice's so far.
        """
        prefix = self._prefix
        for name, value in (fields or {}).items():
            if value is not None:
                prefix += b"," + encode(name) + b":" + encode(value)
        suffix = self._suffix
        if self._usage is UsageChunks.ALL:
            suffix = b',"usage":' + encode(usage_object(usage)) + b"}\n\n"
        return prefix + b',"choices":[' + encode(choice) + b"]" + suffix

    def closing(self, usage: Usage) -> bytes:
        """Return the usage chunk, if wanted, and the mark of the end."""
        if self._usage is UsageChunks.NONE:
            return DONE
        encoded = encode(usage_object(usage))
        return self._prefix + b',"choices":[],"usage":' + encoded + b"}\n\n" + DONE
