"""The common part of all links: protocol version, token arrays, prompt segments."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

# What a worker computes on: told once, shown to operators.


class DeviceFacts(msgspec.Struct, frozen=True):
    """A rank's device and what drives it; empty where there is no such thing."""

    kind: str
    """cpu or cuda."""
    name: str
    """Name of the processor or the GPU."""
    memory_bytes: int
    """Memory of the GPU."""
    driver: str
    """Version of the GPU's driver."""
    cuda: str
    """Version of CUDA that torch was built for."""
    torch: str
    triton: str
    kernels: str
    """Name of the kernels in use."""

    @property
    def summary(self) -> str:
        """The facts that step times depend on, in one line."""
        if self.kind == "cpu":
            return self.name
        return (
            f"{self.name} (driver {self.driver}, CUDA {self.cuda}, torch {self.torch},"
            f" Triton {self.triton or 'none'})"
        )


# What a profile says of a worker's step times; part of its hello.


class StepCoefficients(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Coefficients of `lightserve.cost.model`, in seconds, none negative."""

    floor_s: float
    knee: float
    """New tokens up to which a step takes no longer than one token: AccelGen's pivot."""
    per_new_s: float
    """For each new token beyond the knee."""
    per_decode_s: float
    """For each row that computes one token."""
    per_chunk_s: float
    """For each row that computes more."""
    per_decode_context_s: float
    per_chunk_context_s: float
    """For each token that a row of several starts from: it is read once for all of them."""
    per_chunk_pair_s: float
    per_saved_token_s: float = 0.0
    """Copied to the host; 0: not measured."""
    per_loaded_token_s: float = 0.0
    """Copied back; 0: not measured."""
    per_encoder_token_s: float = 0.0
    """For a token's work in a layer of the encoder of images (`EncoderWork`); 0: not measured."""


class GraphSizes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Numbers of new tokens to the next of which workers pad steps that run as recorded graphs.

    They rise; a step beyond the last one is not padded.
    """

    decodes: tuple[int, ...] = ()
    """Sizes of steps whose rows have one new token each; `mixed` serves larger ones. Empty:
    these steps are not padded, or it is unknown how."""
    mixed: tuple[int, ...] = ()
    """Sizes of steps with a row of more than one new token."""

    def padded(self, num_new: int, *, has_chunks: bool) -> int:
        """Return the tokens that a step computes for so many, the padding among them."""
        if not has_chunks and not self.decodes:
            return num_new
        size = None if has_chunks else size_within(self.decodes, num_new)
        return size or size_within(self.mixed, num_new) or num_new

    def padded_all(self, nums_new: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the same of steps with a row of more than one new token, none of them empty."""
        if not self.mixed:
            return nums_new
        places = np.searchsorted(self.mixed, nums_new)
        sizes = np.take(self.mixed, places, mode="clip")
        return np.where(places < len(self.mixed), sizes, nums_new)


NO_SIZES = GraphSizes()


def size_within(sizes: Sequence[int], number: int) -> int | None:
    """Return the smallest of some rising sizes that has room; None: there is none, or no use."""
    place = bisect.bisect_left(sizes, number)
    return sizes[place] if number and place < len(sizes) else None


PROTOCOL_VERSION = 29
"""Raised by one whenever a message changes; the hello of every link carries it."""

MAX_FRAME_BYTES = 16 * 1024 * 1024
"""Largest frame of a message, unless it has a limit of its own."""

MAX_INT32 = 2**31 - 1

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

NO_INT32: Int32Array = np.empty(0, dtype=np.int32)


def pack_int32(values: Sequence[int] | Int32Array) -> bytes:
    """Encode token ids or slots as little-endian int32 bytes."""
    return np.asarray(values, dtype="<i4").tobytes()


def unpack_int32(data: bytes) -> Int32Array:
    """Decode `pack_int32`'s bytes into a read-only int32 array, shape [len(data) // 4].

    Raises:
        ValueError: the length is not a multiple of four.
    """
    return np.frombuffer(data, dtype="<i4")


def pack_int64(values: Sequence[int] | Int64Array) -> bytes:
    """Encode numbers of requests as little-endian int64 bytes."""
    return np.asarray(values, dtype="<i8").tobytes()


def unpack_int64(data: bytes) -> Int64Array:
    """Decode `pack_int64`'s bytes into a read-only int64 array, shape [len(data) // 8].

    Raises:
        ValueError: the length is not a multiple of eight.
    """
    return np.frombuffer(data, dtype="<i8")


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages: frozen, tagged with the class name, unknown fields refused."""

    MAX_BYTES: ClassVar[int] = MAX_FRAME_BYTES
    """Largest frame of it; no link accepts a larger one than the largest of its messages."""


class TokenSegment(Message, frozen=True, tag="tokens"):
    """A stretch of a prompt given as token ids (other kinds of segment may join this one)."""

    token_ids: bytes
    """int32, see `pack_int32`."""


PromptSegment = TokenSegment


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """How probable the model found a token, and which others more so; natural logarithms."""

    logprob: float
    top_token_ids: list[int]
    """Ids of as many tokens as were asked for, the most probable first."""
    top_logprobs: list[float]
    """One for each of `top_token_ids`."""


class JsonSchemaConstraint(Message, frozen=True, tag="json_schema"):
    """The output is a JSON value that this schema allows."""

    schema: str
    """JSON text, compiled once by the frontend: it is valid and within the limits."""


class RegexConstraint(Message, frozen=True, tag="regex"):
    """The whole output matches."""

    pattern: str


class GrammarConstraint(Message, frozen=True, tag="grammar"):
    """The output is a sentence of this Lark grammar."""

    grammar: str


Constraint = JsonSchemaConstraint | RegexConstraint | GrammarConstraint
"""A limit on the tokens of an output."""


MAX_TAGS, MAX_TAG_CHARS, MAX_CLOSING_TOKENS = 8, 128, 128


class Thinking(msgspec.Struct, frozen=True, array_like=True):
    """Reasoning with which an output may begin; a constraint is of what follows it."""

    openings: tuple[str, ...]
    """It begins with one of these, behind blanks; empty: the prompt ended within it."""
    endings: tuple[str, ...]
    """The first of these that is there ends it; at least one."""
    opening: tuple[int, ...]
    """Tokens of the first of `openings`."""
    closing: tuple[int, ...]
    """Tokens that are written once the budget is used up: perhaps a sentence, then `ending`."""
    ending: tuple[int, ...]
    """Tokens of the first of `endings`."""
    budget: int = MAX_INT32
    """Most tokens of the reasoning, without its tags and without `closing`."""
    is_sure: bool = False
    """Whether it opens in any case where the output has a constraint."""
