"""OpenAI's objects, as its routes write them: usage, chunks of a stream, log-probabilities."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec.json import encode

from lightserve.frontend.columns import (
    ITEMS_PER_PIECE,
    LogprobColumns,
    Piece,
    PieceColumns,
    json_array,
    json_list,
    json_object,
)
from lightserve.frontend.completion import Choices, Completion, Usage, raised_slo
from lightserve.frontend.openai.fields import UsageChunks
from lightserve.frontend.response import sse_event
from lightserve.messages.common import TokenLogprob
from lightserve.tokenization.tokenizer import Tokenizer

NO_FIELDS: Mapping[str, Any] = {}
DONE = sse_event(b"[DONE]")


def usage_object(usage: Usage) -> dict[str, Any]:
    """Return OpenAI's usage object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "accepted_prediction_tokens": usage.accepted_prediction_tokens,
            "rejected_prediction_tokens": usage.rejected_prediction_tokens,
        },
    }


def end_fields(completion: Completion, finish_reason: str | None) -> dict[str, Any]:
    """Return how a choice ended, if it has: in OpenAI's words, and what it was, as vLLM and SGLang
    tell it."""
    if finish_reason is None:
        return {"finish_reason": None}
    return {
        "finish_reason": finish_reason,
        "stop_reason": completion.stop_reason,
        "matched_stop": completion.matched_stop,
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
    return json_object(answer | raised_slo(choices.completions))


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
        """Return one chunk with this choice, and with `fields` of its own.

        `usage` is the choice's so far.
        """
        prefix = self._prefix
        for name, value in (fields or {}).items():
            prefix += b"," + encode(name) + b":" + encode(value)
        suffix = self._suffix
        if self._usage is UsageChunks.ALL:
            suffix = b',"usage":' + encode(usage_object(usage)) + b"}\n\n"
        return prefix + b',"choices":[' + encode(choice) + b"]" + suffix

    def frame(self, choice: dict[str, Any]) -> tuple[bytes, bytes] | None:
        """Return what stands before and behind the text in chunks that differ in nothing else.

        `choice` has an empty text; None: something else differs in every chunk.
        """
        if self._usage is UsageChunks.ALL:
            return None
        head, tail = encode(choice).split(b'""')
        return self._prefix + b',"choices":[' + head, tail + b"]" + self._suffix

    def closing(self, usage: Usage) -> bytes:
        """Return the usage chunk, if wanted, and the mark of the end."""
        if self._usage is UsageChunks.NONE:
            return DONE
        encoded = encode(usage_object(usage))
        return self._prefix + b',"choices":[],"usage":' + encoded + b"}\n\n" + DONE


# ----------------------------------------------------------------------
# Log-probabilities, in the shapes of chat completions and of completions.


LOWEST = -9999.0
"""JSON has no infinity: what is less probable is told as this."""


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Return a token as a string; one that is only part of a character as its bytes."""
    data = tokenizer.bytes_of(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(tokenizer: Tokenizer, pieces: Iterable[Piece]) -> dict[str, Any]:
    """Return the `logprobs` object of a chat choice; all pieces have theirs."""
    return {"content": [_of_chat(tokenizer, piece) for piece in pieces], "refusal": None}


def chat_logprobs_json(tokenizer: Tokenizer, pieces: PieceColumns) -> Iterator[bytes]:
    """Yield the same as JSON."""
    content = (_of_chat(tokenizer, piece) for piece in pieces)
    per_piece = pieces.logprobs.tokens_per_piece
    return json_object({"content": json_list(content, per_piece), "refusal": None})


def _of_chat(tokenizer: Tokenizer, piece: Piece) -> dict[str, Any]:
    assert piece.logprob is not None
    top = zip(piece.logprob.top_token_ids, piece.logprob.top_logprobs, strict=True)
    return {
        **_chat_token(tokenizer, piece.token_id, piece.logprob.logprob),
        "top_logprobs": [_chat_token(tokenizer, *pair) for pair in top],
    }


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": token_text(tokenizer, token_id),
        "logprob": max(logprob, LOWEST),
        "bytes": list(tokenizer.bytes_of(token_id)),
    }


class CompletionLogprobs:
    """Builds the `logprobs` objects of one completion, chunk by chunk.

    `text_offset` counts the characters before a token in the text of all tokens, prompt included
    where it is echoed.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def of_pieces(self, pieces: Iterable[Piece]) -> dict[str, Any]:
        """Return the object of some tokens, of the prompt or the output."""
        parts = list(pieces)
        offsets = []
        for piece in parts:
            offsets.append(self._offset)
            self._offset += len(piece.text)
        return {
            "tokens": [token_text(self._tokenizer, piece.token_id) for piece in parts],
            "token_logprobs": [
                None if piece.logprob is None else max(piece.logprob.logprob, LOWEST)
                for piece in parts
            ],
            "top_logprobs": [
                _top(self._tokenizer, piece.token_id, piece.logprob) for piece in parts
            ],
            "text_offset": offsets,
        }


def prompt_pieces(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: LogprobColumns
) -> Iterator[Piece]:
    """Yield the tokens of an echoed prompt; its first one has no log-probability."""
    detokenizer = tokenizer.detokenizer(())
    known = itertools.chain([None], logprobs)
    for token_id, logprob in zip(token_ids, known, strict=True):
        yield Piece(token_id, detokenizer.push((token_id,)), logprob)


def prompt_logprobs_json(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: LogprobColumns
) -> Iterator[bytes]:
    """Yield `prompt_logprobs` as JSON: null for the first token of the prompt, then by token id."""
    known = itertools.chain([None], logprobs)
    entries = (_by_id(tokenizer, *pair) for pair in zip(token_ids, known, strict=True))
    return json_list(entries, logprobs.tokens_per_piece)


def _by_id(
    tokenizer: Tokenizer, token_id: int, logprob: TokenLogprob | None
) -> dict[str, dict[str, Any]] | None:
    """Return the token itself, without a rank unless it is one of the most probable, and these."""
    if logprob is None:
        return None
    top = zip(logprob.top_token_ids, logprob.top_logprobs, strict=True)
    ranked = [(token_id, logprob.logprob, None), *((*pair, n) for n, pair in enumerate(top, 1))]
    return {
        str(i): {
            "logprob": max(value, LOWEST),
            "rank": rank,
            "decoded_token": token_text(tokenizer, i),
        }
        for i, value, rank in ranked
    }


def completion_logprobs_json(
    tokenizer: Tokenizer, prompt: tuple[Sequence[int], LogprobColumns] | None, output: PieceColumns
) -> Iterator[bytes]:
    """Yield the `logprobs` object of a whole completion as JSON, an echoed prompt's in front."""
    own_ids, known = prompt or ((), LogprobColumns())

    def token_ids() -> Iterator[int]:
        return itertools.chain(own_ids, output.token_ids)

    first: Sequence[None] = [None] if own_ids else []
    detokenizer = tokenizer.detokenizer(())
    own = (max(value, LOWEST) for value in itertools.chain(known.own, output.logprobs.own))
    texts = itertools.chain((detokenizer.push((i,)) for i in own_ids), output.texts())
    offsets = itertools.accumulate(map(len, texts), initial=0)
    logprobs = itertools.chain(first, known, output.logprobs)
    top = (_top(tokenizer, *pair) for pair in zip(token_ids(), logprobs, strict=True))
    num_tokens = len(own_ids) + len(output)
    per_piece = min(known.tokens_per_piece, output.logprobs.tokens_per_piece)
    return json_object(
        {
            "tokens": json_list((token_text(tokenizer, i) for i in token_ids()), ITEMS_PER_PIECE),
            "token_logprobs": json_list(itertools.chain(first, own), ITEMS_PER_PIECE),
            "top_logprobs": json_list(top, per_piece),
            "text_offset": json_list(itertools.islice(offsets, num_tokens), ITEMS_PER_PIECE),
        }
    )


def _top(
    tokenizer: Tokenizer, token_id: int, logprob: TokenLogprob | None
) -> dict[str, float] | None:
    """Return the most probable tokens, and the token itself."""
    if logprob is None:
        return None
    pairs = zip(logprob.top_token_ids, logprob.top_logprobs, strict=True)
    top = {token_text(tokenizer, i): max(value, LOWEST) for i, value in pairs}
    top[token_text(tokenizer, token_id)] = max(logprob.logprob, LOWEST)
    return top
