"""Reads the server-sent events of OpenAI's streams, in pieces as the network cuts them."""

from __future__ import annotations

from typing import Any

import msgspec

DONE = b"[DONE]"
_DATA = b"data:"


class PromptDetails(msgspec.Struct, frozen=True):
    """`usage.prompt_tokens_details`."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    """`usage`."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct, frozen=True):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class Event(msgspec.Struct, frozen=True):
    """What is looked at of a chunk of either endpoint."""

    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Any = None

    @property
    def num_chars(self) -> int:
        """How much a reader sees of it: text, reasoning, tool calls."""
        count = 0
        for choice in self.choices:
            count += len(choice.text or "")
            if (delta := choice.delta) is not None:
                count += len(delta.content or "")
                count += len(delta.reasoning_content or delta.reasoning or "")
                count += sum(len(bytes(call)) for call in delta.tool_calls or ())
        return count

    @property
    def is_finish(self) -> bool:
        """Whether it ends an answer."""
        return any(choice.finish_reason for choice in self.choices)


class EventLines:
    """Cuts a byte stream into the payloads of its `data:` lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the payloads that `piece` completes; comments and other fields are dropped."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return [line[len(_DATA) :].strip() for line in lines if line.startswith(_DATA)]


decode_event = msgspec.json.Decoder(Event).decode
