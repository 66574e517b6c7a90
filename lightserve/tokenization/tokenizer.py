"""Text to token ids and back, over a `tokenizer.json` or a description of that form, without
transformers.

Facts about special tokens come from three files that often disagree: generation_config.json,
config.json and tokenizer_config.json. The ids that end a sequence are the union of all three.
"""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from lightserve.errors import InvalidRequest, ModelLoadError
from lightserve.models.config import CONFIG_FILE
from lightserve.models.json_fields import MAX_INT, JsonFields, read_json_object
from lightserve.tokenization.description import (
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    add_tokens,
    describe_tokenizer,
    find_tokenizer,
)
from lightserve.tokenization.detokenizer import Detokenizer, PieceTable, parse_decoder

GENERATION_CONFIG_FILE = "generation_config.json"
CHATML = "chatml"
"""Value of `chat_format` of generation_config.json: the form of Qwen 1's conversations."""
_CHATML_ENDS = ("<|im_end|>", "<|im_start|>")
_ANCHOR = "☺"
"""A text that merges with no other."""


class Spans(NamedTuple):
    """The tokens of a text and the characters `[start:stop]` that they stand for, perhaps in part.

    Those that are not in the text have none.
    """

    token_ids: array[int]
    starts: array[int]
    stops: array[int]


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """The special tokens that the configuration files name."""

    names: dict[str, str]
    """`bos_token`, `eos_token`, … to their text, as chat templates see them."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Any of these ends a sequence; ascending."""
    adds_bos: bool | None
    """`add_bos_token`; None leaves it to the post-processor."""
    adds_eos: bool
    """`add_eos_token`: whether texts end with EOS, where there is no post-processor."""


class Tokenizer:
    """A model's tokeniser. Thread-safe: nothing changes after construction."""

    def __init__(
        self, model_dir: Path, *, shown: Collection[str] = (), vocab_size: int | None = None
    ) -> None:
        """Load it.

        Args:
            model_dir: where the files are.
            shown: special tokens that are text.
            vocab_size: the number of ids that the model has: files beside the tokenizer add no
                tokens beyond it.

        Raises:
            ModelLoadError: names file and key.
        """
        path = find_tokenizer(model_dir)
        description = describe_tokenizer(path)
        self._tokenizer = _load(path, description)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        named = add_tokens(self._tokenizer, model_dir, vocab_size=vocab_size).named
        names = {name: token.content for name, token in named.items()}
        self.special_tokens = read_special_tokens(model_dir, self._tokenizer, names)
        self.eos_token_ids = self.special_tokens.eos_token_ids
        added_ids = self._encode("", add_special_tokens=True)
        self._last_id = self.id_of(names["eos_token"]) if self.special_tokens.adds_eos else None
        """Token that texts end with, if the model wants it."""
        self._num_added_bos = sum(i == self.special_tokens.bos_token_id for i in added_ids)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
        added = self._tokenizer.get_added_tokens_decoder()
        self.largest_ids = {
            "model.vocab": max(vocabulary.values(), default=0),
            "added_tokens": max(added, default=0),
            "post_processor": max(added_ids, default=0),
        }
        """The largest id under each key of tokenizer.json that ids in prompts come from."""
        special_ids = frozenset(
            token_id
            for token_id, token in added.items()
            if token.special and token.content not in shown
        )
        self._pieces = PieceTable(
            parse_decoder(path, description),
            piece_of=self._tokenizer.id_to_token,
            special_ids=special_ids,
        )
        pieces = itertools.chain(vocabulary, (token.content for token in added.values()))
        self.longest_piece_bytes = max((len(piece.encode()) for piece in pieces), default=1)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of `text`; if it is asked, with the BOS and EOS that the model wants.

        Rendered chat templates bring their own special tokens and pass False. Either way a BOS
        that stands in the text is not doubled.

        Raises:
            InvalidRequest: the text cannot be tokenised.
        """
        try:
            token_ids = self._encode(text, add_special_tokens=add_special_tokens)
        except Exception as error:  # the Rust library raises bare Exceptions of its own
            raise InvalidRequest("the text cannot be tokenised by this model") from error
        token_ids = self._with_one_bos(token_ids, add_special_tokens=add_special_tokens)
        token_ids += self._ending(token_ids, add_special_tokens=add_special_tokens)
        return token_ids

    def encode_within(self, text: str) -> list[int]:
        """Return the ids of a text that follows others: without the blank some put in front."""
        pieces = self._encode(_ANCHOR, add_special_tokens=False)
        if not pieces or not self.name_of(pieces[0]).startswith("▁"):
            return self.encode(text, add_special_tokens=False)
        return self.encode(_ANCHOR + text, add_special_tokens=False)[len(pieces) :]

    def encode_pair(
        self, first: str, second: str, *, most_of_second: int | None, type_step: int
    ) -> list[int]:
        """Return the ids of two texts as one prompt, with special tokens.

        Args:
            first: a text.
            second: another, …
            most_of_second: … of which only so many tokens are read; None: all.
            type_step: what the ids of tokens of the second type are raised by.
        """
        ours, theirs = self._tokenizer.encode_batch_fast([first, second], add_special_tokens=False)
        if most_of_second is not None:
            theirs.truncate(most_of_second)
        encoding = self._tokenizer.post_process(ours, theirs)
        pairs = zip(encoding.ids, encoding.type_ids, strict=True)
        return [token_id + type_step * of_type for token_id, of_type in pairs]

    def cut(self, text: str, most: int) -> str:
        """Return the beginning of a text that has so many tokens."""
        stops = self.spans(text, add_special_tokens=False).stops
        return text[: stops[most - 1]] if len(stops) > most else text

    def spans(self, text: str, *, add_special_tokens: bool) -> Spans:
        """Return the tokens of `encode` with their places. Raises InvalidRequest, as it does."""
        try:
            batch = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        except Exception as error:  # the Rust library raises bare Exceptions of its own
            raise InvalidRequest("the text cannot be tokenised by this model") from error
        encoding = batch[0]
        token_ids: list[int] = encoding.ids
        kept = self._with_one_bos(token_ids, add_special_tokens=add_special_tokens)
        num_dropped = len(token_ids) - len(kept)  # only BOS comes or goes, in front
        starts, stops = array("i"), array("i")
        for number in range(num_dropped, len(token_ids)):
            # One by one: the list of all keeps other threads from running for too long.
            start, stop = (encoding.token_to_chars(number) if number >= 0 else None) or (0, 0)
            starts.append(start)
            stops.append(stop)
        for token_id in self._ending(kept, add_special_tokens=add_special_tokens):
            kept.append(token_id)
            starts.append(0)
            stops.append(0)
        return Spans(array("i", kept), starts, stops)

    def name_of(self, token_id: int) -> str:
        """Return a token's name in the vocabulary; empty for an unknown id."""
        return self._tokenizer.id_to_token(token_id) or ""

    def id_of(self, name: str) -> int | None:
        """Return the id of a token by its name in the vocabulary; None: there is no such token."""
        token_id: int | None = self._tokenizer.token_to_id(name)
        return token_id

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of whole ids, special tokens skipped."""
        detokenizer = Detokenizer(self._pieces, continues=False)
        return detokenizer.push(token_ids) + detokenizer.finish()

    def detokenizer(self, prompt_token_ids: Sequence[int]) -> Detokenizer:
        """Return the detokeniser of the text behind this prompt."""
        # Most prompts have text at once; the ids of one that has none are looked at once each.
        has_text = self._pieces.has_text
        continues = any(map(has_text, prompt_token_ids[:16])) or any(
            map(has_text, set(prompt_token_ids))
        )
        return Detokenizer(self._pieces, continues=continues)

    def bytes_of(self, token_id: int) -> bytes:
        """Return a token's bytes, or those of its name if it has no text."""
        if self.is_special(token_id):
            return self.name_of(token_id).encode()
        return self._pieces.bytes_of(token_id)

    def is_special(self, token_id: int) -> bool:
        """Whether a token has no text."""
        return not self._pieces.has_text(token_id)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # Unlike `encode`, this call lets other threads run, and it skips the offsets: half the
        # time and memory for long texts.
        batch = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        token_ids: list[int] = batch[0].ids
        return token_ids

    def _ending(self, token_ids: list[int], *, add_special_tokens: bool) -> list[int]:
        """Return what the ids of a text lack at their end."""
        last = self._last_id
        if last is None or not add_special_tokens or token_ids[-1:] == [last]:
            return []
        return [last]

    def _with_one_bos(self, token_ids: list[int], *, add_special_tokens: bool) -> list[int]:
        special = self.special_tokens
        if (bos := special.bos_token_id) is None:
            return token_ids
        num_bos = 0
        while num_bos < len(token_ids) and token_ids[num_bos] == bos:
            num_bos += 1
        wanted = min(num_bos, 1)
        if add_special_tokens and special.adds_bos is not None:
            # The flag outranks the post-processor, which may have added one that is not wanted.
            wanted = 1 if special.adds_bos else min(max(num_bos - self._num_added_bos, 0), 1)
        return [bos] * wanted + token_ids[num_bos:]


def read_optional(model_dir: Path, name: str) -> JsonFields:
    """Return the fields of a file that may be missing."""
    path = model_dir / name
    return JsonFields(path, read_json_object(path) if path.is_file() else {})


def read_ids(fields: JsonFields, key: str) -> list[int]:
    """Return the ids under a key that holds one, a list of them, or none. Raises ModelLoadError."""
    if not fields.has(key):
        return []
    value: Any = dict(fields.items())[key]
    if not isinstance(value, list):
        return [fields.integer(key, low=0)]
    for item in value:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item <= MAX_INT:
            raise fields.error(key, f"must hold token ids, got {item!r}")
    return value


def read_special_tokens(
    model_dir: Path, tokenizer: tokenizers.Tokenizer, names: dict[str, str]
) -> SpecialTokens:
    """Collect BOS and EOS from the configuration files, and from the names of special tokens.

    Raises:
        ModelLoadError: names file and key.
    """
    config = read_optional(model_dir, CONFIG_FILE)
    generation = read_optional(model_dir, GENERATION_CONFIG_FILE)
    tokenizer_config = read_optional(model_dir, TOKENIZER_CONFIG_FILE)
    eos_token_ids = {
        *read_ids(generation, "eos_token_id"),
        *read_ids(config, "eos_token_id"),
        *read_ids(tokenizer_config, "eos_token_id"),
        *_named_id(tokenizer, "eos_token", names),
    }
    if generation.string("chat_format", default="") == CHATML:
        ends = map(tokenizer.token_to_id, _CHATML_ENDS)
        eos_token_ids.update(token_id for token_id in ends if token_id is not None)
    bos_ids = [
        *_named_id(tokenizer, "bos_token", names),
        *read_ids(generation, "bos_token_id"),
        *read_ids(config, "bos_token_id"),
    ]
    if tokenizer_config.is_null("bos_token") and "bos_token" not in names:
        bos_ids = []  # the tokenizer says plainly that it has none
    adds_bos = None
    if tokenizer_config.has("add_bos_token"):
        adds_bos = tokenizer_config.boolean("add_bos_token", default=False)
    return SpecialTokens(
        names=names,
        bos_token_id=bos_ids[0] if bos_ids else None,
        eos_token_ids=tuple(sorted(eos_token_ids)),
        adds_bos=adds_bos,
        adds_eos="eos_token" in names
        and tokenizer.post_processor is None
        and bool(tokenizer_config.boolean("add_eos_token", default=False)),
    )


def _load(path: Path, description: dict[str, Any]) -> tokenizers.Tokenizer:
    """Return the tokeniser of a description. Raises ModelLoadError naming the file."""
    try:
        if path.name == TOKENIZER_FILE:
            return tokenizers.Tokenizer.from_file(str(path))
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(description))
    except Exception as error:  # the Rust library raises bare Exceptions of its own
        raise ModelLoadError(f"{path}: not a usable tokenizer: {error}") from error
    for token in description["added_tokens"]:
        if (found := tokenizer.token_to_id(token["content"])) != token["id"]:
            raise ModelLoadError(
                f"{path.parent}: the added token {token['content']!r} has the id {token['id']},"
                f" where {found} would be the next"
            )
    return tokenizer


def _named_id(tokenizer: tokenizers.Tokenizer, key: str, names: dict[str, str]) -> list[int]:
    """Return the id of a token by its name; none: no file names it, or it is beyond the model."""
    token_id = tokenizer.token_to_id(names[key]) if key in names else None
    return [] if token_id is None else [token_id]


# ----------------------------------------------------------------------
# Whether a model's tokenizer files fit its weights: no id may be outside `vocab_size`.
#
# Checked before anything listens. An id too large would index past the embedding, or name an end
# of sequence that the model can never write. The other direction is usual and harmless: many
# models pad their embedding beyond the tokenizer.


_FILES_WITH_IDS = (CONFIG_FILE, GENERATION_CONFIG_FILE, TOKENIZER_CONFIG_FILE)
_ID_KEYS = ("bos_token_id", "eos_token_id")


def check_vocabulary(model_dir: Path, tokenizer: Tokenizer, *, vocab_size: int) -> None:
    """Check every id that this model's files name against `vocab_size` of its config.

    Raises:
        ModelLoadError: an id is too large; names file and key.
    """
    for source, token_id in tokenizer.largest_ids.items():
        if token_id >= vocab_size:
            raise ModelLoadError(
                f"{find_tokenizer(model_dir)}: key {source!r} {_complaint(token_id, vocab_size)}"
            )
    for name in _FILES_WITH_IDS:
        fields = read_optional(model_dir, name)
        for key in _ID_KEYS:
            for token_id in read_ids(fields, key):
                if token_id >= vocab_size:
                    raise fields.error(key, _complaint(token_id, vocab_size))


def _complaint(token_id: int, vocab_size: int) -> str:
    return (
        f"holds token id {token_id}, but vocab_size in {CONFIG_FILE} is {vocab_size}: ids must be"
        f" at most {vocab_size - 1}"
    )


# Prompts whose output belongs between two texts, for models that were trained for it.
#
# There is no standard: each family has tokens of its own, known by their names alone. All but one
# write prefix, suffix, and the token after which the middle comes; Mistral's have the suffix first
# and nothing behind the prefix.


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
"""Tokens behind the middle that end it where the model does not end with EOS: the next file
begins."""


class Infilling:
    """Makes such prompts with the tokens that a tokenizer has."""

    def __init__(
        self, tokenizer: Tokenizer, token_ids: Sequence[int], *, is_suffix_first: bool
    ) -> None:
        """`token_ids`: the tokens of a family."""
        self._tokenizer = tokenizer
        self._prefix, self._suffix, self._middle = token_ids
        self._is_suffix_first = is_suffix_first
        self.end_token_ids = (*token_ids, *_ids(tokenizer, _ENDS))
        """Tokens that end the output besides EOS: none of these is text."""

    def encode(self, prefix: str, suffix: str) -> array[int]:
        """Return the ids of a prompt. Raises InvalidRequest: a text cannot be tokenised."""
        around = self._tokenizer.encode("", add_special_tokens=True)
        bos = [i for i in around if i == self._tokenizer.special_tokens.bos_token_id]
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
    """Return the ids of the tokens that exist."""
    found = (tokenizer.id_of(name) for name in names)
    return [token_id for token_id in found if token_id is not None]


def known_families() -> str:
    """Return the names of the tokens that are looked for, for a complaint."""
    return ", ".join("/".join(family) for family in (*_FAMILIES, _MISTRAL))
