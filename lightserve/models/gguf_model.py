"""A GGUF file as a model directory: its metadata as config.json and tokenizer files. Torch-free.

Written once for each file (path, length, time of change) beside the profiles; the tensors stay
where they are, behind a link.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from lightserve.cost.profile import cache_dir
from lightserve.errors import ModelLoadError
from lightserve.models.config import CONFIG_FILE, load_model_config
from lightserve.models.gguf import GgufFile, read_gguf
from lightserve.models.gguf_config import config_of
from lightserve.tokenization.sentencepiece_file import decoder, merges
from lightserve.tokenization.tiktoken_file import SPLITS

WEIGHTS_FILE = "model.gguf"
_LAYOUT = "3"
"""Of what is written: another one is written anew."""

_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT_4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ASCII_MARKS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_SPLITS: dict[str, tuple[str, ...]] = {
    **{name: (split,) for name, split in SPLITS.items()},
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), (SPLITS["llama-bpe"],)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "gpt-2", "default"), ()),
    "gpt-4o": (_GPT_4O,),
    "falcon": (
        r"[\p{P}\$\+<=>\^~\|`]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
        r"[0-9][0-9][0-9]",
    ),
    "deepseek-llm": (
        r"[\r\n]",
        r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",  # noqa: RUF001
        r"\s+$",
        r"[一-龥ࠀ-一가-퟿]+",
        r"\p{N}+",
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        r"[一-龥぀-ゟ゠-ヿ]+",  # noqa: RUF001
        rf"{_ASCII_MARKS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}
"""How texts are split before they are merged, step by step, by `tokenizer.ggml.pre`; without a
step: as GPT-2's are."""
_SINGLE_DIGITS = ("smollm", "starcoder", "refact")
_CONTROL, _USER_DEFINED = 3, 4
_HARMONY_ENDS = ("<|return|>", "<|call|>")


def unpacked_root() -> Path:
    """Return the directory of all directories that stand for GGUF files."""
    return cache_dir().parent / "gguf"


def unpack(path: Path) -> Path:
    """Return the model directory that stands for a GGUF file; written at the first time.

    Raises:
        ModelLoadError: the file is no whole GGUF file, or not of a model that can be served.
    """
    path = path.resolve()
    state = path.stat()
    identity = f"{_LAYOUT} {path} {state.st_size} {state.st_mtime_ns}"
    target = unpacked_root() / hashlib.sha256(identity.encode()).hexdigest()[:32]
    if target.is_dir():
        return target
    gguf = read_gguf(path)
    files = {
        CONFIG_FILE: config_of(gguf),
        "tokenizer.json": _tokenizer(gguf),
        "tokenizer_config.json": _tokenizer_config(gguf),
    }
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(dir=target.parent))
        try:
            for name, content in files.items():
                with (beside / name).open("w", encoding="utf-8") as file:
                    json.dump(content, file)  # piece by piece, not as one text
            _check_config(path, beside)
            (beside / WEIGHTS_FILE).symlink_to(path)
            with contextlib.suppress(OSError):  # another server was faster
                beside.rename(target)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    except OSError as error:
        raise ModelLoadError(f"{target}: {error.strerror}") from error
    return target


def _check_config(path: Path, directory: Path) -> None:
    """Refuse what cannot be served before it is kept, naming the GGUF file."""
    try:
        load_model_config(directory)
    except ModelLoadError as error:
        complaint = str(error).removeprefix(f"{directory / CONFIG_FILE}: ")
        raise ModelLoadError(f"{path}: in the words of {CONFIG_FILE}: {complaint}") from error


class _Made(list[Any]):
    """A list for `json.dump` whose items are made when they are written, once."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = iter(items)
        super().__init__(islice(self._items, 1))  # whether it is empty is asked first

    def __iter__(self) -> Iterator[Any]:
        return chain(super().__iter__(), self._items)


def _tokenizer(gguf: GgufFile) -> dict[str, Any]:
    """Return what tokenizer.json would say."""
    kind = gguf.string("tokenizer.ggml.model")
    pieces = gguf.strings("tokenizer.ggml.tokens")
    if not pieces or len(pieces) > gguf.tensors["token_embd.weight"].shape[0]:
        raise gguf.error("tokenizer.ggml.tokens", f"has {len(pieces)} tokens for the embedding")
    vocab = {piece: number for number, piece in enumerate(pieces)}
    match kind:
        case "gpt2":
            parts = _byte_level(gguf, vocab)
        case "llama":
            parts = _sentencepiece(gguf, vocab, pieces)
        case _:
            raise gguf.error("tokenizer.ggml.model", f"must be gpt2 or llama, got {kind!r}")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(gguf, pieces),
        "post_processor": None,
        **parts,
    }


def _added_tokens(gguf: GgufFile, pieces: list[str]) -> list[dict[str, Any]]:
    kinds = gguf.numbers("tokenizer.ggml.token_type")
    if len(kinds) != len(pieces):
        raise gguf.error("tokenizer.ggml.token_type", f"must have {len(pieces)} entries")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": at, "content": pieces[at], "special": bool(kinds[at] == _CONTROL), **flags}
        for at in np.flatnonzero((kinds == _CONTROL) | (kinds == _USER_DEFINED)).tolist()
        if pieces[at]
    ]


def _byte_level(gguf: GgufFile, vocab: dict[str, int]) -> dict[str, Any]:
    """Return a tokeniser as GPT-2's, whose merges the file has."""
    pre = gguf.string("tokenizer.ggml.pre", default="default")
    if pre not in _SPLITS:
        known = ", ".join(_SPLITS)
        raise gguf.error("tokenizer.ggml.pre", f"must be one of {known}, got {pre!r}")
    splits = _SPLITS[pre]
    kind = {"type": "Split", "behavior": "Isolated", "invert": False}
    steps: list[dict[str, Any]] = [kind | {"pattern": {"Regex": split}} for split in splits]
    if pre in _SINGLE_DIGITS:
        steps.append({"type": "Digits", "individual_digits": True})
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    steps.append(byte_level | {"use_regex": not splits})

    def merges() -> Iterator[str]:
        for merge in gguf.each_string("tokenizer.ggml.merges"):
            left, _, right = merge.partition(" ")
            if left not in vocab or right not in vocab or left + right not in vocab:
                raise gguf.error("tokenizer.ggml.merges", f"has {merge!r}, not of known tokens")
            yield merge

    return {
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": vocab,
            "merges": _Made(merges()),
            "ignore_merges": pre == "llama-bpe",
        },
    }


def _sentencepiece(gguf: GgufFile, vocab: dict[str, int], pieces: list[str]) -> dict[str, Any]:
    """Return a tokeniser as Llama 2's: the best piece of two neighbours is merged first."""
    scores = gguf.numbers("tokenizer.ggml.scores")
    if len(scores) != len(pieces):
        raise gguf.error("tokenizer.ggml.scores", f"must have {len(pieces)} entries")
    try:
        pairs = merges(pieces, scores, np.ones(len(pieces), dtype=bool))
    except ValueError as error:
        raise gguf.error("tokenizer.ggml.tokens", str(error)) from error
    has_prefix = gguf.boolean("tokenizer.ggml.add_space_prefix", default=True)
    steps: list[dict[str, Any]] = [{"type": "Prepend", "prepend": "▁"}] if has_prefix else []
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})
    unknown = gguf.integer("tokenizer.ggml.unknown_token_id", default=0)
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "decoder": decoder(has_prefix=has_prefix),
        "model": {
            "type": "BPE",
            "vocab": vocab,
            "merges": _Made(pairs),
            "unk_token": pieces[unknown] if unknown < len(pieces) else None,
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }


def _tokenizer_config(gguf: GgufFile) -> dict[str, Any]:
    """Return special tokens and the chat template."""
    num_pieces = gguf.count("tokenizer.ggml.tokens")
    is_llama = gguf.string("tokenizer.ggml.model") == "llama"
    config: dict[str, Any] = {
        "add_bos_token": gguf.boolean("tokenizer.ggml.add_bos_token", default=is_llama)
    }
    for name in ("bos", "eos"):
        key = f"tokenizer.ggml.{name}_token_id"
        if key in gguf.metadata:
            token_id = _token_id(gguf, key, num_pieces)
            config[f"{name}_token"] = gguf.string_at("tokenizer.ggml.tokens", token_id)
    ends = {
        _token_id(gguf, key, num_pieces)
        for name in ("eos", "eot", "eom")
        if (key := f"tokenizer.ggml.{name}_token_id") in gguf.metadata
    }
    if gguf.string("general.architecture") == "gpt-oss":
        ends = _harmony_ends(gguf) or ends
    config["eos_token_id"] = sorted(ends) or None
    if "tokenizer.chat_template" in gguf.metadata:
        config["chat_template"] = gguf.string("tokenizer.chat_template")
    return config


def _harmony_ends(gguf: GgufFile) -> set[int]:
    """Return what ends an answer of gpt-oss: a message's own end does not, a call's does."""
    pieces = gguf.each_string("tokenizer.ggml.tokens")
    return {number for number, piece in enumerate(pieces) if piece in _HARMONY_ENDS}


def _token_id(gguf: GgufFile, key: str, num_tokens: int) -> int:
    if (token_id := gguf.integer(key)) >= num_tokens:
        raise gguf.error(key, f"must be below {num_tokens}, got {token_id}")
    return token_id
