"""tiktoken's files of ranks as a tokenizer.json would say them: Qwen 1's and Llama 3's own.

A line is a token's bytes in base64, a blank, and its rank. How texts are split before bytes are
merged, and which special tokens follow, stands in the programs of those models: it is known here by
the number of ranks.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightserve.errors import ModelLoadError
from lightserve.tokenization.detokenizer import byte_level_alphabet

MAX_BYTES = 64 << 20
MAX_TOKEN_BYTES = 1024
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
SPLITS = {
    "llama-bpe": rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_REST}",
    "qwen2": rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_REST}",
}
"""How texts are split before they are merged, by llama.cpp's names."""


@dataclass(frozen=True, kw_only=True)
class _Family:
    split: str
    special_tokens: tuple[str, ...]
    bos: str | None = None
    has_nfc: bool = False


_LLAMA3_SPECIAL = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|reserved_special_token_2|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    *(f"<|reserved_special_token_{number}|>" for number in range(3, 248)),
)
_FAMILIES = {
    128_000: _Family(
        split=SPLITS["llama-bpe"], special_tokens=_LLAMA3_SPECIAL, bos=_LLAMA3_SPECIAL[0]
    ),
    151_643: _Family(
        split=SPLITS["qwen2"],
        special_tokens=(
            *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
            *(f"<|extra_{number}|>" for number in range(205)),
        ),
        has_nfc=True,
    ),
}
"""By the number of ranks: Llama 3, Qwen 1."""


def is_tiktoken(path: Path) -> bool:
    """Whether a file begins with a line of ranks."""
    with path.open("rb") as file:
        return _parsed(file.readline(4 * MAX_TOKEN_BYTES)) is not None


def describe_tiktoken(path: Path) -> dict[str, Any]:
    """Return what tokenizer.json would say. Raises ModelLoadError."""
    ranks = _read(path)
    if len(ranks) not in _FAMILIES:
        known = " and ".join(f"{number:,}" for number in _FAMILIES)
        raise ModelLoadError(
            f"{path}: has {len(ranks):,} ranks; known are files of {known} (Llama 3, Qwen 1)"
        )
    return describe_ranks(ranks, _FAMILIES[len(ranks)])


def describe_ranks(ranks: dict[bytes, int], family: _Family) -> dict[str, Any]:
    """Return what tokenizer.json would say of ranks 0, 1, … and what belongs to them."""
    letters = {byte: letter for letter, byte in byte_level_alphabet().items()}

    def text(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    found = []
    for token, rank in ranks.items():
        for cut in range(1, len(token)):
            left, right = ranks.get(token[:cut]), ranks.get(token[cut:])
            if left is not None and right is not None:
                found.append((rank, left, right, cut, token))
    found.sort(key=lambda merge: merge[:3])
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    split = {"type": "Split", "pattern": {"Regex": family.split}, "behavior": "Isolated"}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    processor = None
    if family.bos is not None:
        sequence = {"Sequence": {"id": "A", "type_id": 0}}
        bos_id = len(ranks) + family.special_tokens.index(family.bos)
        processor = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": family.bos, "type_id": 0}}, sequence],
            "pair": [sequence, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {
                family.bos: {"id": family.bos, "ids": [bos_id], "tokens": [family.bos]}
            },
        }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": len(ranks) + number, "content": name, "special": True, **flags}
            for number, name in enumerate(family.special_tokens)
        ],
        "normalizer": {"type": "NFC"} if family.has_nfc else None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [split | {"invert": False}, byte_level | {"use_regex": False}],
        },
        "post_processor": processor,
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {text(token): rank for token, rank in ranks.items()},
            "merges": [(text(token[:cut]), text(token[cut:])) for *_, cut, token in found],
            "ignore_merges": True,
        },
    }


def _read(path: Path) -> dict[bytes, int]:
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ModelLoadError(f"{path}: {size} bytes, more than {MAX_BYTES}")
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ModelLoadError(f"{path}: {error.strerror}") from error
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        pair = _parsed(line)
        if pair is None:
            raise ModelLoadError(f"{path}: line {number} is no token in base64 and its rank")
        ranks[pair[0]] = pair[1]
    if sorted(ranks.values()) != list(range(len(lines) - lines.count(b""))):
        raise ModelLoadError(f"{path}: its ranks are not 0, 1, 2, …, each of one token")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ModelLoadError(f"{path}: has no token for the byte {missing[0]}")
    return ranks


def _parsed(line: bytes) -> tuple[bytes, int] | None:
    """Return a line's token and rank, None: it is no such line."""
    parts = line.split()
    if len(parts) != 2 or not parts[1].isdigit() or len(parts[1]) > 9:
        return None
    try:
        token = base64.b64decode(parts[0], validate=True)
    except (binascii.Error, ValueError):
        return None
    return (token, int(parts[1])) if 0 < len(token) <= MAX_TOKEN_BYTES else None
