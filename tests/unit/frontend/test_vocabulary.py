"""Models whose tokenizer files name ids that their weights do not have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.fake_router import copy_bundled_model

from lightserve.bundled import BUNDLED_MODEL_DIR
from lightserve.config import ServeConfig
from lightserve.errors import ModelLoadError
from lightserve.frontend.router_client import RouterClient
from lightserve.frontend.service import load_service
from lightserve.models.config import load_model_config

VOCAB_SIZE = load_model_config(BUNDLED_MODEL_DIR).vocab_size


def _edit(path: Path, changes: dict[str, Any]) -> None:
    values = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(values | changes))


def _load(model_dir: Path) -> None:
    load_service(ServeConfig(model=str(model_dir)), RouterClient()).encoder.close()


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("key", ["eos_token_id", "bos_token_id"])
def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path, name: str, key: str) -> None:
    copy_bundled_model(tmp_path)
    for value in (VOCAB_SIZE - 1, [2, VOCAB_SIZE - 1]):
        if key == "eos_token_id" or isinstance(value, int):
            _edit(tmp_path / name, {key: value})
            _load(tmp_path)
    for value in (VOCAB_SIZE, 999_999, [2, VOCAB_SIZE]):
        _edit(tmp_path / name, {key: value})
        with pytest.raises(ModelLoadError) as caught:
            _load(tmp_path)
        for part in (name, repr(key), str(VOCAB_SIZE)):
            assert part in str(caught.value)


def _cut_vocab(tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    config["vocab_size"] = max(tokenizer["model"]["vocab"].values())


def _add_token(tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    config["vocab_size"] = max(tokenizer["model"]["vocab"].values()) + 1
    added = tokenizer["added_tokens"][0] | {"id": config["vocab_size"], "content": "<|new|>"}
    tokenizer["added_tokens"].append(added)


def _template_id(tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    text = json.dumps(tokenizer["post_processor"])
    assert '"ids": [1]' in text or '"ids": [0]' in text
    for token_id in (0, 1):
        text = text.replace(f'"ids": [{token_id}]', f'"ids": [{VOCAB_SIZE}]')
    tokenizer["post_processor"] = json.loads(text)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (_cut_vocab, "model.vocab"),
        (_add_token, "added_tokens"),
        (_template_id, "post_processor"),
    ],
)
def test_a_tokenizer_larger_than_the_model_is_refused(
    tmp_path: Path, change: Any, key: str
) -> None:
    copy_bundled_model(tmp_path)
    paths = [tmp_path / "tokenizer.json", tmp_path / "config.json"]
    values = [json.loads(path.read_text()) for path in paths]
    change(*values)
    for path, value in zip(paths, values, strict=True):
        path.write_text(json.dumps(value))
    with pytest.raises(ModelLoadError) as caught:
        _load(tmp_path)
    assert f"tokenizer.json: key {key!r}" in str(caught.value)
