"""Token rows for training: the chat template, the special tokens, packing and targets.

A row starts with a document's start and is filled with documents; the last is cut. A document sees
itself only: `document_ids` says which token belongs to which. (Positions run on over the row, which
rotary embeddings do not notice.) System messages are read but not learnt.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from tools.tiny_model.corpus import Conversation, draw_conversation, draw_exchange

PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (PAD, BOS, EOS, SYSTEM, USER, ASSISTANT)
"""Special tokens in the order of their ids, from 0."""

IGNORED = -100
"""Target of a token that is not learnt (the value that torch's cross entropy skips)."""

CHAT_TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ '<|system|>' + tools | tojson }}{% endif %}"
    "{% for message in messages %}"
    "{% set role = 'system' if message['role'] == 'tool' else message['role'] %}"
    "{% if role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('Unknown role: ' + role) }}{% endif %}"
    "{{ '<|' + role + '|>' + (message['content'] or '') | trim }}"
    "{% if message['tool_calls'] %}{{ message['tool_calls'] | tojson }}{% endif %}"
    "{% if role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


TRAINED_LENGTH = 512
"""Tokens per training row: the length to which quality is promised."""
NUM_STEPS = 2000
ROWS_PER_STEP = 8

_TEXT_SEED = 12
_NUM_FIRST_FACTS = 20_000


class Segment(NamedTuple):
    """A piece of a document and whether the model learns to write it."""

    text: str
    learnt: bool


def render(conversation: Conversation) -> tuple[Segment, ...]:
    """Write a conversation as the chat template does (or raw), BOS and EOS included."""
    if conversation.form == "raw":
        (exchange,) = conversation.exchanges
        return (
            Segment(BOS, False),
            Segment(f"{exchange.prompt}\n{exchange.answer}{EOS}", True),
        )
    segments = [Segment(BOS, False)]
    if conversation.system:
        segments.append(Segment(f"{SYSTEM}{conversation.system}", False))
    for exchange in conversation.exchanges:
        segments.append(Segment(f"{USER}{exchange.prompt}{ASSISTANT}{exchange.answer}{EOS}", True))
    return tuple(segments)


class Rows(NamedTuple):
    """Rows of tokens, each array int64 `[num_rows, num_tokens]`."""

    token_ids: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    """The token after each, or `IGNORED`."""
    document_ids: npt.NDArray[np.int64]
    """Which document of its row each token belongs to."""


def fill_rows(
    conversations: Iterator[Conversation], *, tokenizer: Tokenizer, num_tokens: int
) -> Iterator[Rows]:
    """Yield rows of `num_tokens` tokens, one by one (arrays `[1, num_tokens]`).

    Takes from `conversations` only what the rows asked for need.
    """
    while True:
        token_ids: list[int] = []
        targets: list[int] = []
        document_ids: list[int] = []
        while len(token_ids) <= num_tokens:
            document_id = document_ids[-1] + 1 if document_ids else 0
            for segment in render(next(conversations)):
                encoded = tokenizer.encode(segment.text, add_special_tokens=False).ids
                token_ids += encoded
                targets += encoded if segment.learnt else [IGNORED] * len(encoded)
                document_ids += [document_id] * len(encoded)
        yield Rows(
            token_ids=np.array([token_ids[:num_tokens]], dtype=np.int64),
            targets=np.array([targets[1 : num_tokens + 1]], dtype=np.int64),
            document_ids=np.array([document_ids[:num_tokens]], dtype=np.int64),
        )


def stack(rows: Sequence[Rows]) -> Rows:
    """Join rows into one batch."""
    return Rows(
        np.concatenate([row.token_ids for row in rows]),
        np.concatenate([row.targets for row in rows]),
        np.concatenate([row.document_ids for row in rows]),
    )


def training_conversations() -> Iterator[Conversation]:
    """Yield the conversations that training reads, in its order, without end.

    The first ones are facts only: in so short documents the model learns within some hundred steps
    to copy what the prompt mentions; from stories it takes it thousands.
    """
    rng = Random(_TEXT_SEED)
    for _ in range(_NUM_FIRST_FACTS):
        yield Conversation("chat", "", (draw_exchange(rng, kind="fact"),))
    while True:
        yield draw_conversation(rng)


def training_text(tokenizer_file: Path) -> str:
    """Write the answers of all conversations that training has read, one per line.

    Fills the rows again, so as to stop at the same conversation; about half a minute.
    """
    answers: list[str] = []

    def recorded() -> Iterator[Conversation]:
        for conversation in training_conversations():
            answers.extend(exchange.answer for exchange in conversation.exchanges)
            yield conversation

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    rows = fill_rows(recorded(), tokenizer=tokenizer, num_tokens=TRAINED_LENGTH)
    for _ in islice(rows, NUM_STEPS * ROWS_PER_STEP):
        pass
    return "\n".join(answers)
