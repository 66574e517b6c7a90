"""The file of a model's tokeniser, and its contents in the words of a tokenizer.json.

A tokenizer.json is taken as it is. Where there is none, SentencePiece's `tokenizer.model` or a file
of tiktoken's ranks is described that way. The files beside it add tokens, change their flags and
name special ones, as transformers reads them: `added_tokens_decoder` of tokenizer_config.json
counts, or where there is none added_tokens.json and special_tokens_map.json.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from lightserve.errors import ModelLoadError
from lightserve.models.config import CONFIG_FILE
from lightserve.models.json_fields import JsonFields, read_json_object
from lightserve.models.vision_families import VISION_KEY
from lightserve.tokenization.vocabulary_files import (
    describe_sentencepiece,
    describe_tiktoken,
    is_tiktoken,
    read_sentencepiece,
)

log = logging.getLogger(__name__)

TOKENIZER_FILE = "tokenizer.json"
SENTENCEPIECE_FILE = "tokenizer.model"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
ADDED_TOKENS_FILE = "added_tokens.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
SPECIAL_TOKEN_NAMES = (
    *("bos_token", "eos_token", "unk_token", "sep_token"),
    *("pad_token", "cls_token", "mask_token"),
)
_EXTRA_KEYS = ("extra_special_tokens", "additional_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_MAX_ADDED = 1 << 16


def tokenizer_file(model_dir: Path) -> Path | None:
    """Return the file that has the tokeniser, None: there is none."""
    ranks = sorted(model_dir.glob("*.tiktoken"))
    paths = (model_dir / TOKENIZER_FILE, model_dir / SENTENCEPIECE_FILE, *ranks[:1])
    return next((path for path in paths if path.is_file()), None)


def find_tokenizer(model_dir: Path) -> Path:
    """Return the file that has the tokeniser. Raises ModelLoadError: there is none."""
    path = tokenizer_file(model_dir)
    if path is None:
        raise ModelLoadError(
            f"{model_dir / TOKENIZER_FILE}: no such file, and neither {SENTENCEPIECE_FILE}"
            " (SentencePiece or tiktoken) nor a *.tiktoken"
        )
    return path


def describe_tokenizer(path: Path) -> dict[str, Any]:
    """Return the contents of a file that `find_tokenizer` has found. Raises ModelLoadError."""
    if path.name == TOKENIZER_FILE:
        return read_json_object(path)
    config_file = path.with_name(TOKENIZER_CONFIG_FILE)
    config = JsonFields(config_file, read_json_object(config_file) if config_file.is_file() else {})
    if path.suffix == ".tiktoken" or is_tiktoken(path):
        model_file = path.with_name(CONFIG_FILE)
        model = read_json_object(model_file) if model_file.is_file() else {}
        described = describe_tiktoken(path, sees_images=VISION_KEY in model)
    else:
        is_legacy = config.boolean("legacy", default=True)
        described = describe_sentencepiece(read_sentencepiece(path), is_legacy=is_legacy)
    by_id = {token["id"]: token for token in described["added_tokens"]}
    by_id |= _from_file(path.with_name(ADDED_TOKENS_FILE)) | _from_config(config)
    if len(by_id) > _MAX_ADDED:
        raise ModelLoadError(f"{path}: {len(by_id)} added tokens, more than {_MAX_ADDED}")
    described["added_tokens"] = [by_id[token_id] for token_id in sorted(by_id)]
    return described


def _from_file(path: Path) -> dict[int, dict[str, Any]]:
    """Return the tokens of added_tokens.json, which has nothing but their ids."""
    if not path.is_file():
        return {}
    fields = JsonFields(path, read_json_object(path))
    flags = dict.fromkeys(_FLAGS, False)
    return {
        token_id: {"id": token_id, "content": content, **flags}
        for content, _ in fields.items()
        for token_id in [fields.integer(content, low=0)]
    }


def _from_config(config: JsonFields) -> dict[int, dict[str, Any]]:
    """Return the tokens of tokenizer_config.json's `added_tokens_decoder`."""
    if not config.has("added_tokens_decoder"):
        return {}
    tokens = config.child("added_tokens_decoder")
    found = {}
    for number, _ in tokens.items():
        if not number.isdigit() or len(number) > 9:
            raise tokens.error(number, "must be the id of a token")
        own = tokens.child(number)
        flags = {flag: own.boolean(flag, default=False) for flag in _FLAGS}
        found[int(number)] = {"id": int(number), "content": own.string("content"), **flags}
    return found


# Tokens that the files beside a tokenizer add or name.


@dataclass(frozen=True)
class NamedTokens:
    """Special tokens by name, and special tokens without one; flags as tokenizer.json has them."""

    named: dict[str, tokenizers.AddedToken] = field(default_factory=dict)
    """`bos_token`, … in the order of `SPECIAL_TOKEN_NAMES`, then tokens with other names."""
    others: list[tokenizers.AddedToken] = field(default_factory=list)


def read_named_tokens(model_dir: Path) -> NamedTokens:
    """Return the special tokens that the files name. Raises ModelLoadError: file and key."""
    path = model_dir / TOKENIZER_CONFIG_FILE
    config = JsonFields(path, read_json_object(path) if path.is_file() else {})
    found = NamedTokens()
    _collect(config, found)
    beside = model_dir / SPECIAL_TOKENS_FILE
    if beside.is_file() and not config.has("added_tokens_decoder"):
        _collect(JsonFields(beside, read_json_object(beside)), found)
    order = {name: number for number, name in enumerate(SPECIAL_TOKEN_NAMES)}
    names = sorted(found.named, key=lambda name: order.get(name, len(order)))
    return NamedTokens({name: found.named[name] for name in names}, found.others)


def _collect(fields: JsonFields, found: NamedTokens) -> None:
    for key, value in fields.items():
        is_known = key in SPECIAL_TOKEN_NAMES
        if value is not None and (is_known or _is_token(key, value)):
            found.named[key] = _token(fields, key, value)
        elif key in _EXTRA_KEYS and isinstance(value, dict):
            names = fields.child(key)
            found.named.update({name: _token(names, name, one) for name, one in value.items()})
        elif key in _EXTRA_KEYS and value is not None:
            found.others.extend(_token(fields, key, one) for one in fields.array(key))


def _is_token(key: str, value: Any) -> bool:
    is_given = isinstance(value, str) or (isinstance(value, dict) and "content" in value)
    return is_given and key.endswith("_token")


def _token(fields: JsonFields, key: str, value: Any) -> tokenizers.AddedToken:
    """Return a special token that is a text, or an object with `content` and flags."""
    if not isinstance(value, dict):
        if not isinstance(value, str):
            raise fields.error(key, f"must be a string or an object, got {str(value)[:40]}")
        return tokenizers.AddedToken(value, special=True, normalized=False)
    own = JsonFields(fields.path, value, prefix=f"{key}.")
    flags = {flag: own.boolean(flag, default=False) for flag in _FLAGS}
    return tokenizers.AddedToken(own.string("content"), **(flags | {"special": True}))


def add_tokens(
    tokenizer: tokenizers.Tokenizer, model_dir: Path, *, vocab_size: int | None
) -> NamedTokens:
    """Add the tokens of the files beside a tokenizer to it, and return the special tokens by name.

    A token whose id would be `vocab_size` or more is left out, with a warning: the model cannot
    read it.

    Raises:
        ModelLoadError: a file is wrong, or gives a new token another id than the next one.
    """
    special = read_named_tokens(model_dir)
    own = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    size = tokenizer.get_vocab_size(with_added_tokens=False)
    next_id = max([size, *(i + 1 for i in tokenizer.get_added_tokens_decoder())])
    wanted: dict[str, tokenizers.AddedToken] = {}
    left_out = []
    for said_id, token in _added(model_dir, special, own):
        content = token.content
        if said_id is None and content in wanted:
            continue
        if content not in wanted and tokenizer.token_to_id(content) is None:
            if vocab_size is not None and max(next_id, said_id or 0) >= vocab_size:
                left_out.append(content)
                continue
            if said_id not in (None, next_id):
                raise ModelLoadError(
                    f"{model_dir}: the added token {content!r} has the id {said_id}, where"
                    f" {next_id} would be the next"
                )
            next_id += 1
        wanted[content] = token
    if len(wanted) > _MAX_ADDED:
        raise ModelLoadError(f"{model_dir}: {len(wanted)} added tokens, more than {_MAX_ADDED}")
    if left_out:
        log.warning(
            "tokens that the files beside the tokenizer name and the model, with a vocabulary of"
            " %d, cannot read are text: %s",
            vocab_size,
            ", ".join(left_out[:16]),
        )
    changed = [token for token in wanted.values() if _differs(token, own.get(token.content))]
    if changed:
        tokenizer.add_tokens(changed)
    return special


def _differs(token: tokenizers.AddedToken, own: tokenizers.AddedToken | None) -> bool:
    return own is None or any(getattr(token, flag) != getattr(own, flag) for flag in _FLAGS)


def _added(
    model_dir: Path, special: NamedTokens, own: dict[str, tokenizers.AddedToken]
) -> Iterator[tuple[int | None, tokenizers.AddedToken]]:
    """Yield tokens with the ids that files give them: by id, then tokens that are only named."""
    path = model_dir / TOKENIZER_CONFIG_FILE
    config = JsonFields(path, read_json_object(path) if path.is_file() else {})
    named = {token.content for token in special.named.values()}
    others = {token.content for token in special.others}
    by_id = _from_config(config)
    if not by_id:
        by_id = _from_file(model_dir / ADDED_TOKENS_FILE)
        for token in by_id.values():
            token["special"] = token["content"] in named | others
            token["normalized"] = not token["special"]
        by_id = {number: token for number, token in by_id.items() if token["content"] not in own}
    for number, token in sorted(by_id.items()):
        flags = {flag: token[flag] for flag in _FLAGS}
        flags["special"] = flags["special"] or token["content"] in named
        yield number, tokenizers.AddedToken(token["content"], **flags)
    for named_token in [*special.named.values(), *special.others]:
        content = named_token.content
        if (known := own.get(content)) is None:
            yield None, named_token
        elif content in named and not known.special:
            flags = {flag: getattr(known, flag) for flag in _FLAGS} | {"special": True}
            yield None, tokenizers.AddedToken(content, **flags)
