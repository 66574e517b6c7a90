"""What the OpenAI routes share: common fields, usage, the end of a stream."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from pydantic import Field

from lightserve.errors import InvalidRequest
from lightserve.frontend.generation import Usage
from lightserve.frontend.json_body import StrictModel
from lightserve.frontend.openai.no_effect import NoEffectModel
from lightserve.frontend.responses import sse_event
from lightserve.frontend.sampling import MaxTokens, Seed, Temperature, TopK, TopP, resolve_sampling
from lightserve.frontend.service import Service
from lightserve.types import SamplingParams

DONE = sse_event(b"[DONE]")


class StreamOptions(StrictModel):
    """`stream_options`."""

    include_usage: bool | None = None


MAX_KEY_CHARS = 512

Key = Annotated[str, Field(max_length=MAX_KEY_CHARS)]
"""Who or what sends a request, for clients to choose."""


class CommonFields(NoEffectModel):
    """Fields of both completions and chat completions; null is the same as absent."""

    model: str
    max_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    seed: Seed | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Key | None = None
    safety_identifier: Key | None = None
    prompt_cache_key: Key | None = None

    @property
    def prediction_key(self) -> str:
        """What this request's output length is predicted from: the first key given, or none."""
        return self.user or self.safety_identifier or self.prompt_cache_key or ""

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk that has the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check(self, service: Service) -> None:
        """Check what types cannot. Raises InvalidRequest."""
        service.check_model(self.model)
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream to be true", param="stream_options")

    def sampling(self, service: Service) -> SamplingParams:
        """Return how tokens are drawn. Raises InvalidRequest."""
        return resolve_sampling(
            service.model.sampling_defaults,
            vocab_size=service.model.vocab_size,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
        )


def usage_object(usage: Usage) -> dict[str, int]:
    """Return OpenAI's usage object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class ChunkWriter:
    """Writes chunks of one stream; what never changes within it is encoded once."""

    def __init__(self, envelope: dict[str, Any], *, includes_usage: bool) -> None:
        """`envelope`: id, object, created, model."""
        self._prefix = b"data: " + msgspec.json.encode(envelope)[:-1]
        self._includes_usage = includes_usage
        self._suffix = b',"usage":null}\n\n' if includes_usage else b"}\n\n"

    def chunk(self, choice: dict[str, Any]) -> bytes:
        """Return one chunk with this choice."""
        return self._prefix + b',"choices":[' + msgspec.json.encode(choice) + b"]" + self._suffix

    def closing(self, usage: Usage) -> bytes:
        """Return the usage chunk, if wanted, and the mark of the end."""
        if not self._includes_usage:
            return DONE
        encoded = msgspec.json.encode(usage_object(usage))
        return self._prefix + b',"choices":[],"usage":' + encoded + b"}\n\n" + DONE
