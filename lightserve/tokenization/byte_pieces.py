"""How a vocabulary's pieces become bytes: the `decoder` of a tokenizer.json, one piece at a time.

A Hugging Face decoder maps a list of pieces to a text, which cannot be done incrementally. Here
the decoders of the families that are served are read as a map from each piece to bytes plus what
happens at the start of a text; `detokenizer` turns the bytes into valid UTF-8.

Supported: `ByteLevel` (Llama 3, Qwen, the bundled model); `Metaspace`, and sequences of `Replace`,
`ByteFallback`, `Metaspace`, `Fuse` and `Strip` (Llama 1/2, Mistral: what sentencepiece models are
converted to).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightserve.models.config import JsonFields

_BYTE_PIECE_LEN = len("<0x0A>")


@dataclass(frozen=True, kw_only=True)
class PieceDecoder:
    """How pieces become bytes."""

    piece_to_bytes: Callable[[str], bytes]
    """The piece's bytes, perhaps a part of a character, in the middle of a text."""
    first_piece_to_bytes: Callable[[str], bytes]
    """The same at the start of a text."""
    num_stripped: int
    """Up to this many …"""
    stripped: bytes
    """… of this byte are taken off the start of a text."""


def parse_decoder(path: Path, tokenizer: dict[str, Any]) -> PieceDecoder:
    """Return the piece decoder of a parsed tokenizer.json.

    Raises:
        ModelLoadError: a kind of decoder that is not supported; names file and key.
    """
    fields = JsonFields(path, tokenizer).child("decoder")
    kind = fields.string("type")
    if kind == "ByteLevel":
        return _byte_level()
    steps = [fields]
    if kind == "Sequence":
        steps = [
            JsonFields(path, step, prefix="decoder.decoders.") for step in fields.array("decoders")
        ]
        if [step.string("type") for step in steps] == ["ByteLevel"]:
            return _byte_level()
    return _sentencepiece(steps)


def byte_level_alphabet() -> dict[str, int]:
    """Return the byte behind each character of byte-level BPE, as GPT-2 defined it.

    Printable bytes stand for themselves, the other 68 for the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if chr(byte) not in alphabet)
    return alphabet | {chr(0x100 + number): byte for number, byte in enumerate(list(others))}


def _byte_level() -> PieceDecoder:
    alphabet = byte_level_alphabet()

    def to_bytes(piece: str) -> bytes:
        try:
            return bytes([alphabet[char] for char in piece])
        except KeyError:
            return piece.encode()  # an added token, which is plain text

    return PieceDecoder(
        piece_to_bytes=to_bytes, first_piece_to_bytes=to_bytes, num_stripped=0, stripped=b""
    )


def _sentencepiece(steps: list[JsonFields]) -> PieceDecoder:
    replacements: list[tuple[str, str]] = []
    metaspace: str | None = None
    has_byte_pieces = False
    drops_first_space = False
    num_stripped, stripped = 0, b""
    for step in steps:
        match step.string("type"):
            case "Replace":
                replacements.append((step.child("pattern").string("String"), _text(step)))
            case "ByteFallback":
                has_byte_pieces = True
            case "Metaspace":
                metaspace = step.string("replacement")
                scheme = step.string("prepend_scheme", default="always")
                # The older form of the same switch is a boolean.
                drops_first_space = scheme != "never" and step.boolean(
                    "add_prefix_space", default=True
                )
            case "Fuse":
                pass
            case "Strip":
                num_stripped, stripped = _strip(step)
            case other:
                raise step.error("type", f"names the decoder {other!r}, which is not supported")

    def to_bytes(piece: str, *, first: bool = False) -> bytes:
        for pattern, content in replacements:
            piece = piece.replace(pattern, content)
        if has_byte_pieces and (byte := parse_byte_piece(piece)) is not None:
            return bytes([byte])
        if metaspace is not None:
            piece = piece.replace(metaspace, "" if first and drops_first_space else " ")
        return piece.encode()

    return PieceDecoder(
        piece_to_bytes=to_bytes,
        first_piece_to_bytes=lambda piece: to_bytes(piece, first=True),
        num_stripped=num_stripped,
        stripped=stripped,
    )


def parse_byte_piece(piece: str) -> int | None:
    """Return the byte that a piece such as `<0x0A>` stands for, None for any other piece."""
    if len(piece) != _BYTE_PIECE_LEN or not piece.startswith("<0x") or not piece.endswith(">"):
        return None
    try:
        return int(piece[3:5], 16)
    except ValueError:
        return None


def _text(step: JsonFields) -> str:
    """Return `content`, which may be empty."""
    return step.string("content", default="")


def _strip(step: JsonFields) -> tuple[int, bytes]:
    content = _text(step).encode()
    if len(content) != 1:
        raise step.error("content", "must be one ASCII character to be stripped incrementally")
    if step.integer("stop", default=0, low=0) != 0:
        raise step.error("stop", "is not 0: the end of a text cannot be stripped incrementally")
    return step.integer("start", low=0), content
