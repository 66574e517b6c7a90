"""Ids and small value types that cross module and process boundaries.

Everything here is immutable, free of torch, and encodable by msgspec.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import NamedTuple, NewType

import msgspec

FrontendId = NewType("FrontendId", int)
"""Number of a frontend process, 0 … http_workers-1; stable over restarts of that process."""

RequestId = NewType("RequestId", int)
"""Number of a request within one frontend process and boot; never reused."""

RowId = NewType("RowId", int)
"""Row of the workers' per-sequence tables (`req_to_slot`, token ids), 0 … max_num_seqs-1."""

Slot = NewType("Slot", int)
"""Index of one token's place in the KV pool, 0 … num_kv_slots-1."""

StepId = NewType("StepId", int)
"""Number of a step within one router boot, from 0, without gaps."""


class RequestKey(NamedTuple):
    """A request's identity inside the router."""

    frontend_id: FrontendId
    request_id: RequestId


class RequestClass(StrEnum):
    """The two kinds of traffic."""

    RT = "rt"
    BE = "be"

    __hash__ = str.__hash__  # a member is a key in many loops, and `Enum`'s own is a call in Python


RT, BE = RequestClass.RT, RequestClass.BE
"""For loops over requests: to Python 3.11 looking a member up by its class is a call."""


class SLO(msgspec.Struct, frozen=True, array_like=True):
    """What a request should be served in; None: it has no such target.

    Either any of the first three, or `completion_s`.
    """

    ttft_ms: float | None = None
    """From its arrival to its first token."""
    tpot_ms: float | None = None
    """Mean time per output token after the first."""
    mtpot_ms: float | None = None
    """Largest gap between two tokens, at least `tpot_ms`; by `largest_gap` where that is given."""
    completion_s: float | None = None
    """From its arrival to its last token."""


NO_SLO = SLO()

MAX_PRIORITY = 1000
"""Of requests; the least is as far below 0."""

MTPOT_FACTOR = 4.0
"""Target of the largest gap, in targets of the mean, where it is not given."""


def largest_gap(mean: float | None, largest: float | None) -> float | None:
    """Return the target of the largest gap, of `largest` and of the mean, in the unit of these.

    The one rule of the server, the load client and the simulator: what is given, else MTPOT_FACTOR
    times the mean; without either there is none.
    """
    return MTPOT_FACTOR * mean if largest is None and mean is not None else largest


class SlotKind(IntEnum):
    """What a slot of the KV pool is for; running and paused requests alike are its users."""

    FREE = 0
    RT = 1
    """Read or written by a real-time request, perhaps by best-effort ones as well."""
    BE = 2
    """Read or written by best-effort requests alone."""
    CACHED = 3
    """In the prefix tree, without a user."""
    CHECKPOINTED = 4
    """Its one user, of either class, has the token on the host as well: it can be taken without
    a copy."""


class FinishReason(StrEnum):
    """Why a request ended, in the words of OpenAI's API; ERROR never reaches a client as such."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"


class RequestOutput(IntEnum):
    """What a request is computed for."""

    TOKENS = 0
    VECTOR = 1
    """The hidden state of the prompt's last token, of length 1; its one token means nothing. Or,
    where its sampling has `allowed_token_ids`, the logits of these."""
    WHOLE_VECTOR = 2
    """The vector of a prompt whose tokens see each other: computed in one step, by an encoder,
    without KV of other prompts. Or its score, of a model with a head for that."""


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """How the next token is drawn, and what is to be told about it.

    In this order: `logit_bias`, penalties, tokens that are not allowed or end bad words,
    temperature, typical-p, min-p, top-k, top-p. `temperature` 0 is greedy and ignores what follows
    it. The draw is a function of (seed, choice, position) alone.
    """

    temperature: float = 1.0
    """>= 0; logits are divided by it."""
    top_p: float = 1.0
    """(0, 1]; 1 keeps every token."""
    top_k: int = 0
    """0 keeps every token, otherwise the k most probable ones."""
    seed: int = 0
    """Signed 64-bit."""
    choice: int = 0
    """Index of this completion among the `n` of one request."""
    min_p: float = 0.0
    """[0, 1]: tokens less probable than this share of the most probable one are dropped."""
    frequency_penalty: float = 0.0
    """Taken off a token's logit once for each time it is in the output so far."""
    presence_penalty: float = 0.0
    """Taken off the logit of each token that is in the output so far."""
    repetition_penalty: float = 1.0
    """> 0; logits of tokens in prompt or output are divided (positive) or multiplied by it."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit), each id once."""
    allowed_token_ids: tuple[int, ...] = ()
    """Only these may be drawn; empty: all may."""
    min_tokens: int = 0
    """Before this many output tokens none of the sequence's `eos_token_ids` is drawn."""
    num_logprobs: int | None = None
    """Log-probabilities wanted with each token: its own and these many most probable ones; None:
    none. They are the model's, before anything above changed them."""
    num_prompt_logprobs: int | None = None
    """The same for each prompt token but the first, given those before it."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens, none empty: the last of one is not drawn where the output ends with the
    others."""
    typical_p: float = 1.0
    """(0, 1]: of the tokens whose surprise is nearest to the expected one, as many as have this
    share together; 1 keeps every token. Locally typical sampling (Meister et al., 2023)."""
