"""What a model's files, and --pooling, say of vectors of prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.tiny_encoders import write_pooling

from lightserve.errors import ConfigError, ModelLoadError
from lightserve.models.config import load_model_config
from lightserve.models.pooling import Embedding, Pooling, load_embedding

BERT: dict[str, Any] = {
    "architectures": ["BertModel"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
}
LLAMA = {
    **BERT,
    "architectures": ["LlamaForCausalLM"],
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}


def load(path: Path, config: dict[str, Any], asked: str = "auto") -> Embedding | None:
    (path / "config.json").write_text(json.dumps(config))
    return load_embedding(path, load_model_config(path), asked)


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("cls_token", Pooling.CLS),
        ("mean_tokens", Pooling.MEAN),
        ("lasttoken", Pooling.LAST),
    ],
)
def test_files_say_how(tmp_path: Path, mode: str, kind: Pooling) -> None:
    write_pooling(tmp_path, mode)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 20}')
    found = load(tmp_path, BERT)
    assert found is not None
    assert (found.kind, found.size, found.is_whole, found.embeds_only) == (kind, 32, True, True)
    assert found.max_tokens == 20
    assert load(tmp_path, BERT, "cls") == Embedding(
        kind=Pooling.CLS, size=32, is_whole=True, embeds_only=True, max_tokens=20
    )


def test_newer_files_name_the_mode(tmp_path: Path) -> None:
    write_pooling(tmp_path, "mean_tokens")
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "cls"}')
    found = load(tmp_path, BERT)
    assert found is not None
    assert found.kind is Pooling.CLS


def test_a_decoder_embeds_where_it_is_told_so(tmp_path: Path) -> None:
    assert load(tmp_path, LLAMA) is None
    asked = load(tmp_path, LLAMA, "last")
    assert asked is not None
    assert not (asked.is_whole or asked.embeds_only)
    write_pooling(tmp_path, "lasttoken")
    by_files = load(tmp_path, LLAMA)
    assert by_files is not None
    assert by_files.embeds_only
    assert load_model_config(tmp_path).tie_word_embeddings  # its head is not asked for


@pytest.mark.parametrize(
    ("fields", "sizes"),
    [
        ({}, {32}),
        ({"matryoshka_dimensions": [8, 16]}, {8, 16, 32}),
        ({"is_matryoshka": True}, {*range(1, 33)}),
    ],
)
def test_sizes(tmp_path: Path, fields: dict[str, Any], sizes: set[int]) -> None:
    found = load(tmp_path, {**BERT, **fields}, "mean")
    assert found is not None
    assert {size for size in range(1, 40) if found.can_have(size)} == sizes


@pytest.mark.parametrize(
    ("asked", "config", "complaint"),
    [
        ("auto", BERT, "modules.json: no such file: --pooling has to say"),
        ("auto", {**LLAMA, "architectures": ["LlamaModel"]}, "--pooling has to say .*: last"),
        ("mean", LLAMA, "pooling must be last for LlamaForCausalLM, .* got mean"),
    ],
)
def test_what_does_not_go_together(
    tmp_path: Path, asked: str, config: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load(tmp_path, config, asked)


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("modules.json", "{}", "modules.json: must hold a list of JSON objects"),
        ("modules.json", "[1]", "modules.json: must hold a list of JSON objects"),
        ("modules.json", "[]", "has no module of the type Pooling"),
        ("modules.json", '[{"type": "a.Dense"}]', "'0.type' names 'Dense'; supported are"),
        ("modules.json", '[{"type": "a.Pooling", "path": "../x"}]', "must name a folder of"),
        ("1_Pooling/config.json", "{}", "must have one of pooling_mode_cls_token"),
        (
            "1_Pooling/config.json",
            '{"pooling_mode_cls_token": true, "pooling_mode_max_tokens": true}',
            "must have one of",
        ),
        ("1_Pooling/config.json", '{"pooling_mode": "max"}', "must be one of cls, mean, lasttoken"),
        ("config.json", json.dumps({**BERT, "hidden_act": "swish"}), "key 'hidden_act' must be"),
        ("config.json", json.dumps({**BERT, "is_decoder": True}), "'is_decoder' must be false"),
        (
            "config.json",
            json.dumps({**BERT, "position_embedding_type": "relative_key"}),
            "must be 'absolute'",
        ),
        ("config.json", json.dumps({**BERT, "hidden_size": 30}), "4 times an even number"),
        ("config.json", json.dumps({**BERT, "matryoshka_dimensions": [64]}), "from 1 to 32"),
    ],
)
def test_files_that_ask_for_what_there_is_not(
    tmp_path: Path, file: str, text: str, complaint: str
) -> None:
    write_pooling(tmp_path, "mean_tokens")
    (tmp_path / "config.json").write_text(json.dumps(BERT))
    (tmp_path / file).write_text(text)
    with pytest.raises(ModelLoadError, match=complaint):
        load_embedding(tmp_path, load_model_config(tmp_path), "auto")
