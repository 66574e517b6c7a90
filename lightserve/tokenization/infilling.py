"""Prompts whose output belongs between two texts, for models that were trained for it.

There is no standard: each family has tokens of its own, known by their names alone. All but one
write prefix, suffix, and the token after which the middle comes; Mistral's have the suffix first
and nothing behind the prefix.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lightserve.tokenization.tokenizer import Tokenizer


class _Family(NamedTuple):
    prefix: str
    suffix: str
    middle: str


_FAMILIES = (
    _Family("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen Coder, CodeGemma
    _Family("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite, Stable Code
    _Family("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    _Family("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    _Family("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 - DeepSeek
)
_MISTRAL = _Family("[PREFIX]", "[SUFFIX]", "[MIDDLE]")  # Codestral
_ENDS = (
    *("▁<EOT>", "<|fim_pad|>", "<fim_pad>", "<fim-pad>"),
    *("<|file_sep|>", "<file_sep>", "<|file_separator|>", "<|repo_name|>", "<repo_name>"),
)
"""Behind the middle, what ends it where the model does not end with EOS: the next file begins."""


class Infilling:
    """Makes such prompts with the tokens that a tokenizer has."""

    def __init__(
        self, tokenizer: Tokenizer, token_ids: Sequence[int], *, is_suffix_first: bool
    ) -> None:
        """`token_ids`: those of a family."""
        self._tokenizer = tokenizer
        self._prefix, self._suffix, self._middle = token_ids
        self._is_suffix_first = is_suffix_first
        self.end_token_ids = (*token_ids, *_ids(tokenizer, _ENDS))
        """What ends the output besides EOS: none of these is text."""

    def encode(self, prefix: str, suffix: str) -> array[int]:
        """Return the ids of a prompt. Raises InvalidRequest: a text cannot be tokenised."""
        bos = self._tokenizer.encode("", add_special_tokens=True)
        before = [self._prefix, *self._tokenizer.encode(prefix, add_special_tokens=False)]
        after = [self._suffix, *self._tokenizer.encode_within(suffix)]
        if self._is_suffix_first:
            return array("i", [*bos, *after, *before])
        return array("i", [*bos, *before, *after, self._middle])


def find_infilling(tokenizer: Tokenizer) -> Infilling | None:
    """Return how a model fills in between texts; None: it has no tokens for it."""
    for family in (*_FAMILIES, _MISTRAL):
        token_ids = _ids(tokenizer, family)
        if len(token_ids) == len(family):
            return Infilling(tokenizer, token_ids, is_suffix_first=family is _MISTRAL)
    return None


def _ids(tokenizer: Tokenizer, names: Iterable[str]) -> list[int]:
    """Return the ids of those tokens that there are."""
    found = (tokenizer.id_of(name) for name in names)
    return [token_id for token_id in found if token_id is not None]


def known_families() -> str:
    """Return the names of the tokens that are looked for, for a complaint."""
    return ", ".join("/".join(family) for family in (*_FAMILIES, _MISTRAL))
