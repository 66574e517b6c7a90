"""Vocabularies of other formats as a tokenizer.json would say them: SentencePiece and tiktoken.

SentencePiece's `tokenizer.model` is a protocol buffer, `ModelProto` of SentencePiece's own schema,
and its pieces and a few settings are read. BPE models become merges: the best piece of two
neighbours is made first.

tiktoken's files of ranks (Qwen 1's and Llama 3's own): a line is a token's bytes in base64, a
blank, and its rank. How texts are split before bytes are merged, and which special tokens follow,
stands in the programs of those models: it is known here by the number of ranks.
"""

from __future__ import annotations

import base64
import binascii
import math
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np

from lightserve.errors import ModelLoadError
from lightserve.tokenization.detokenizer import byte_level_alphabet

MAX_BYTES = 64 << 20
MAX_PIECES = 1 << 21
MAX_PIECE_CHARS = 256
"""Most characters of a piece that two others make: a file that lies could ask for billions of
cuts."""
MOST_CUTS = 8
"""Into two other pieces, for each piece in the mean; Llama 2's have two."""
BLANK = "▁"
_UNIGRAM, _BPE = 1, 2
_KINDS = {_UNIGRAM: "Unigram", _BPE: "BPE"}
_UNUSED_PENALTY = 1000.0


class Kind(IntEnum):
    """The purpose of a piece."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(kw_only=True)
class SentencePieceModel:
    """The fields that are read of a file; absent fields have SentencePiece's default."""

    path: Path
    pieces: list[str] = field(default_factory=list)
    scores: array[float] = field(default_factory=lambda: array("f"))
    kinds: bytearray = field(default_factory=bytearray)
    model_type: int = _UNIGRAM
    has_bytes: bool = False
    unknown_id: int = 0
    bos_id: int = 1
    charsmap: bytes = b""
    """Normalisation of characters, as SentencePiece compiled it."""
    adds_prefix: bool = True
    """Whether a text gets a blank in front."""
    drops_blanks: bool = True
    """Whether blanks at the ends, and of several blanks all but one, are left out."""
    escapes_blanks: bool = True

    def error(self, complaint: str) -> ModelLoadError:
        """Return the error that names the file."""
        return ModelLoadError(f"{self.path}: no usable SentencePiece model: {complaint}")


# The protocol buffer.


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Read a file. Raises ModelLoadError: it is cut off, no such file, or of another kind."""
    model = SentencePieceModel(path=path)
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise model.error(f"{size} bytes, more than {MAX_BYTES}")
        data = memoryview(path.read_bytes())
    except OSError as error:
        raise ModelLoadError(f"{path}: {error.strerror}") from error
    try:
        for number, value in _fields(data):
            match number, value:
                case 1, memoryview():
                    _read_piece(model, value)
                case 2, memoryview():
                    _read_trainer(model, value)
                case 3, memoryview():
                    _read_normaliser(model, value)
    except (ValueError, struct.error) as error:
        raise model.error(str(error)) from error
    _check(model)
    return model


def _check(model: SentencePieceModel) -> None:
    if not model.pieces:
        raise model.error("it has no pieces")
    if model.model_type not in _KINDS:
        raise model.error(
            f"its model_type is {model.model_type}, supported are 1 and 2 (unigram, BPE)"
        )
    if not model.escapes_blanks:
        raise model.error("escape_whitespaces is false, supported is true")
    if len(set(model.pieces)) < len(model.pieces):
        raise model.error("it has a piece twice")
    if model.unknown_id >= len(model.pieces) or model.kinds[model.unknown_id] != Kind.UNKNOWN:
        unknown = [at for at, kind in enumerate(model.kinds) if kind == Kind.UNKNOWN]
        if len(unknown) != 1:
            raise model.error(f"it has {len(unknown)} unknown pieces, not one")
        model.unknown_id = unknown[0]
    if not all(map(math.isfinite, model.scores)):
        raise model.error("it has a score that is not finite")


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield a message's fields: numbers, and bytes of those that have a length.

    Numbers of 32 and 64 bits are bytes, too. Raises ValueError.
    """
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire not in (1, 2, 5):
            raise ValueError(f"a field of the type {wire} at byte {at}")
        length = {1: 8, 5: 4}.get(wire, 0)
        if wire == 2:
            length, at = _varint(data, at)
        if length > len(data) - at:
            raise ValueError(f"{length} bytes from {at} on are beyond the end of a message")
        yield number, data[at : at + length]
        at += length


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("it ends within a number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (2**64 - 1), at
    raise ValueError(f"a number of more than 10 bytes before {at}")


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _read_piece(model: SentencePieceModel, data: memoryview) -> None:
    piece, score, kind = "", 0.0, int(Kind.NORMAL)
    for number, value in _fields(data):
        match number, value:
            case 1, memoryview():
                piece = str(value, "utf-8")
            case 2, memoryview() if len(value) == 4:
                (score,) = struct.unpack("<f", value)
            case 3, int():
                kind = Kind(value)
    if not piece or len(model.pieces) >= MAX_PIECES:
        what = "an empty piece" if not piece else f"more than {MAX_PIECES} pieces"
        raise ValueError(f"it has {what}")
    model.pieces.append(piece)
    model.scores.append(score)
    model.kinds.append(kind)


def _read_trainer(model: SentencePieceModel, data: memoryview) -> None:
    for number, value in _fields(data):
        match number, value:
            case 3, int():
                model.model_type = value
            case 24, int() if value:
                raise ValueError("treat_whitespace_as_suffix is true, supported is false")
            case 35, int():
                model.has_bytes = bool(value)
            case 40, int():
                model.unknown_id = max(0, _signed(value))
            case 41, int():
                model.bos_id = _signed(value)


def _read_normaliser(model: SentencePieceModel, data: memoryview) -> None:
    for number, value in _fields(data):
        match number, value:
            case 2, memoryview():
                model.charsmap = bytes(value)
            case 3, int():
                model.adds_prefix = bool(value)
            case 4, int():
                model.drops_blanks = bool(value)
            case 5, int():
                model.escapes_blanks = bool(value)


# As a tokenizer.json.


def describe_sentencepiece(model: SentencePieceModel, *, is_legacy: bool) -> dict[str, Any]:
    """Return the contents of tokenizer.json.

    `is_legacy`: a text behind a special token gets a blank in front, too, as transformers does
    unless a tokenizer_config.json says otherwise.
    """
    prefix = model.adds_prefix
    steps: list[dict[str, Any]] = []
    if model.charsmap:
        charsmap = base64.b64encode(model.charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if model.drops_blanks:
        steps.append({"type": "Strip", "strip_left": True, "strip_right": True})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    before = None
    # What normalisers have changed may begin elsewhere, where no pre-tokeniser puts a blank.
    if prefix and (is_legacy or steps):
        steps.append({"type": "Prepend", "prepend": BLANK})
    elif prefix:
        before = {
            "type": "Metaspace",
            "replacement": BLANK,
            "prepend_scheme": "first",
            "split": False,
        }
    if before is None:
        steps.append({"type": "Replace", "pattern": {"String": " "}, "content": BLANK})
    parts = _bpe(model) if model.model_type == _BPE else _unigram(model)
    return described(
        added=_added_tokens(model),
        normalizer={"type": "Sequence", "normalizers": steps} if steps else None,
        pre_tokenizer=before,
        post_processor=_bos(model),
        decoder=decoder(has_prefix=prefix),
        model=parts,
    )


def decoder(*, has_prefix: bool) -> dict[str, Any]:
    """Return the decoder that makes a text of pieces."""
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": BLANK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": decoders}


def merges(
    pieces: Sequence[str], scores: np.ndarray, is_made: Sequence[bool] | np.ndarray
) -> Iterator[tuple[str, str]]:
    """Yield the pairs that make pieces, the best first.

    `is_made`: whether a piece is made of others, and others of it.

    Raises:
        ValueError: too many.
    """
    vocab = {piece: number for number, piece in enumerate(pieces) if is_made[number]}
    found = array("i")  # three numbers for each merge: what it makes, and what of
    for piece, number in vocab.items():
        for cut in range(1, len(piece) if len(piece) <= MAX_PIECE_CHARS else 1):
            left, right = vocab.get(piece[:cut]), vocab.get(piece[cut:])
            if left is not None and right is not None:
                found.extend((number, left, right))
        if len(found) > 3 * MOST_CUTS * len(pieces):
            raise ValueError(f"has over {MOST_CUTS} cuts for each token")
    made, lefts, rights = np.array(found, dtype=np.int32).reshape(-1, 3).T
    order = np.lexsort((rights, lefts, made, -scores[made].astype(np.float64)))
    return ((pieces[lefts[at]], pieces[rights[at]]) for at in order)


def _bpe(model: SentencePieceModel) -> dict[str, Any]:
    scores = np.frombuffer(model.scores, dtype=np.float32)
    kinds = np.frombuffer(model.kinds, dtype=np.uint8)
    try:
        pairs = list(merges(model.pieces, scores, kinds == Kind.NORMAL))
    except ValueError as error:
        raise model.error(f"it {error}") from error
    names = _names(model)
    return {
        "type": "BPE",
        "vocab": {name: number for number, name in enumerate(names)},
        "merges": pairs,
        "unk_token": names[model.unknown_id],
        "fuse_unk": True,
        "byte_fallback": model.has_bytes,
    }


def _unigram(model: SentencePieceModel) -> dict[str, Any]:
    least = min(model.scores) - _UNUSED_PENALTY
    return {
        "type": "Unigram",
        "vocab": [
            [name, least if kind == Kind.UNUSED else score]
            for name, score, kind in zip(_names(model), model.scores, model.kinds, strict=True)
        ],
        "unk_id": model.unknown_id,
        "byte_fallback": model.has_bytes,
    }


def _names(model: SentencePieceModel) -> list[str]:
    """Return pieces as the vocabulary has them.

    Those that users have defined are found in texts, which have blanks, before all others.
    """
    names = [
        piece.replace(BLANK, " ") if kind == Kind.USER_DEFINED else piece
        for piece, kind in zip(model.pieces, model.kinds, strict=True)
    ]
    if len(set(names)) < len(names):
        raise model.error("it has a piece twice, with blanks and with signs for them")
    return names


def _added_tokens(model: SentencePieceModel) -> list[dict[str, Any]]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": at, "content": name, "special": kind != Kind.USER_DEFINED, **flags}
        for at, (name, kind) in enumerate(zip(_names(model), model.kinds, strict=True))
        if kind in (Kind.CONTROL, Kind.UNKNOWN, Kind.USER_DEFINED)
    ]


def _bos(model: SentencePieceModel) -> dict[str, Any] | None:
    """Return the processor that puts BOS in front; tokenizer_config.json may say otherwise."""
    if not 0 <= model.bos_id < len(model.pieces):
        return None
    if model.kinds[model.bos_id] != Kind.CONTROL:
        return None
    return bos_processor(model.pieces[model.bos_id], model.bos_id)


def bos_processor(bos: str, bos_id: int) -> dict[str, Any]:
    """Return the processor that puts BOS in front of a text, and of the first of two."""
    first, second = ({"Sequence": {"id": name, "type_id": n}} for n, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, first],
        "pair": [first, second],
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }


def described(
    *, added: list[dict[str, Any]], model: dict[str, Any], **steps: Any
) -> dict[str, Any]:
    """Return the contents of a tokenizer.json: added tokens, a model, and steps around it."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        **steps,
        "model": model,
    }


# tiktoken's files of ranks.


MAX_TOKEN_BYTES = 1024
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
SPLITS = {
    "llama-bpe": rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_REST}",
    "qwen2": rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_REST}",
}
"""Splits of texts before tokens are merged, by llama.cpp's names."""


@dataclass(frozen=True, kw_only=True)
class _Family:
    split: str
    special_tokens: tuple[str, ...]
    picture_tokens: tuple[str, ...] = ()
    """Tokens behind these of a model that sees images, …"""
    picture_texts: frozenset[str] = frozenset()
    """… of which these are text: answers name places in a picture by them."""
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
_PLACES = ("<ref>", "</ref>", "<box>", "</box>", "<quad>", "</quad>")
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
        picture_tokens=(*_PLACES, "<img>", "</img>", "<imgpad>"),
        picture_texts=frozenset(_PLACES),
        has_nfc=True,
    ),
}
"""By the number of ranks: Llama 3, Qwen 1 and Qwen-VL."""


def is_tiktoken(path: Path) -> bool:
    """Whether a file begins with a line of ranks."""
    with path.open("rb") as file:
        return _parsed(file.readline(4 * MAX_TOKEN_BYTES)) is not None


def describe_tiktoken(path: Path, *, sees_images: bool = False) -> dict[str, Any]:
    """Return the contents of tokenizer.json; `sees_images`: of a model that does.

    Raises ModelLoadError.
    """
    ranks = _read_ranks(path)
    if len(ranks) not in _FAMILIES:
        known = " and ".join(f"{number:,}" for number in _FAMILIES)
        raise ModelLoadError(
            f"{path}: has {len(ranks):,} ranks; known are files of {known} (Llama 3, Qwen 1)"
        )
    family = _FAMILIES[len(ranks)]
    if sees_images:
        family = replace(family, special_tokens=family.special_tokens + family.picture_tokens)
    return describe_ranks(ranks, family)


def describe_ranks(ranks: dict[bytes, int], family: _Family) -> dict[str, Any]:
    """Return the contents of tokenizer.json for ranks 0, 1, … and their special tokens."""
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
    texts = family.picture_texts
    processor = None
    if family.bos is not None:
        bos_id = len(ranks) + family.special_tokens.index(family.bos)
        processor = bos_processor(family.bos, bos_id)
    steps = [split | {"invert": False}, byte_level | {"use_regex": False}]
    return described(
        added=[
            {"id": len(ranks) + number, "content": name, "special": name not in texts, **flags}
            for number, name in enumerate(family.special_tokens)
        ],
        normalizer={"type": "NFC"} if family.has_nfc else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": steps},
        post_processor=processor,
        decoder=byte_level | {"use_regex": True},
        model={
            "type": "BPE",
            "vocab": {text(token): rank for token, rank in ranks.items()},
            "merges": [(text(token[:cut]), text(token[cut:])) for *_, cut, token in found],
            "ignore_merges": True,
        },
    )


def _read_ranks(path: Path) -> dict[bytes, int]:
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
