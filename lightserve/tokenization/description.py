"""In which file a model's tokeniser is, and what that says in the words of a tokenizer.json.

A tokenizer.json is taken as it is. Where there is none, SentencePiece's `tokenizer.model` or a file
of tiktoken's ranks is described that way, with the tokens that other files add.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightserve.errors import ModelLoadError
from lightserve.models.json_fields import JsonFields, read_json_object
from lightserve.tokenization.sentencepiece_file import describe_sentencepiece, read_sentencepiece
from lightserve.tokenization.tiktoken_file import describe_tiktoken, is_tiktoken

TOKENIZER_FILE = "tokenizer.json"
SENTENCEPIECE_FILE = "tokenizer.model"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
ADDED_TOKENS_FILE = "added_tokens.json"
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
    """Return what a file that `find_tokenizer` has found says. Raises ModelLoadError."""
    if path.name == TOKENIZER_FILE:
        return read_json_object(path)
    config_file = path.with_name(TOKENIZER_CONFIG_FILE)
    config = JsonFields(config_file, read_json_object(config_file) if config_file.is_file() else {})
    if path.suffix == ".tiktoken" or is_tiktoken(path):
        described = describe_tiktoken(path)
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
