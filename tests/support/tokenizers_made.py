"""Small tokenizers of the families that are served, made on the spot with `tokenizers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from lightserve.tokenization.detokenizer import byte_level_alphabet

BOS, EOS = "<s>", "</s>"
_WORDS = ["▁", "▁the", "▁a", "h", "e", "l", "o", "▁hello", "é", "▁▁▁"]


def write_sentencepiece(model_dir: Path, *, adds_bos: bool = True) -> Path:
    """Write a Llama 2-like tokenizer.json: pieces with ▁ and byte fallback."""
    pieces = ["<unk>", BOS, EOS, *(f"<0x{byte:02X}>" for byte in range(256)), *_WORDS]
    model = models.BPE(
        vocab={piece: number for number, piece in enumerate(pieces)},
        merges=[],
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _finish(tokenizer, model_dir, adds_bos=adds_bos)


def write_metaspace(model_dir: Path) -> Path:
    """Write a tokenizer.json with a Metaspace decoder and no byte fallback."""
    pieces = ["<unk>", BOS, EOS, *_WORDS]
    tokenizer = Tokenizer(
        models.Unigram([(piece, -float(number)) for number, piece in enumerate(pieces)], unk_id=0)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _finish(tokenizer, model_dir, adds_bos=True)


def write_byte_level(model_dir: Path, *, adds_bos: bool = True) -> Path:
    """Write a GPT-2-like tokenizer.json whose pieces are single bytes."""
    pieces = [BOS, EOS, *byte_level_alphabet()]
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: number for number, piece in enumerate(pieces)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _finish(tokenizer, model_dir, adds_bos=adds_bos)


def write_config(model_dir: Path, name: str, values: dict[str, Any]) -> None:
    """Write one of the JSON files beside a tokenizer."""
    (model_dir / name).write_text(json.dumps(values))


def _finish(tokenizer: Tokenizer, model_dir: Path, *, adds_bos: bool) -> Path:
    tokenizer.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    tokenizer.add_tokens([AddedToken("<tool call>", special=False)])
    if adds_bos:
        tokenizer.post_processor = TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
        )
    tokenizer.save(str(model_dir / "tokenizer.json"))
    write_config(model_dir, "tokenizer_config.json", {"bos_token": BOS, "eos_token": EOS})
    return model_dir
