"""SentencePiece and tiktoken files beside the packages that they are made for, and wrong ones."""

from __future__ import annotations

import base64
import functools
import io
import json
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
from support.tokenizers_made import write_config, write_sentencepiece
from transformers import PreTrainedTokenizerFast

from lightserve.errors import ModelLoadError
from lightserve.tokenization import vocabulary_files
from lightserve.tokenization.description import describe_tokenizer, find_tokenizer
from lightserve.tokenization.tokenizer import Tokenizer
from lightserve.tokenization.vocabulary_files import read_sentencepiece

MORE_BYTES = 64 << 20
CORPUS = [
    f"The {colour} {thing} of {name}, {number} years, isn't here.  It's «{word}», né 東京{number}"
    for number, (colour, thing, name, word) in enumerate(
        (colour, thing, name, word)
        for colour in ("brass", "blue", "quiet", "ﬁne")  # a ligature, which NFKC takes apart
        for thing in ("lantern", "door", "harbour", "window")
        for name in ("Mira", "Otto", "Zoë", "Kōji")
        for word in ("hello", "привет", "γειά", "안녕")
    )
]
PARTS = (
    *("the ", "brass", " lantern", "Mira", "  ", " ", "\n\n", "\t", "isn't", "12345", "né", "東京"),
    *(
        "🚪",
        "👩‍🚀",
        "é",
        "e\u0301",
        "ﬁ",
        "<user>",
        "hello",
        "Привет",
        "\u00a0",
        "\u200b",
        "▁",
        "!?",
        "x",
    ),
)


def texts(seed: int, num: int = 150) -> Iterator[str]:
    draw = random.Random(seed)
    for _ in range(num):
        yield "".join(draw.choice(PARTS) for _ in range(draw.randrange(12)))


@functools.cache
def sentencepiece_bytes(kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=out,
        model_type=kind,
        vocab_size=options.pop("vocab_size", 480 if options.get("byte_fallback", True) else 220),
        minloglevel=2,
        **options,
    )
    return out.getvalue()


LLAMA = {
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "split_digits": True,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "as Llama's": ("bpe", LLAMA),
    "as Gemma's": (
        "bpe",
        LLAMA | {"add_dummy_prefix": False, "user_defined_symbols": "▁▁,▁▁▁,<user>"},
    ),
    "unigram": ("unigram", {"byte_fallback": True, "remove_extra_whitespaces": False}),
    "unigram of T5's time": ("unigram", {"byte_fallback": False}),
}


def write_model(directory: Path, name: str, **config: Any) -> sentencepiece.SentencePieceProcessor:
    kind, options = KINDS[name]
    data = sentencepiece_bytes(kind, **options)
    (directory / "tokenizer.model").write_bytes(data)
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return sentencepiece.SentencePieceProcessor(model_proto=data)


@pytest.mark.parametrize("name", KINDS)
def test_ids_and_texts_are_sentencepieces(name: str, tmp_path: Path) -> None:
    theirs = write_model(tmp_path, name)
    ours = Tokenizer(tmp_path)
    num_same_text = 0
    for text in (*texts(1), *CORPUS[:20]):
        expected = theirs.encode(text)
        if name == "as Gemma's" and "▁" in text:
            continue  # the sign for a blank, in a text, is no part of what users have defined
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == expected, text
        assert ours.encode(text, add_special_tokens=True) == [theirs.bos_id(), *expected]
        if theirs.unk_id() not in ids:
            assert ours.decode(ids) == theirs.decode(expected), text
            num_same_text += 1
    assert num_same_text > 40
    draw = random.Random(2)
    for _ in range(100):  # any ids, pieces of bytes that make no character among them
        ids = [draw.randrange(3, theirs.vocab_size()) for _ in range(draw.randrange(12))]
        kept = [token_id for token_id in ids if not theirs.is_control(token_id)]
        detokenizer = ours.detokenizer([])
        parts = "".join(detokenizer.push([token_id]) for token_id in kept) + detokenizer.finish()
        assert parts == ours.decode(kept)


def test_texts_behind_special_tokens_get_a_blank_unless_told(tmp_path: Path) -> None:
    """As transformers: `legacy` is its default."""
    theirs = write_model(tmp_path, "as Llama's")
    alone = theirs.encode("hello")
    assert theirs.id_to_piece(alone[0]).startswith("▁")
    ours = Tokenizer(tmp_path)
    assert ours.encode("</s>hello", add_special_tokens=False) == [2, *alone]
    (tmp_path / "tokenizer_config.json").write_text('{"legacy": false}')
    ours = Tokenizer(tmp_path)
    ids = ours.encode("</s>hello", add_special_tokens=False)
    assert ids != [2, *alone] and ours.decode(ids) == "hello"
    for text in texts(5):
        if not text.startswith((" ", "▁")):
            assert ours.encode(text, add_special_tokens=False) == theirs.encode(text)


def test_added_tokens_and_bos_are_those_of_other_files(tmp_path: Path) -> None:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    added = {
        "2": {"content": "</s>", "special": True, **flags},
        "480": {"content": "<|im_end|>", "special": True, **flags},
    }
    write_model(
        tmp_path,
        "as Llama's",
        added_tokens_decoder=added,
        legacy=False,
        add_bos_token=False,
        bos_token="<s>",
        eos_token="<|im_end|>",
    )
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_end|>": 480, "<tool>": 481}))
    tokenizer = Tokenizer(tmp_path)
    ids = tokenizer.encode("hello<tool> x<|im_end|>", add_special_tokens=True)
    assert ids[0] != 1 and 481 in ids and ids[-1] == 480
    assert tokenizer.eos_token_ids == (480,)
    assert tokenizer.decode(ids) == "hello<tool> x" and tokenizer.is_special(480)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<tool>": 490}))
    with pytest.raises(ModelLoadError, match="'<tool>' has the id 490, where 481 would be"):
        Tokenizer(tmp_path)


# tiktoken.


def ranks() -> dict[bytes, int]:
    """Return bytes, and what is merged most often of the corpus, as tiktoken numbers it."""
    found = {bytes([byte]): byte for byte in range(256)}
    words = [word.encode() for line in CORPUS for word in line.replace(" ", "| ").split("|")]
    for word in sorted(set(words)):
        for stop in range(2, min(len(word), 9)):
            found.setdefault(word[:stop], len(found))
    return found


SPECIAL = ("<|endoftext|>", "<|im_start|>")


def write_ranks(path: Path, own: dict[bytes, int]) -> None:
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in own.items()]
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("split", vocabulary_files.SPLITS)
@pytest.mark.parametrize("file", ["qwen.tiktoken", "tokenizer.model"])
def test_ids_and_texts_are_tiktokens(
    split: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ranks()
    write_ranks(tmp_path / file, own)
    with pytest.raises(ModelLoadError, match="ranks; known are files of 128,000 and 151,643"):
        Tokenizer(tmp_path)
    family = vocabulary_files._Family(split=vocabulary_files.SPLITS[split], special_tokens=SPECIAL)
    monkeypatch.setattr(vocabulary_files, "_FAMILIES", {len(own): family})
    ours = Tokenizer(tmp_path)
    special = {name: len(own) + number for number, name in enumerate(SPECIAL)}
    theirs = tiktoken.Encoding(
        "made", pat_str=family.split, mergeable_ranks=own, special_tokens=special
    )
    for text in (*texts(3), *CORPUS[:20], "a<|im_start|>b"):
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, allowed_special="all"), text
        if "<|" not in text:
            assert ours.decode(ids) == text
    assert ours.bytes_of(300) == theirs.decode_single_token_bytes(300)


def test_tokens_of_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Qwen-VL's authors have them; places in pictures are read by people."""
    own = ranks()
    write_ranks(tmp_path / "qwen.tiktoken", own)
    qwen = vocabulary_files._FAMILIES[151_643]
    monkeypatch.setattr(vocabulary_files, "_FAMILIES", {len(own): qwen})
    text = "<img><imgpad></img>\n<ref>a door</ref><box>(1,2),(3,4)</box><|im_end|>"
    seen = Tokenizer(tmp_path).encode(text, add_special_tokens=False)
    assert max(seen) == len(own) + 2, "a text model has no such tokens"
    write_config(tmp_path, "config.json", {"visual": {}})
    ours = Tokenizer(tmp_path)
    special = {name: len(own) + number for number, name in enumerate(qwen.special_tokens)}
    places = ("<ref>", "</ref>", "<box>", "</box>", "<quad>", "</quad>")
    names = (*places, "<img>", "</img>", "<imgpad>")
    special |= {name: len(own) + 208 + number for number, name in enumerate(names)}
    theirs = tiktoken.Encoding(
        "made", pat_str=qwen.split, mergeable_ranks=own, special_tokens=special
    )
    ids = ours.encode(text, add_special_tokens=False)
    assert ids == theirs.encode(text, allowed_special="all")
    assert ours.decode(ids) == "\n<ref>a door</ref><box>(1,2),(3,4)</box>"
    # 151,643 ranks give an image's place-holder the id of Qwen-VL's files.
    assert 151_643 + special["<imgpad>"] - len(own) == 151_857 + 2


def test_turns_end_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ranks()
    write_ranks(tmp_path / "qwen.tiktoken", own)
    qwen = vocabulary_files._FAMILIES[151_643]
    monkeypatch.setattr(vocabulary_files, "_FAMILIES", {len(own): qwen})
    generation = {"eos_token_id": len(own)}
    for form, ends in (("raw", {0}), ("chatml", {0, 1, 2})):
        write_config(tmp_path, "generation_config.json", generation | {"chat_format": form})
        assert set(Tokenizer(tmp_path).eos_token_ids) == {len(own) + number for number in ends}


def test_known_files_have_their_special_tokens() -> None:
    llama, qwen = vocabulary_files._FAMILIES[128_000], vocabulary_files._FAMILIES[151_643]
    assert len(llama.special_tokens) == 256 and len(set(llama.special_tokens)) == 256
    assert llama.special_tokens.index("<|eot_id|>") == 9
    assert llama.special_tokens.index("<|python_tag|>") == 10
    assert llama.special_tokens[-1] == "<|reserved_special_token_247|>"
    assert len(qwen.special_tokens) == 208 and qwen.special_tokens[2] == "<|im_end|>"


# Decoders that are null.


def test_pieces_without_a_decoder_are_joined_as_elsewhere(tmp_path: Path) -> None:
    write_sentencepiece(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"decoder": None}))
    ours, theirs = Tokenizer(tmp_path), PreTrainedTokenizerFast(tokenizer_file=str(file))
    for text in ("hello a", "the é", ""):
        ids = ours.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


# Files that are wrong.


def test_without_any_file(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: no such file, and neither"):
        find_tokenizer(tmp_path)


BAD = {
    b"": "it has no pieces",
    b"\x0a": "it ends within a number",
    b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01": "are beyond the end",
    b"\xff" * 11: "more than 10 bytes",
    b"\x0b": "a field of the type 3",
    b"\x0a\x00": "an empty piece",
    b"\x0a\x03\x0a\x01\xff": "invalid start byte",
    b"\x0a\x05\x0a\x01a\x18\x09": "9 is not a valid Kind",
    b"\x0a\x03\x0a\x01a" * 2: "a piece twice",
    b"\x0a\x03\x0a\x01a": "it has 0 unknown pieces",
    b"\x0a\x05\x0a\x01a\x18\x02\x12\x02\x18\x03": "its model_type is 3",
    b"\x0a\x05\x0a\x01a\x18\x02\x1a\x02\x28\x00": "escape_whitespaces is false",
    b"\x0a\x05\x0a\x01a\x18\x02\x12\x03\xc0\x01\x01": "treat_whitespace_as_suffix is true",
    b"\x0a\x0a\x0a\x01a\x18\x02\x15\x00\x00\xc0\x7f": "a score that is not finite",
}


@pytest.mark.parametrize("data", BAD, ids=BAD.values())
def test_bad_sentencepiece_files(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(data)
    with pytest.raises(ModelLoadError) as caught:
        describe_tokenizer(path)
    assert BAD[data] in str(caught.value) and str(path) in str(caught.value)


BAD_RANKS = {
    "YQ== 0\n???? 1\n": "line 2 is no token in base64",
    "YQ== 0\nYg== 2\n": "its ranks are not 0, 1, 2",
    "YQ== 0\nYQ== 1\n": "its ranks are not 0, 1, 2",
    "YQ== 0\nYg== 1\n": "has no token for the byte 0",
}


@pytest.mark.parametrize("text", BAD_RANKS, ids=BAD_RANKS.values())
def test_bad_files_of_ranks(text: str, tmp_path: Path) -> None:
    path = tmp_path / "qwen.tiktoken"
    path.write_text(text)
    with pytest.raises(ModelLoadError) as caught:
        describe_tokenizer(path)
    assert BAD_RANKS[text] in str(caught.value) and str(path) in str(caught.value)


def test_fuzzed_sentencepiece_files(tmp_path: Path) -> None:
    whole, draw, num_refused = sentencepiece_bytes("bpe", **LLAMA), random.Random(4), 0
    path = tmp_path / "tokenizer.model"
    tracemalloc.start()
    for number in range(120):
        data = bytearray(whole)
        if number % 3 == 0:
            del data[draw.randrange(len(data)) :]
        for _ in range(draw.choice((1, 3, 20))):
            data[draw.randrange(len(data))] = draw.choice(
                (0, 0x7F, 0x80, 0xFF, draw.randrange(256))
            )
        path.write_bytes(data)
        try:
            read_sentencepiece(path)
            Tokenizer(tmp_path)
        except ModelLoadError as error:
            num_refused += 1
            assert "\n" not in str(error)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_refused > 40 and peak < len(whole) + MORE_BYTES
