"""Tokenisers of GGUF files: splits, special tokens, ends of answers and keys that are absent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.gguf_files import tokens_of, write_gguf
from support.tiny_models import TinyModel, write_tiny_model
from tokenizers import Regex, pre_tokenizers

from lightserve.bundled import BUNDLED_MODEL_DIR
from lightserve.config import ServeConfig
from lightserve.models import gguf_model
from lightserve.models.gguf_model import unpack
from lightserve.supervisor.startup import check_model, resolve_model
from lightserve.tokenization.chat_template import find_chat_template
from lightserve.tokenization.tokenizer import Tokenizer, find_infilling


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-4o", ["HELLOworld", " don't", "123", "45", ".\n\n", " ", " \u00c7A"]),
        ("minimax-m2", ["HELLOworld", " don't", "123", "45", ".\n\n", " ", " \u00c7A"]),
        (
            "seed-coder",
            ["HELLOworld", " don", "'t", *"12345", ".", "\n\n", " ", " \u00c7A"],
        ),
        ("tekken", ["HELLOworld", " don", "'t", *"12345", ".\n\n", " ", " \u00c7A"]),
        ("deepseek-r1-qwen", ["HELLOworld", " don", "'t", *"12345", ".\n\n", " ", " \u00c7A"]),
        ("llama-v3", ["HELLOworld", " don", "'t", "123", "45", ".\n\n", " ", " \u00c7A"]),
        ("lfm2", ["HELLOworld", " don", "'t", "123", "45", ".\n\n", " ", " \u00c7A"]),
        ("pixtral", ["HELLOworld", " don", "'t", "123", "45", ".\n\n", " ", " \u00c7A"]),
        ("dbrx", ["HELLOworld", " don", "'t", "123", "45", ".\n\n", " ", " \u00c7A"]),
        ("kimi-k2", ["HELLOworld", " don't", "123", "45", ".\n\n", " ", " \u00c7A"]),
        (
            "default",
            ["HELLOworld", " don", "'", "t", "123", "45", ".", "\n\n ", " \u00c7A"],
        ),
        (
            "deepseek-llm",
            ["HELLOworld", " don", "'", "t", "12345", ".", "\n", "\n", " ", " \u00c7", "A"],
        ),
        (
            "deepseek-coder",
            ["HELLOworld", " don", "'", "t", *"12345", ".", "\n", "\n", " ", " \u00c7A"],
        ),
        ("deepseek-v3", ["HELLOworld", " don", "'t", "123", "45", ".\n\n", " ", " \u00c7A"]),
    ],
)
def test_texts_are_split_as_in_the_authors_tokenisers(pre: str, pieces: list[str]) -> None:
    split = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in gguf_model._SPLITS[pre]]
    )
    found = split.pre_tokenize_str("HELLOworld don't12345.\n\n  \u00c7A")
    assert [piece for piece, _ in found] == pieces


def test_kimi_s_han_letters_are_words_of_their_own() -> None:
    """As the authors' pattern has it, where small letters, other scripts and marks are beside."""
    split = pre_tokenizers.Split(Regex(gguf_model._SPLITS["kimi-k2"][0]), "isolated")
    found = split.pre_tokenize_str("abc漢字def 仮名カナaB ./\n/")
    pieces = ["abc", "漢字", "def", " ", "仮名", "カナa", "B", " ./\n", "/"]
    assert [piece for piece, _ in found] == pieces


def test_the_bundled_model_as_one_file(tmp_path: Path) -> None:
    """Weights, tokeniser and template: what the directory says, the file says."""
    template = "{{ messages[0]['content'] }}"
    extra = {
        "tokenizer.chat_template": template,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 3,
        "tokenizer.ggml.add_bos_token": True,
    }
    tokens = tokens_of(BUNDLED_MODEL_DIR) | extra
    file = write_gguf(
        BUNDLED_MODEL_DIR, tmp_path / "tiny.gguf", name="llama", kind="BF16", tokens=tokens
    )
    config = resolve_model(ServeConfig(model=str(file)))
    check_model(config)
    ours, theirs = Tokenizer(Path(config.model)), Tokenizer(BUNDLED_MODEL_DIR)
    for text in ("Where is Mira's brass lantern?", "  12 blue  doors\n\n", "née, 東京 🚪"):
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=True) == [1, *ids]
        assert ours.decode(ids) == text
    assert ours.eos_token_ids == (2, 3)
    found = find_chat_template(Path(config.model))
    assert found is not None and found.text == template
    by_digest = file.rename(tmp_path / "sha256-00e1317c")  # as in the store of another program
    check_model(resolve_model(ServeConfig(model=str(by_digest))))


def test_a_sentencepiece_tokeniser(tmp_path: Path) -> None:
    plain = write_tiny_model(TinyModel("", "Llama", {"vocab_size": 300}), tmp_path / "plain")
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["▁", "h", "e", "l", "o", "he", "ll", "hell", "hello", "▁hello", "lo"]
    tokens = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*pieces, *words],
        "tokenizer.ggml.scores": [0.0] * len(pieces) + [-float(n) for n in range(len(words))],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(words)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    file = write_gguf(plain, tmp_path / "model.gguf", name="llama", tokens=tokens)
    tokenizer = Tokenizer(unpack(file))
    ids = tokenizer.encode("hello é", add_special_tokens=True)
    names = [tokenizer.name_of(token_id) for token_id in ids]
    assert names == ["<s>", "▁hello", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids) == "hello é"


def test_the_tokeniser_of_gemma_4(tmp_path: Path) -> None:
    """Merges are the file's, blanks are escaped, and other bytes have tokens; BOS comes first."""
    plain = write_tiny_model(TinyModel("", "Llama", {"vocab_size": 300}), tmp_path / "plain")
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = [
        "▁",
        "h",
        "e",
        "l",
        "o",
        "\n",
        "\n\n",
        "ll",
        "el",
        "he",
        "▁he",
        "<|channel>",
        "<turn|>",
    ]
    tokens = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": [*pieces, *words],
        "tokenizer.ggml.scores": [-1000.0] * (len(pieces) + len(words)),
        "tokenizer.ggml.merges": ["\n \n", "e l", "h e", "▁ he", "l l"],
        "tokenizer.ggml.token_type": [3, 3, 3, 3, *[6] * 256, *[1] * 11, 4, 3],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,  # which llama.cpp does not believe
    }
    file = write_gguf(plain, tmp_path / "model.gguf", name="llama", tokens=tokens)
    tokenizer = Tokenizer(unpack(file))
    text = "hello he  \n\n\né<|channel>"
    ids = tokenizer.encode(text, add_special_tokens=True)
    names = [tokenizer.name_of(token_id) for token_id in ids]
    hello, marks = ["h", "el", "l", "o", "▁he"], ["<0xC3>", "<0xA9>", "<|channel>"]
    assert names == ["<bos>", *hello, "▁", "▁", "\n\n", "\n", *marks]
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_ids == (1, len(pieces) + len(words) - 1)


def named_tokens(**changes: Any) -> dict[str, Any]:
    """Return the bundled model's tokens without merges; `end`: the name and kind of the last."""
    tokens = tokens_of(BUNDLED_MODEL_DIR)
    for number, (name, kind) in enumerate(changes.pop("ends", ())):
        tokens["tokenizer.ggml.tokens"][-1 - number] = name
        tokens["tokenizer.ggml.token_type"][-1 - number] = kind
    known = set(tokens["tokenizer.ggml.tokens"])
    tokens["tokenizer.ggml.merges"] = [
        merge
        for merge in tokens["tokenizer.ggml.merges"]
        if {*merge.split(" "), merge.replace(" ", "")} <= known
    ]
    keys = {f"tokenizer.ggml.{key}": item for key, item in changes.items()}
    return {key: item for key, item in (tokens | keys).items() if item is not ...}


def tokenizer_of(tokens: dict[str, Any], tmp_path: Path) -> Tokenizer:
    file = tmp_path / "model.gguf"
    write_gguf(BUNDLED_MODEL_DIR, file, name="llama", kind="BF16", tokens=tokens)
    return Tokenizer(unpack(file))


ENDS_BY_NAME = (
    *("<end_of_turn>", "<|eot_id|>", "<|end|>", "<|im_end|>", "<|eom_id|>", "<|return|>", "<EOT>"),
    *("<|call|>", "<|endoftext|>", "<|end_of_text|>", "[EOT]", "<|fim_pad|>", "<|file_sep|>"),
)


@pytest.mark.parametrize("kind", [1, 3, 4])
@pytest.mark.parametrize("name", ENDS_BY_NAME)
def test_tokens_that_end_by_their_name(name: str, kind: int, tmp_path: Path) -> None:
    """Whatever its type: it is found in texts, ends an answer, and is no text (llama.cpp's ids)."""
    tokens = named_tokens(ends=[(name, kind)], bos_token_id=1, eos_token_id=2)
    last = len(tokens["tokenizer.ggml.tokens"]) - 1
    tokenizer = tokenizer_of(tokens, tmp_path)
    assert tokenizer.eos_token_ids == (2, last)
    ids = tokenizer.encode(f"the{name}the", add_special_tokens=False)
    assert ids.count(last) == 1
    assert tokenizer.decode(ids) == "thethe"


@pytest.mark.parametrize(
    ("ends", "has_message_end"),
    [
        (["<|end|>", "<|return|>", "<|call|>"], False),
        (["<|end|>", "<|flush|>", "<|calls|>"], False),
        (["<|end|>", "<|flush|>"], True),
        (["<|end|>", "<|im_end|>"], True),
    ],
)
def test_the_end_of_one_message_of_several(
    ends: list[str], has_message_end: bool, tmp_path: Path
) -> None:
    tokens = named_tokens(ends=[(name, 3) for name in ends], eos_token_id=2)
    tokenizer = tokenizer_of(tokens, tmp_path)
    first = len(tokens["tokenizer.ggml.tokens"]) - len(ends)
    others = range(first, first + len(ends) - 1)
    expected = (2, *others, *([first + len(ends) - 1] if has_message_end else []))
    assert tokenizer.eos_token_ids == expected


@pytest.mark.parametrize(("kind", "ends"), [(1, False), (3, True), (4, False)])
def test_an_end_that_is_a_tag_elsewhere(kind: int, ends: bool, tmp_path: Path) -> None:
    """`</s>` ends as a control token; Gemma has it as a word."""
    tokens = named_tokens(ends=[("</s>", kind)], eos_token_id=2)
    last = len(tokens["tokenizer.ggml.tokens"]) - 1
    assert tokenizer_of(tokens, tmp_path).eos_token_ids == ((2, last) if ends else (2,))


@pytest.mark.parametrize("key", ["eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"])
def test_tokens_that_end_by_key(key: str, tmp_path: Path) -> None:
    tokens = named_tokens(**{f"{key}_token_id": 77})
    assert tokenizer_of(tokens, tmp_path).eos_token_ids == (77,)


@pytest.mark.parametrize(
    ("pre", "adds_bos"),
    [
        *((pre, True) for pre in ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")),
        *((pre, False) for pre in ("deepseek-r1-qwen", "qwen2", "gpt-2", "dbrx", "glm4")),
        (..., False),
    ],
)
def test_whether_texts_begin_with_bos(pre: Any, adds_bos: bool, tmp_path: Path) -> None:
    """As llama.cpp has it where the file does not say; a file that says so is right."""
    tokenizer = tokenizer_of(named_tokens(pre=pre, bos_token_id=1), tmp_path)
    ids = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.encode("the", add_special_tokens=True) == [1] * adds_bos + ids
    said = named_tokens(pre=pre, bos_token_id=1, add_bos_token=not adds_bos)
    other = tokenizer_of(said, tmp_path).encode("the", add_special_tokens=True)
    assert other == [1] * (not adds_bos) + ids


def test_texts_that_end_with_eos(tmp_path: Path) -> None:
    """Files of models for vectors say so."""
    keys = {"bos_token_id": 1, "eos_token_id": 2, "add_bos_token": True}
    tokenizer = tokenizer_of(named_tokens(**keys, add_eos_token=True), tmp_path)
    ids = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.encode("the", add_special_tokens=True) == [1, *ids, 2]
    assert tokenizer.encode("", add_special_tokens=True) == [1, 2]


def test_texts_end_with_the_eos_of_other_files(tmp_path: Path) -> None:
    """Token 2 where a SentencePiece file does not name it; none in prompts that are filled in."""
    tokens = named_tokens(bos_token_id=1, eos_token_id=2, add_bos_token=True, add_eos_token=True)
    tokenizer = tokenizer_of(tokens, tmp_path)
    spans = tokenizer.spans("the", add_special_tokens=True)
    assert list(spans.token_ids) == tokenizer.encode("the", add_special_tokens=True)
    assert (spans.starts[-1], spans.stops[-1]) == (0, 0)
    twice = tokenizer.encode(f"the{tokenizer.name_of(2)}", add_special_tokens=True)
    assert twice.count(2) == 1
    marks = [(f"<fim_{part}>", 3) for part in ("middle", "suffix", "prefix")]
    infilling = find_infilling(tokenizer_of(tokens | named_tokens(ends=marks), tmp_path))
    assert infilling is not None
    filled = infilling.encode("the", "the")
    assert (filled[0], filled.count(2)) == (1, 0)
    plain = write_tiny_model(TinyModel("", "Llama", {"vocab_size": 300}), tmp_path / "plain")
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    made = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256],
        "tokenizer.ggml.add_eos_token": True,
    }
    file = write_gguf(plain, tmp_path / "other.gguf", name="llama", tokens=made)
    ids = Tokenizer(unpack(file)).encode("a<unk>a", add_special_tokens=True)
    assert (ids[0], ids.count(0), ids[-1]) == (1, 1, 2)  # <unk> is found in texts, as by llama.cpp


@pytest.mark.parametrize(
    ("model", "blanks"), [("Phi-3 Mini 4k", 0), ("my phi3 merge", 0), ("Phi-2", 1), (..., 1)]
)
def test_blanks_behind_the_tokens_of_phi_3(model: Any, blanks: int, tmp_path: Path) -> None:
    """llama.cpp knows by the model's name that its tokens take the blanks behind them."""
    tokens = named_tokens(ends=[("<|user|>", 3), ("<|endoftext|>", 3)], eos_token_id=2)
    tokens |= {} if model is ... else {"general.name": model}
    tokenizer = tokenizer_of(tokens, tmp_path)

    def num_ids(name: str) -> int:
        return len(tokenizer.encode(f"{name}\nthe", add_special_tokens=False))

    assert num_ids("<|user|>") == len(tokenizer.encode("the", add_special_tokens=False)) + 1 + (
        blanks
    )
    assert num_ids("<|endoftext|>") == num_ids("<|user|>") + 1 - blanks


def test_a_sentencepiece_tokeniser_without_keys(tmp_path: Path) -> None:
    """BOS is token 1 and EOS token 2; without types all is text, without scores the first wins."""
    plain = write_tiny_model(TinyModel("", "Llama", {"vocab_size": 300}), tmp_path / "plain")
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*pieces, "▁", "h", "e", "l", "he", "el", "<end_of_turn>"],
    }
    file = write_gguf(plain, tmp_path / "model.gguf", name="llama", tokens=tokens)
    tokenizer = Tokenizer(unpack(file))
    ids = tokenizer.encode("hel<end_of_turn>", add_special_tokens=True)
    assert [tokenizer.name_of(i) for i in ids] == ["<s>", "▁", "he", "l", "<end_of_turn>"]
    assert tokenizer.eos_token_ids == (2, len(pieces) + 6)
