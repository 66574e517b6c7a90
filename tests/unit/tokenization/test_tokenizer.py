# ruff: noqa: E501 - files read best on one line
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.tokenizers_made import (
    BOS,
    EOS,
    write_byte_level,
    write_config,
    write_metaspace,
    write_sentencepiece,
)
from transformers import AutoTokenizer

from lightserve.bundled import BUNDLED_MODEL_DIR
from lightserve.errors import ModelLoadError
from lightserve.tokenization.tokenizer import Tokenizer


@pytest.mark.parametrize("adds_bos", [True, False], ids=["processor-adds", "processor-does-not"])
@pytest.mark.parametrize(
    ("flag", "text", "add_special", "num_bos"),
    [
        (None, "hello", True, None),  # as the post-processor has it
        (None, f"{BOS}hello", True, 1),
        (None, f"{BOS}{BOS}hello", True, 1),
        (None, f"{BOS}hello", False, 1),
        (None, "hello", False, 0),
        (True, "hello", True, 1),
        (True, f"{BOS}hello", True, 1),
        (True, "hello", False, 0),
        (False, "hello", True, 0),
        (False, f"{BOS}hello", True, 1),
    ],
)
def test_bos_stands_at_most_once(  # noqa: PLR0917
    tmp_path: Path,
    adds_bos: bool,
    flag: bool | None,
    text: str,
    add_special: bool,
    num_bos: int | None,
) -> None:
    write_byte_level(tmp_path, adds_bos=adds_bos)
    write_config(
        tmp_path,
        "tokenizer_config.json",
        {"bos_token": BOS, "eos_token": EOS, "add_bos_token": flag},
    )
    tokenizer = Tokenizer(tmp_path)
    token_ids = tokenizer.encode(text, add_special_tokens=add_special)
    bos = tokenizer.special_tokens.bos_token_id
    expected = int(adds_bos) if num_bos is None else num_bos
    assert token_ids.count(bos or 0) == expected
    assert tokenizer.decode(token_ids) == "hello"


@pytest.mark.parametrize("has_processor", [True, False])
@pytest.mark.parametrize("flag", [True, False, None])
def test_texts_end_with_eos_where_the_files_say_so(
    flag: bool | None, has_processor: bool, tmp_path: Path
) -> None:
    """The post-processor's word is the last one, as transformers 5 has it; a flag stands for it."""
    write_byte_level(tmp_path)
    if not has_processor:
        file = tmp_path / "tokenizer.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"post_processor": None}))
    config = {"bos_token": BOS, "eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast"}
    config |= {} if flag is None else {"add_eos_token": flag}
    write_config(tmp_path, "tokenizer_config.json", config)
    ours = Tokenizer(tmp_path)
    if has_processor:
        theirs = AutoTokenizer.from_pretrained(tmp_path)
        for text in ("hello", ""):
            assert ours.encode(text, add_special_tokens=True) == theirs.encode(text)
    plain = ours.encode("hello", add_special_tokens=False)
    ends = [1] if flag and not has_processor else []
    assert ours.encode("hello", add_special_tokens=True)[-len(plain + ends) :] == plain + ends
    assert ours.encode(f"hello{EOS}", add_special_tokens=True).count(1) == 1


def test_bos_in_the_middle_stays(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_byte_level(tmp_path))
    assert tokenizer.encode(f"a{BOS}{BOS}b", add_special_tokens=True).count(0) == 3


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer_config", "expected"),
    [
        ({}, {}, {}, ()),
        ({"eos_token_id": 5}, {}, {}, (5,)),
        ({"eos_token_id": [5, 7]}, {"eos_token_id": 9}, {}, (5, 7, 9)),
        ({"eos_token_id": None}, {"eos_token_id": [5]}, {"eos_token": EOS}, (1, 5)),
        ({}, {}, {"eos_token": {"content": EOS, "special": True}}, (1,)),
        ({"eos_token_id": [1]}, {"eos_token_id": 1}, {"eos_token": EOS}, (1,)),
    ],
)
def test_eos_is_the_union_of_three_files(
    tmp_path: Path,
    generation: dict[str, Any],
    config: dict[str, Any],
    tokenizer_config: dict[str, Any],
    expected: tuple[int, ...],
) -> None:
    write_byte_level(tmp_path)
    write_config(tmp_path, "generation_config.json", generation)
    write_config(tmp_path, "config.json", config)
    write_config(tmp_path, "tokenizer_config.json", tokenizer_config)
    assert Tokenizer(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize(
    ("name", "values", "named"),
    [
        ("generation_config.json", {"eos_token_id": "2"}, "eos_token_id"),
        ("generation_config.json", {"eos_token_id": [True]}, "eos_token_id"),
        ("generation_config.json", {"eos_token_id": -1}, "eos_token_id"),
        ("config.json", {"eos_token_id": [1, "x"]}, "eos_token_id"),
        ("tokenizer_config.json", {"sep_token": [1]}, "sep_token"),
        ("tokenizer_config.json", {"additional_special_tokens": "x"}, "additional_special_tokens"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {}}}, "added_tokens_decoder"),
        ("special_tokens_map.json", {"eos_token": 1}, "eos_token"),
        ("added_tokens.json", {"<x>": "1"}, "<x>"),
        ("tokenizer_config.json", {"bos_token": 1}, "bos_token"),
        ("tokenizer_config.json", {"bos_token": {}}, "content"),
        ("tokenizer_config.json", {"add_bos_token": "yes"}, "add_bos_token"),
    ],
)
def test_broken_configuration_names_file_and_key(
    tmp_path: Path, name: str, values: dict[str, Any], named: str
) -> None:
    write_byte_level(tmp_path)
    write_config(tmp_path, name, values)
    with pytest.raises(ModelLoadError, match=named) as caught:
        Tokenizer(tmp_path)
    assert name in str(caught.value)


def _token(content: str, **flags: bool) -> dict[str, Any]:
    own = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    return {"content": content, "special": True, **own, **flags}


CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
FILES: dict[str, dict[str, dict[str, Any]]] = {
    "decoder": {CONFIG: {"added_tokens_decoder": {"0": _token(BOS), "259": _token("<|im_start|>"), "260": _token("<|im_end|>", rstrip=True)}, "eos_token": "<|im_end|>"}},
    "flags": {CONFIG: {"added_tokens_decoder": {"259": _token("<|x|>", lstrip=True, special=False), "260": _token("<y>", single_word=True)}}},
    "flags of known ones": {CONFIG: {"added_tokens_decoder": {"0": _token(BOS, lstrip=True, rstrip=True), "258": _token("<tool call>")}}},
    "of the vocabulary": {CONFIG: {"added_tokens_decoder": {"5": _token("x")}}},
    "added tokens": {CONFIG: {"eos_token": EOS}, ADDED: {"<|x|>": 259, "<y>": 260}},
    "added tokens and map": {CONFIG: {}, ADDED: {"<|x|>": 259, "<y>": 260}, MAP: {"eos_token": "<y>", "bos_token": {"content": BOS, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}}},
    "map": {CONFIG: {}, MAP: {"eos_token": EOS, "bos_token": BOS, "sep_token": "<sep>"}},
    "map before config": {CONFIG: {"bos_token": EOS}, MAP: {"bos_token": BOS}},
    "decoder before map": {CONFIG: {"added_tokens_decoder": {"0": _token(BOS)}}, MAP: {"bos_token": BOS, "mask_token": "<m>"}},
    "eos that is lacking": {CONFIG: {"eos_token": "<|im_end|>", "bos_token": BOS}},
    "every name": {CONFIG: {"cls_token": "<cls>", "sep_token": "<sep>", "mask_token": "<m>", "unk_token": EOS, "pad_token": "[PAD]"}},
    "names of its own": {CONFIG: {"image_token": "<img>", "extra_special_tokens": {"boi_token": "<boi>"}}},
    "others": {CONFIG: {"extra_special_tokens": ["<img>", "<boi>"]}},
    "others as objects": {CONFIG: {"additional_special_tokens": [{"__type": "AddedToken", **_token("<img>", rstrip=True)}]}},
    "one that was no special one": {CONFIG: {"eos_token": "<tool call>"}},
}  # fmt: skip
TEXT = f"a<|im_start|> user <|im_end|>  x <|x|>  y<y>z <y> {BOS} hi {EOS} <tool call> [PAD]<sep><cls> <img> <boi><m>"


@pytest.mark.parametrize("name", FILES)
def test_files_beside_the_tokenizer_are_read_as_transformers_does(
    tmp_path: Path, name: str
) -> None:
    write_byte_level(tmp_path)
    for file, values in FILES[name].items():
        own = {"tokenizer_class": "PreTrainedTokenizerFast"} if file == CONFIG else {}
        write_config(tmp_path, file, own | values)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer(tmp_path)
    expected = theirs.encode(TEXT, add_special_tokens=False)
    assert ours.encode(TEXT, add_special_tokens=False) == expected
    assert ours.special_tokens.names == theirs.special_tokens_map
    specials = {i for i, token in theirs.added_tokens_decoder.items() if token.special}
    assert {i for i in range(270) if ours.is_special(i) and ours.name_of(i)} == specials
    if theirs.eos_token_id is not None:
        assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert ours.special_tokens.bos_token_id == theirs.bos_token_id
    assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=True)


def test_tokens_beyond_the_model_are_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Many repositories name a padding that no embedding was ever made for."""
    write_byte_level(tmp_path)
    write_config(tmp_path, CONFIG, {"pad_token": "[PAD]", "eos_token": "<end>"})
    for vocab_size, eos_token_ids, special in ((261, (259,), 2), (260, (259,), 1), (259, (), 0)):
        ours = Tokenizer(tmp_path, vocab_size=vocab_size)
        ids = ours.encode("<end>[PAD]", add_special_tokens=False)
        assert ours.eos_token_ids == eos_token_ids
        assert sum(token_id >= 259 for token_id in ids) == special
        assert max(ours.largest_ids.values()) < vocab_size
    assert "a vocabulary of 259, cannot read are text: <end>, [PAD]" in caplog.text


def test_new_tokens_have_the_next_ids(tmp_path: Path) -> None:
    write_byte_level(tmp_path)
    write_config(tmp_path, CONFIG, {"added_tokens_decoder": {"300": _token("<x>")}})
    with pytest.raises(ModelLoadError, match="'<x>' has the id 300, where 259 would be the next"):
        Tokenizer(tmp_path)


def test_slow_tokenizer_files_alone_are_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: no such file, and neither"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"version": "1.0"}'])
def test_malformed_tokenizer_names_the_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)


def test_unsupported_decoders_are_refused(tmp_path: Path) -> None:
    path = write_byte_level(tmp_path) / "tokenizer.json"
    content = json.loads(path.read_text())
    decoder = {"type": "CTC", "pad_token": "p", "word_delimiter_token": "|", "cleanup": True}
    path.write_text(json.dumps(content | {"decoder": decoder}))
    with pytest.raises(ModelLoadError, match="decoder"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("write", [write_byte_level, write_sentencepiece])
@pytest.mark.parametrize(
    "text", ["hello", " hello the 😀 é", "tab\tnew\nline", "日本語 שלום 👩‍👩‍👧"]
)
def test_text_comes_back(tmp_path: Path, write: Any, text: str) -> None:
    tokenizer = Tokenizer(write(tmp_path))
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=True)) == text


def test_metaspace_text_comes_back(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_metaspace(tmp_path))
    assert tokenizer.decode(tokenizer.encode("hello the hello", add_special_tokens=True)) == (
        "hello the hello"
    )


def test_bundled_model_has_a_usable_tokenizer() -> None:
    tokenizer = Tokenizer(BUNDLED_MODEL_DIR)
    token_ids = tokenizer.encode("A short text.", add_special_tokens=True)
    assert token_ids[0] == tokenizer.special_tokens.bos_token_id
    assert tokenizer.eos_token_ids
    assert tokenizer.decode(token_ids) == "A short text."
    assert max(token_ids) <= tokenizer.largest_ids["model.vocab"]
    assert tokenizer.longest_piece_bytes > 1
