"""SentencePiece's `tokenizer.model` as a tokenizer.json would say it.

The file is a protocol buffer, `ModelProto` of SentencePiece's own schema, of which the pieces and a
few settings are read. BPE models become merges: the best piece of two neighbours is made first.
"""

from __future__ import annotations

import base64
import math
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np

from lightserve.errors import ModelLoadError

MAX_BYTES = 64 << 20
MAX_PIECES = 1 << 21
MAX_PIECE_CHARS = 256
"""Of a piece that two others make: a file that lies could ask for billions of cuts."""
MOST_CUTS = 8
"""Into two other pieces, for each piece in the mean; Llama 2's have two."""
BLANK = "▁"
_UNIGRAM, _BPE = 1, 2
_KINDS = {_UNIGRAM: "Unigram", _BPE: "BPE"}
_UNUSED_PENALTY = 1000.0


class Kind(IntEnum):
    """What a piece is for."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(kw_only=True)
class SentencePieceModel:
    """What is read of a file; what it does not say is SentencePiece's default."""

    path: Path
    pieces: list[str] = field(default_factory=list)
    scores: array[float] = field(default_factory=lambda: array("f"))
    kinds: bytearray = field(default_factory=bytearray)
    model_type: int = _UNIGRAM
    has_bytes: bool = False
    unknown_id: int = 0
    bos_id: int = 1
    charsmap: bytes = b""
    """How characters are normalised, as SentencePiece compiled it."""
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
    """Return what tokenizer.json would say.

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
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(model),
        "normalizer": {"type": "Sequence", "normalizers": steps} if steps else None,
        "pre_tokenizer": before,
        "post_processor": _bos(model),
        "decoder": decoder(has_prefix=prefix),
        "model": parts,
    }


def decoder(*, has_prefix: bool) -> dict[str, Any]:
    """Return what makes a text of pieces."""
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
    """Return what puts BOS in front; tokenizer_config.json may say otherwise."""
    if not 0 <= model.bos_id < len(model.pieces):
        return None
    if model.kinds[model.bos_id] != Kind.CONTROL:
        return None
    bos = model.pieces[model.bos_id]
    return {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": bos, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [model.bos_id], "tokens": [bos]}},
    }
