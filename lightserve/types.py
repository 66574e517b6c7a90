"""Ids and small value types that cross module and process boundaries.

Everything here is immutable, free of torch, and encodable by msgspec.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Flag, IntEnum, StrEnum, auto
from typing import Annotated, NamedTuple, NewType, get_type_hints

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


class Activation(StrEnum):
    """A function of single numbers in a feed-forward block."""

    SILU = "silu"
    CLAMPED_SILU = "clamped silu"
    """gpt-oss's: clamped, x * sigmoid(alpha x), beside ups that are clamped and one larger."""
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"
    RELU_SQUARED = "relu squared"
    QUICK_GELU = "quick_gelu"
    """x * sigmoid(1.702 x), in CLIP's encoder of images alone."""


class SLO(msgspec.Struct, frozen=True, array_like=True):
    """Targets of a request; None: it has no such target.

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
"""Largest priority of a request; the least is as far below 0."""

MAX_DRAFTS = 8
"""Most drafts of a row in a step: with them it has as many new tokens as attention calls few."""


class DraftSource(IntEnum):
    """Origin of the drafts of a row."""

    NGRAM = 0
    """The row's own tokens."""
    PREDICTION = 1
    """The output as the request predicts it."""
    SUFFIX = 2
    """Recent answers to requests of the same key."""
    MTP = 3
    """A layer of the model that is made for it."""


MTPOT_FACTOR = 4.0
"""Target of the largest gap, in targets of the mean, where it is not given."""


def largest_gap(mean: float | None, largest: float | None) -> float | None:
    """Return the target of the largest gap, of `largest` and of the mean, in the unit of these.

    The one rule of the server, the load client and the simulator: what is given, else MTPOT_FACTOR
    times the mean; without either there is none.
    """
    return MTPOT_FACTOR * mean if largest is None and mean is not None else largest


class SlotKind(IntEnum):
    """Use of a slot of the KV pool; running and paused requests alike are its users."""

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
    """Purpose of a request."""

    TOKENS = 0
    VECTOR = 1
    """The hidden state of the prompt's last token, of length 1; its one token means nothing. Or,
    where its sampling has `allowed_token_ids`, the logits of these."""
    WHOLE_VECTOR = 2
    """The vector of a prompt whose tokens see each other: computed in one step, by an encoder,
    without KV of other prompts. Or its score, of a model with a head for that."""


class GivenBy(Flag):
    """Where a sampling parameter may be given, under its own name everywhere."""

    NOWHERE = 0
    OPENAI = auto()
    """Completions and chat completions."""
    RESPONSES = auto()
    ANTHROPIC = auto()
    TGI = auto()
    MODEL = auto()
    """The model's generation_config.json, which sets the default of requests."""


class Changes(Flag):
    """Effect of a sampling parameter that is not at its default."""

    NOTHING = 0
    LOGITS = auto()
    """The logits, whether the draw is random or greedy."""
    DRAW = auto()
    """Which tokens a random draw takes, and how often."""


@dataclass(frozen=True)
class SamplingField:
    """Everything that frontends, router and workers know about one sampling parameter.

    Request bodies, checks, defaults, the workers' table and warm-up follow from it. A new parameter
    is declared in `SamplingParams` alone; beside that it needs the code that computes it.
    """

    given_by: GivenBy = GivenBy.NOWHERE
    low: float | None = None
    """Least value; None: the parameter is no number."""
    high: float | None = None
    """Largest value; None: it depends on the model or on other fields."""
    changes: Changes = Changes.NOTHING
    column: str = ""
    """Type of its column in the workers' table, as numpy names it; empty: it has none."""
    excludes_low: bool = False
    is_wide: bool = False
    """Whether it takes a vocabulary's memory in each row that has it."""
    example: float | None = None
    """A value with an effect, for warm-up."""


_OPENAI, _TGI, _MODEL = GivenBy.OPENAI, GivenBy.TGI, GivenBy.MODEL
_CHATS = _OPENAI | GivenBy.ANTHROPIC | _TGI | _MODEL
_ALL = _CHATS | GivenBy.RESPONSES
_DRAW, _LOGITS = Changes.DRAW, Changes.LOGITS
MAX_LOGPROBS = 20


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """How the next token is drawn, and which log-probabilities are returned with it.

    Order of application: `logit_bias`, penalties, tokens that are not allowed or end bad words,
    temperature, typical-p, min-p, top-k, top-p. `temperature` 0 is greedy and ignores the steps
    after it. The draw is a function of (seed, choice, position) alone.
    """

    temperature: Annotated[float, SamplingField(_ALL, 0.0, 2.0, _DRAW)] = 1.0
    """Logits are divided by it; 0 is greedy."""
    top_p: Annotated[
        float, SamplingField(_ALL, 0.0, 1.0, _DRAW, "float64", excludes_low=True, example=0.95)
    ] = 1.0
    """1 keeps every token."""
    top_k: Annotated[int, SamplingField(_CHATS, -1, None, _DRAW, "int32")] = 0
    """0 keeps every token, otherwise the k most probable ones; requests may say -1 for 0."""
    seed: Annotated[int, SamplingField(_OPENAI | _TGI, -(2**63), 2**63 - 1)] = 0
    """Signed 64-bit."""
    choice: Annotated[int, SamplingField(low=0, high=2**31 - 1)] = 0
    """Index of this completion among the `n` of one request."""
    min_p: Annotated[
        float,
        SamplingField(_OPENAI | _MODEL, 0.0, 1.0, _DRAW, "float32", is_wide=True, example=0.01),
    ] = 0.0
    """Tokens less probable than this share of the most probable one are dropped."""
    frequency_penalty: Annotated[
        float,
        SamplingField(_OPENAI | _TGI, -2.0, 2.0, _LOGITS, "float32", is_wide=True, example=0.5),
    ] = 0.0
    """Taken off a token's logit once for each time it is in the output so far."""
    presence_penalty: Annotated[
        float, SamplingField(_OPENAI, -2.0, 2.0, _LOGITS, "float32", is_wide=True, example=0.5)
    ] = 0.0
    """Taken off the logit of each token that is in the output so far."""
    repetition_penalty: Annotated[
        float,
        SamplingField(
            _OPENAI | _TGI | _MODEL, 0.01, 10.0, _LOGITS, "float32", is_wide=True, example=1.1
        ),
    ] = 1.0
    """Logits of tokens in prompt or output are divided (positive) or multiplied by it; far below
    its least value they would be infinite."""
    logit_bias: Annotated[
        tuple[tuple[int, float], ...], SamplingField(_OPENAI, changes=_LOGITS)
    ] = ()
    """(token id, number that is added to its logit), each id once."""
    allowed_token_ids: Annotated[tuple[int, ...], SamplingField(_OPENAI, changes=_LOGITS)] = ()
    """Only these may be drawn; empty: all may."""
    min_tokens: Annotated[int, SamplingField(_OPENAI, 0, None, _LOGITS, "int32", example=8)] = 0
    """Before this many output tokens none of the sequence's `eos_token_ids` is drawn."""
    num_logprobs: Annotated[int | None, SamplingField(low=0, high=MAX_LOGPROBS)] = None
    """Log-probabilities wanted with each token: its own and this many most probable ones; None:
    none. They are the model's, before any parameter above changes them."""
    num_prompt_logprobs: Annotated[int | None, SamplingField(low=0, high=MAX_LOGPROBS)] = None
    """Log-probabilities wanted with each prompt token but the first, given the ones before it."""
    bad_words: Annotated[tuple[tuple[int, ...], ...], SamplingField(_OPENAI, changes=_LOGITS)] = ()
    """Sequences of tokens, none empty: the last of one is not drawn where the output ends with the
    others."""
    typical_p: Annotated[
        float,
        SamplingField(
            _TGI | _MODEL, 0.0, 1.0, _LOGITS | _DRAW, "float32", excludes_low=True, example=0.95
        ),
    ] = 1.0
    """Tokens whose surprise is nearest to the expected one are kept, as many as have this share
    together; 1 keeps every token. Locally typical sampling (Meister et al., 2023)."""


PLAIN_SAMPLING = SamplingParams()
SAMPLING_FIELDS: dict[str, SamplingField] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(SamplingParams, include_extras=True).items()
}
"""The declaration of each field of `SamplingParams`, in its order."""
