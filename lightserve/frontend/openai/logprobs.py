"""Log-probabilities in OpenAI's two shapes: of chat completions, and of completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from lightserve.frontend.generation import Piece
from lightserve.messages.common import TokenLogprob
from lightserve.tokenization.tokenizer import Tokenizer

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
    content = []
    for piece in pieces:
        assert piece.logprob is not None
        top = zip(piece.logprob.top_token_ids, piece.logprob.top_logprobs, strict=True)
        content.append(
            {
                **_chat_token(tokenizer, piece.token_id, piece.logprob.logprob),
                "top_logprobs": [_chat_token(tokenizer, *pair) for pair in top],
            }
        )
    return {"content": content, "refusal": None}


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

    def of_prompt(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]
    ) -> dict[str, Any]:
        """Return the object of an echoed prompt: its first token has no log-probability."""
        text = self._tokenizer.detokenizer(())
        known = [None, *logprobs]
        parts = [(i, text.push((i,)), logprob) for i, logprob in zip(token_ids, known, strict=True)]
        return self._object(parts)

    def of_pieces(self, pieces: Iterable[Piece]) -> dict[str, Any]:
        """Return the object of some tokens of the output."""
        return self._object([(piece.token_id, piece.text, piece.logprob) for piece in pieces])

    def _object(self, parts: Sequence[tuple[int, str, TokenLogprob | None]]) -> dict[str, Any]:
        offsets = []
        for _, text, _ in parts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": [token_text(self._tokenizer, token_id) for token_id, _, _ in parts],
            "token_logprobs": [
                None if logprob is None else max(logprob.logprob, LOWEST) for _, _, logprob in parts
            ],
            "top_logprobs": [None if lp is None else self._top(i, lp) for i, _, lp in parts],
            "text_offset": offsets,
        }

    def _top(self, token_id: int, logprob: TokenLogprob) -> dict[str, float]:
        """Return the most probable tokens, and the token itself."""
        pairs = [
            *zip(logprob.top_token_ids, logprob.top_logprobs, strict=True),
            (token_id, logprob.logprob),
        ]
        return {token_text(self._tokenizer, i): max(value, LOWEST) for i, value in pairs}


def join_completion_logprobs(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return one object for a whole completion."""
    joined: dict[str, Any] = {}
    for part in parts:
        for key, values in part.items():
            joined.setdefault(key, []).extend(values)
    return joined
