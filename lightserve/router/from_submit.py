"""Requests made from messages, and the bounds of the queues per class.

Prompts are bounded as tokens; everything else of a request that may be large is bounded as memory,
from its arrival to its end, and kept once for all choices.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from msgspec.structs import astuple

from lightserve.errors import ProtocolError
from lightserve.messages.common import (
    MAX_CLOSING_TOKENS,
    MAX_INT32,
    MAX_TAG_CHARS,
    MAX_TAGS,
    Constraint,
    Int32Array,
    unpack_int32,
)
from lightserve.messages.frontend_router import BatchDue, Submit
from lightserve.messages.images import (
    MAX_PIXEL_BYTES,
    ImageSums,
    check_images,
    with_image_ids,
    without_pixels,
)
from lightserve.messages.router_worker import MAX_PLAN_BYTES
from lightserve.models.vision_config import VisionConfig
from lightserve.router.output_lengths import prediction_key
from lightserve.router.queue import Backlog
from lightserve.router.request import Parameters, Request
from lightserve.types import SAMPLING_FIELDS, FrontendId, RequestClass, RequestKey

# How large a step's plan is on the wire, as far as it is known before the plan is made.
#
# What requests that begin or resume bring along (their tokens, slots and parameters) is the part
# that nothing else bounds: a prompt whose prefix is cached computes one token and carries all of
# it. A plan takes newcomers up to `MAX_NEWCOMER_BYTES`, or a larger one beside a few. The rest of a
# plan fits into `REST_BYTES`: rows, slots of new tokens, and what is taken from others for these
# tokens. What is taken for newcomers is at most a token for each of theirs, and one victim more
# than enough.

MAX_NEWCOMER_BYTES = 4 * 1024 * 1024
"""Bytes of requests that begin in one step, except a large one beside a few. They bound the time
between two steps as well, in the router to 20 ms."""
ROW_BYTES = 40
"""A `PlanRow` and the `SlotRange` of its new tokens, without these."""
FEW_NEWCOMER_BYTES = 512 * 1024
"""Beside so much one of any size may begin: where small ones come with every step it would never
have a step for itself."""
SEQUENCE_BYTES = 256
"""Bytes of a newcomer, with its `AddSequence` and its second range, and all parameters of one
number each."""
SLOT_BYTES = TOKEN_BYTES = 4
COPY_BYTES = 8
"""A token that is copied: its slot in the pool, and that on the host."""
REST_BYTES = 32 * 1024 * 1024
"""`ROW_BYTES` for 65,536 rows, slots and copies of 1,048,576 new tokens, copies ahead."""


def newcomer_bytes(request: Request, num_loaded: int) -> int:
    """Return what a waiting request takes at most if it begins or resumes in a step.

    For one that stays paused and loads beside the step, more than enough.
    """
    num_known = request.num_known_tokens
    return (
        SEQUENCE_BYTES
        + request.parameters.num_plan_bytes
        + (TOKEN_BYTES + SLOT_BYTES) * num_known
        + COPY_BYTES * num_loaded
        + 5 * SLOT_BYTES * request.recurrent.num_slots  # its range, and two copies inside the pool
    )


def most_tokens_in_plans(request: Request, max_model_len: int) -> int:
    """Return how many tokens a request may have so that a plan can hold it all its life.

    With all its KV on the host, room made for all of it, and a victim that loses all; beside the
    few that it may begin with, and what is taken for these.
    """
    room = (
        MAX_PLAN_BYTES
        - MAX_PIXEL_BYTES
        - REST_BYTES
        - COPY_BYTES * max_model_len
        - 2 * FEW_NEWCOMER_BYTES
    )
    room -= SEQUENCE_BYTES + request.parameters.num_plan_bytes
    room -= (5 * SLOT_BYTES + 2 * COPY_BYTES) * request.recurrent.num_slots
    return max(0, room // (TOKEN_BYTES + SLOT_BYTES + 2 * COPY_BYTES))


ID_BYTES = 40
"""Memory of a token id in a tuple."""
BIAS_BYTES = 128
"""Bytes of an id and its bias."""
WORD_BYTES = 64
"""Bytes of a bad word, without its ids."""
EOS_BYTES = 104
"""Bytes of an id in a set."""
CHARACTER_BYTES = 8
"""Bytes of a character that is not ASCII, with its UTF-8 copy in Python."""

MAX_SECONDS = 1e9
MAX_ADDED = 100.0
"""Largest bias."""
MAX_CLIENT_CHARS = 64
MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS = 192, 32
"""Bad words: 64 of a request, each in three forms."""


_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True)
class QueueLimits:
    """How much of one class may wait."""

    max_requests: int
    max_tokens: int
    """Prompt tokens; a request that has the queue for itself may be longer."""

    def has_room(self, backlog: Backlog, num_prompt_tokens: int) -> bool:
        """Whether a request may wait behind this backlog."""
        if backlog.num_requests == 0:
            return True
        return (
            backlog.num_requests < self.max_requests
            and backlog.num_tokens + num_prompt_tokens <= self.max_tokens
        )


def check_submit(
    submit: Submit,
    vocab_size: int,
    vision: VisionConfig | None = None,
    *,
    has_pixels: bool = True,
) -> None:
    """Check what the workers rely on, and what decisions are calculated with.

    Frontends check requests for their clients, in words for them; this is for frontends that do
    not: a token id beyond the vocabulary would take the workers along, as would an image that the
    encoder, `vision`, does not read.

    Raises:
        ProtocolError: something is outside its limits; the text names it.
    """
    sampling, slo, thinking = submit.sampling, submit.slo, submit.thinking
    prompt, prediction = _prompt_of(submit), unpack_int32(submit.prediction)
    ids: dict[str, Sequence[int]] = {
        "prompt": [int(prompt.min()), int(prompt.max())] if len(prompt) else [],
        "prediction": [int(prediction.min()), int(prediction.max())] if len(prediction) else [],
        "eos_token_ids": submit.eos_token_ids,
        "allowed_token_ids": sampling.allowed_token_ids,
        "logit_bias": [token_id for token_id, _ in sampling.logit_bias],
        "bad_words": list(itertools.chain(*sampling.bad_words)),
        "thinking": []
        if thinking is None
        else [*thinking.opening, *thinking.closing, *thinking.ending],
    }
    for name, token_ids in ids.items():
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            raise ProtocolError(f"request {submit.request_id}: {name} beyond the vocabulary")
    check_images(submit.images, len(prompt), has_pixels=has_pixels)
    if submit.images and not (vision and all(map(vision.takes, submit.images))):
        raise ProtocolError(f"request {submit.request_id}: images that the model does not read")
    ranges = {
        "length of the prompt": (len(prompt), 1, MAX_INT32),
        "max_tokens": (submit.max_tokens, 1, 1 if submit.output else MAX_INT32),
        "batch": (submit.batch, 0, 2**63 - 1),
        "priority": (submit.priority, -MAX_INT32, MAX_INT32),
        "client": (len(submit.client.key), 0, MAX_CLIENT_CHARS),
        "fairness id": (len(submit.client.fairness_id), 0, MAX_CLIENT_CHARS),
        "requests per minute": (submit.client.requests_per_minute, 0, MAX_INT32),
        "tokens per minute": (submit.client.tokens_per_minute, 0, MAX_INT32),
        "num_retained_tokens": (submit.num_retained_tokens, 0, len(prompt)),
        "retention_s": (submit.retention_s, 0.0, MAX_SECONDS),
        "age_s": (submit.age_s, 0.0, MAX_SECONDS),
        **{
            name: (getattr(sampling, name) or 0, spec.low, spec.high)
            for name, spec in SAMPLING_FIELDS.items()
            if spec.low is not None and spec.high is not None
        },
        "top_k": (sampling.top_k, 0, vocab_size),
        "min_tokens": (sampling.min_tokens, 0, submit.max_tokens),
    }
    checks = [(name, *limits) for name, limits in ranges.items()]
    checks += [("number of bad_words", len(sampling.bad_words), 0, MAX_BAD_WORDS)]
    checks += [
        ("length of bad_words", len(word), 1, MAX_BAD_WORD_TOKENS) for word in sampling.bad_words
    ]
    checks += [("slo", t, 0.0, MAX_SECONDS) for t in astuple(slo) if t is not None]
    if thinking is not None:
        checks += [("budget of thinking", thinking.budget, 0, MAX_INT32)]
        checks += [("tokens of thinking", len(ids["thinking"]), 1, MAX_CLOSING_TOKENS)]
        checks += [("openings of thinking", len(thinking.openings), 0, MAX_TAGS)]
        checks += [("opening of thinking", len(thinking.opening), bool(thinking.openings), 64)]
        checks += [("endings of thinking", len(thinking.endings), 1, MAX_TAGS)]
        tags = *thinking.openings, *thinking.endings
        checks += [("tags of thinking", len(tag), 1, MAX_TAG_CHARS) for tag in tags]
    if biases := [bias for _, bias in sampling.logit_bias]:
        extremes = min(biases), max(biases), sum(biases) / len(biases)  # one that is no number
        checks += [("logit_bias", value, -MAX_ADDED, MAX_ADDED) for value in extremes]
    for name, value, low, high in checks:
        if not low <= value <= high:  # nor if it is not a number
            raise ProtocolError(f"request {submit.request_id}: {name} must be {low} to {high}")


def check_batch_due(due: BatchDue) -> None:
    """Check the same of what is said of a batch. Raises ProtocolError."""
    if not -MAX_SECONDS <= due.due_in_s <= MAX_SECONDS:
        raise ProtocolError(f"batch {due.batch}: due_in_s must be {-MAX_SECONDS} to {MAX_SECONDS}")


class HeldParameters:
    """The parameters of all requests that the router has, and the memory that they take.

    Choices come one after the other, as do often requests of one client: parameters that are equal
    to those before them are the same object.
    """

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes` of each class, half of what others leave for each of its keys.

        What a request has for itself may be larger.
        """
        self._max_bytes = max_bytes
        self._last: dict[tuple[FrontendId, RequestClass], tuple[str, Parameters]] = {}
        """The last parameters, and their key."""
        self.num_bytes = dict.fromkeys(RequestClass, 0)
        self._of_keys: Counter[tuple[RequestClass, str]] = Counter()

    def share(self, frontend_id: FrontendId, submit: Submit, *, arrives: bool = True) -> Parameters:
        """Return the parameters of a request that arrives, or would: then nothing changes."""
        place = frontend_id, submit.request_class
        key, last = self._last.get(place, ("", None))
        if last is None or key != submit.prefix_salt or not _is_equal(last, submit):
            last = _parameters_of(submit)
            if arrives:
                self._last[place] = submit.prefix_salt, last
        return last

    def has_room(self, request: Request) -> bool:
        """Whether a request's parameters may be held."""
        num_held = self.num_bytes[request.request_class]
        num_more = 0 if request.parameters.num_holders else request.parameters.num_bytes
        if num_more == 0 or num_held == 0:
            return True
        num_own = self._of_keys[request.request_class, request.prefix_salt]
        is_shared = request.prefix_salt and num_own
        num_left = self._max_bytes - num_held
        return num_own + 2 * num_more <= num_left if is_shared else num_more <= num_left

    def hold(self, request: Request) -> None:
        """Count what a request has that was let in."""
        if request.parameters.num_holders == 0:
            self._count(request, request.parameters.num_bytes)
        request.parameters.num_holders += 1

    def release(self, request: Request) -> None:
        """Count it no longer."""
        request.parameters.num_holders -= 1
        if request.parameters.num_holders == 0:
            self._count(request, -request.parameters.num_bytes)

    def _count(self, request: Request, num_bytes: int) -> None:
        of = request.request_class, request.prefix_salt
        self.num_bytes[request.request_class] += num_bytes
        self._of_keys[of] += num_bytes
        if not self._of_keys[of]:
            del self._of_keys[of]

    def forget(self, frontend_id: FrontendId) -> None:
        """Keep nothing of a frontend that is gone for requests to come."""
        for request_class in RequestClass:
            self._last.pop((frontend_id, request_class), None)


def _is_equal(parameters: Parameters, submit: Submit) -> bool:
    return (
        parameters.allowed_token_ids == submit.sampling.allowed_token_ids
        and parameters.logit_bias == submit.sampling.logit_bias
        and parameters.bad_words == submit.sampling.bad_words
        and parameters.constraint == submit.constraint
        and parameters.thinking == submit.thinking
        and parameters.prediction == submit.prediction
        # By their digests: all pixels would be looked at one by one, tens of milliseconds for each.
        and [*map(without_pixels, parameters.images)] == [*map(without_pixels, submit.images)]
        and parameters.eos_token_ids == frozenset(submit.eos_token_ids)
    )


def _parameters_of(submit: Submit) -> Parameters:
    sampling = submit.sampling
    eos_token_ids = frozenset(submit.eos_token_ids)
    lists = (
        *(sampling.allowed_token_ids, sampling.logit_bias, sampling.bad_words),
        *(list(eos_token_ids), submit.constraint, submit.thinking, submit.prediction),
        *map(without_pixels, submit.images),
    )
    num_tokens = [image.num_tokens for image in submit.images]
    pixel_bytes = sum(image.num_bytes for image in submit.images)
    return Parameters(
        sampling.allowed_token_ids,
        sampling.logit_bias,
        sampling.bad_words,
        eos_token_ids,
        submit.constraint,
        submit.thinking,
        submit.prediction,
        submit.images,
        ImageSums(sum(num_tokens), sum([num * num for num in num_tokens])),
        num_bytes=(
            pixel_bytes
            + ID_BYTES * len(sampling.allowed_token_ids)
            + BIAS_BYTES * len(sampling.logit_bias)
            + sum(WORD_BYTES + ID_BYTES * len(word) for word in sampling.bad_words)
            + EOS_BYTES * len(eos_token_ids)
            + _text_bytes(submit.constraint)
            + (CHARACTER_BYTES * len(repr(submit.thinking)) if submit.thinking else 0)
            + len(submit.prediction)
        ),
        num_plan_bytes=len(_encoder.encode(lists)) + pixel_bytes,
    )


def _text_bytes(constraint: Constraint | None) -> int:
    if constraint is None:
        return 0
    texts: tuple[str, ...] = msgspec.structs.astuple(constraint)
    return sum(len(text) if text.isascii() else CHARACTER_BYTES * len(text) for text in texts)


def request_of(
    frontend_id: FrontendId,
    submit: Submit,
    parameters: Parameters,
    *,
    now_s: float,
    arrival_number: int,
    admission_limit: int | None,
    image_numbers: Sequence[int] = (),
) -> Request:
    """Return what the router keeps of a message; `parameters` are equal to its own.

    `image_numbers`: of each of its images, see `ImageNumbers`.

    Raises:
        ProtocolError: it has no prompt or nothing to generate.
    """
    prompt = _prompt_of(submit)
    if len(prompt) == 0 or submit.max_tokens < 1:
        raise ProtocolError(f"request {submit.request_id} is empty")
    thinking, budget = parameters.thinking, None
    if thinking is not None and thinking.budget < MAX_INT32:
        budget = thinking.budget + len(thinking.closing)
    return Request(
        key=RequestKey(frontend_id, submit.request_id),
        prompt_token_ids=with_image_ids(prompt, parameters.images, image_numbers),
        max_tokens=submit.max_tokens,
        eos_token_ids=parameters.eos_token_ids,
        sampling=msgspec.structs.replace(
            submit.sampling,
            allowed_token_ids=parameters.allowed_token_ids,
            logit_bias=parameters.logit_bias,
            bad_words=parameters.bad_words,
        ),
        request_class=submit.request_class,
        arrival_s=now_s - submit.age_s,
        arrival_number=arrival_number,
        priority=submit.priority,
        slo=submit.slo,
        batch=submit.batch,
        prediction_key=prediction_key(submit.request_class, submit.prediction_key, budget),
        constraint=parameters.constraint,
        output=submit.output,
        is_first=submit.is_first,
        prefix_salt=submit.prefix_salt,
        num_retained_tokens=submit.num_retained_tokens,
        retention_s=submit.retention_s,
        parameters=parameters,
        num_acknowledged_tokens=0 if submit.needs_acknowledgement else None,
        admission_limit=min(submit.max_tokens, admission_limit or submit.max_tokens),
    )


def _prompt_of(submit: Submit) -> Int32Array:
    """Return the token ids, int32 [num_prompt_tokens]. Raises ProtocolError if they are none."""
    try:
        return np.concatenate([unpack_int32(segment.token_ids) for segment in submit.prompt])
    except ValueError as error:
        raise ProtocolError(f"request {submit.request_id}: not a prompt: {error}") from error
