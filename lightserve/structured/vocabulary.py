"""What llguidance knows of a vocabulary: the bytes of each token, and which ones end an output."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llguidance import LLTokenizer, TokenizerWrapper

from lightserve.tokenization.tokenizer import Tokenizer


class _Tokens:
    """The form in which llguidance wants a vocabulary."""

    bos_token_id: int | None = None

    def __init__(
        self,
        tokens: Sequence[bytes],
        special_ids: Sequence[int],
        eos_token_id: int,
        encode: Callable[[str], list[int]],
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.eos_token_id = eos_token_id
        self._encode = encode
        self._ids: dict[bytes, int] = {}
        self._longest_token = 0

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the tokens of a text: where a grammar leaves but one, its usual tokens are drawn.

        Some tokenizers put a space in front, as if the output began here: then the longest tokens
        that fit will do.
        """
        text = text if isinstance(text, str) else text.decode()
        token_ids = self._encode(text)
        data = text.encode()
        if b"".join(self.tokens[token_id] for token_id in token_ids) == data:
            return token_ids
        return self._longest(data)

    def _longest(self, data: bytes) -> list[int]:
        if not self._ids:
            special = set(self.special_token_ids)
            self._ids = {t: i for i, t in enumerate(self.tokens) if i not in special}
            self._longest_token = max(map(len, self._ids))
        found: list[int] = []
        while data:
            lengths = range(min(len(data), self._longest_token), 0, -1)
            length = next((n for n in lengths if data[:n] in self._ids), 0)
            if length == 0:
                break  # the vocabulary has no token for this byte: what follows stays free
            found.append(self._ids[data[:length]])
            data = data[length:]
        return found


def byte_vocabulary() -> LLTokenizer:
    """Return a vocabulary of the 256 bytes and an end: enough to check a grammar, in no memory."""
    tokens = [*(bytes([byte]) for byte in range(256)), b"<end>"]
    source = _Tokens(tokens, [256], 256, lambda text: list(text.encode()))
    return LLTokenizer(TokenizerWrapper(source), slices=[])


def model_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> LLTokenizer:
    """Return a model's vocabulary; ids that the tokenizer does not know are never allowed.

    The tokenizer must have ids that end an output.
    """
    special = {token_id for token_id in range(vocab_size) if tokenizer.is_special(token_id)}
    special |= set(tokenizer.eos_token_ids)
    tokens = [_token_bytes(tokenizer, token_id) for token_id in range(vocab_size)]
    eos_token_ids = list(tokenizer.eos_token_ids)
    source = _Tokens(
        tokens,
        sorted(special),
        eos_token_ids[0],
        lambda text: tokenizer.encode(text, add_special_tokens=False),
    )
    return LLTokenizer(TokenizerWrapper(source), n_vocab=vocab_size, eos_token=eos_token_ids)


def _token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    # A name of its own for each id without one: equal names would be one token.
    return tokenizer.bytes_of(token_id) or b"<|unused %d|>" % token_id
