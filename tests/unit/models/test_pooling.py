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
CROSS = {
    **BERT,
    "architectures": ["BertForSequenceClassification"],
    "id2label": {"0": "LABEL_0"},
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
        ("mean", LLAMA, "pooling must be last or yes-no for LlamaForCausalLM, .* got mean"),
        ("yes-no", BERT, "pooling must be cls, mean or last for BertModel, .* got yes-no"),
        ("cls", CROSS, "pooling must be auto for a cross-encoder, got cls"),
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


@pytest.mark.parametrize(
    ("fields", "is_plain"),
    [
        ({}, False),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, True),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, True),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.Sigmoid"}, False),
    ],
)
def test_a_cross_encoder_scores(tmp_path: Path, fields: dict[str, Any], is_plain: bool) -> None:
    found = load(tmp_path, {**CROSS, **fields})
    assert found is not None
    assert (found.kind, found.scores, found.embeds_only) == (Pooling.SCORE, True, True)
    assert found.has_plain_scores is is_plain


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"id2label": {"0": "a", "1": "b"}}, "'id2label' must have one label, the score, got 2"),
        ({"id2label": None}, "'id2label' must have one label, the score, got 2"),
        (
            {"sentence_transformers": {"activation_fn": "os.system"}},
            "'sentence_transformers.activation_fn' must be one of torch's Sigmoid, Identity",
        ),
    ],
)
def test_scores_that_are_none(tmp_path: Path, fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelLoadError, match=complaint):
        load(tmp_path, {**CROSS, **fields})


def write_logit_score(path: Path, values: str) -> None:
    modules = [{"path": "1_L", "type": "sentence_transformers.cross_encoder.modules.LogitScore"}]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_L").mkdir()
    (path / "1_L" / "config.json").write_text(values)


def test_files_name_the_tokens_of_a_score(tmp_path: Path) -> None:
    write_logit_score(tmp_path, '{"true_token_id": 9, "false_token_id": 4}')
    found = load(tmp_path, LLAMA)
    assert found is not None
    assert (found.kind, found.yes_no, found.embeds_only) == (Pooling.YES_NO, (9, 4), True)
    assert not load_model_config(tmp_path).tie_word_embeddings  # its head is asked for


@pytest.mark.parametrize("values", ['{"true_token_id": 9}', '{"true_token_id": 99}'])
def test_tokens_of_a_score_that_are_none(tmp_path: Path, values: str) -> None:
    write_logit_score(tmp_path, values)
    with pytest.raises(ModelLoadError, match=r"1_L/config.json: key '(true|false)_token_id'"):
        load(tmp_path, LLAMA)
