"""Models whose tokenizer files name ids that their weights do not have."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest
from support.fake_router import copy_bundled_model, frontend, says

from lightserve.bundled import BUNDLED_MODEL_DIR, BUNDLED_MODEL_NAME
from lightserve.config import ServeConfig
from lightserve.errors import ModelLoadError
from lightserve.frontend.request_options import SamplingDefaults, read_sampling_defaults
from lightserve.frontend.router_client import RouterClient
from lightserve.frontend.service import load_service
from lightserve.models.config import load_model_config
from lightserve.tokenization.tokenizer import Tokenizer
from lightserve.types import SamplingParams

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


# `bad_words`: what a request says becomes sequences of tokens, and these are not drawn.

TOKENIZER = Tokenizer(BUNDLED_MODEL_DIR)
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": BUNDLED_MODEL_NAME, "prompt": [5, 6, 7]},
    "/v1/chat/completions": {
        "model": BUNDLED_MODEL_NAME,
        "messages": [{"role": "user", "content": "hi"}],
    },
}
ID = TOKENIZER.encode("a", add_special_tokens=False)[0]


def _ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("path", BODIES)
def test_words_are_barred_at_the_beginning_and_behind_a_blank(path: str) -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2])) as setup:
            asked = BODIES[path] | {"bad_words": ["cat", " cat", "the dog"], "n": 2}
            response = await setup.post(path, asked)
            assert response.status_code == 200, response.text
            expected = {_ids(text) for text in ("cat", " cat", "the dog", " the dog")}
            for submit in setup.router.submits:
                assert set(submit.sampling.bad_words) == expected
                assert len(submit.sampling.bad_words) == len(expected)

    asyncio.run(scenario())


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bad_words": ["a" * 100]}, "words of at most 32 tokens"),
        ({"bad_words": ["a"], "allowed_token_ids": [ID]}, "must leave a token"),
        ({"bad_words": ["a"], "allowed_token_ids": [ID, 2], "min_tokens": 1}, "must leave a token"),
    ],
)
def test_words_that_are_too_long_or_leave_nothing_are_refused(
    path: str, fields: dict[str, Any], message: str
) -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2])) as setup:
            response = await setup.post(path, BODIES[path] | {"max_tokens": 9} | fields)
            assert response.status_code == 400
            error = response.json()["error"]
            assert error["param"] == "bad_words"
            assert message in error["message"]
            assert setup.router.submits == []

    asyncio.run(scenario())


def _defaults(**params: Any) -> SamplingDefaults:
    return SamplingDefaults(params=SamplingParams(**params))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, SamplingDefaults()),
        ({"do_sample": False, "temperature": 0.6}, _defaults(temperature=0.0)),
        ({"do_sample": True}, SamplingDefaults()),
        ({"min_p": 0.05, "typical_p": 0.9}, _defaults(min_p=0.05, typical_p=0.9)),
        ({"suppress_tokens": [3, 5, 3]}, _defaults(logit_bias=((3, -100.0), (5, -100.0)))),
        ({"max_new_tokens": 7}, SamplingDefaults(max_tokens=7)),
        ({"do_sample": 1}, "do_sample"),
        ({"min_p": -0.1}, "min_p"),
        ({"typical_p": 1.1}, "typical_p"),
        ({"typical_p": 0}, "typical_p"),
        ({"min_p": math.nan}, "min_p"),
        ({"repetition_penalty": math.inf}, "repetition_penalty"),
        ({"suppress_tokens": [2304]}, "suppress_tokens"),
        ({"suppress_tokens": list(range(1025))}, "suppress_tokens"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        (
            {"temperature": 0.6, "top_p": 0.9, "top_k": 50},
            _defaults(temperature=0.6, top_p=0.9, top_k=50),
        ),
        ({"temperature": 0, "top_k": 0, "top_p": None}, _defaults(temperature=0.0)),
        ({"temperature": 2.0, "top_k": 2304}, _defaults(temperature=2.0, top_k=2304)),
        ({"top_k": 2305}, _defaults(top_k=0)),
        ({"top_k": -1}, _defaults(top_k=0)),
        ({"temperature": 2.001}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": "x"}, "top_p"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
    ],
)
def test_defaults_come_from_the_generation_config(
    tmp_path: Any, values: dict[str, Any], expected: SamplingDefaults | str
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    if isinstance(expected, str):
        with pytest.raises(ModelLoadError, match=expected) as caught:
            read_sampling_defaults(tmp_path, vocab_size=2304)
        assert "generation_config.json" in str(caught.value)
    else:
        assert read_sampling_defaults(tmp_path, vocab_size=2304) == expected


def test_keys_of_the_generation_config_that_are_not_taken_are_named(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    values = {
        "num_beams": 4,
        "no_repeat_ngram_size": 3,
        "stop_strings": ["x"],
        "length_penalty": 1.0,
        "num_return_sequences": 1,
        "forced_bos_token_id": None,
        "temperature": 0.5,
        "transformers_version": "5.0.0",
        "pad_token_id": 0,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    read_sampling_defaults(tmp_path, vocab_size=2304)
    assert "num_beams, no_repeat_ngram_size, stop_strings is not taken" in caplog.text


def test_the_generation_config_holds_where_a_request_says_nothing(tmp_path: Any) -> None:
    model = copy_bundled_model(tmp_path)
    values = {"do_sample": False, "min_p": 0.1, "suppress_tokens": [9, 11], "max_new_tokens": 5}
    values |= {"typical_p": 0.8}
    (tmp_path / "generation_config.json").write_text(json.dumps(values))

    async def scenario() -> None:
        flags = {"model": model, "served_model_name": BUNDLED_MODEL_NAME}
        async with frontend(says([5, 2]), **flags) as setup:
            for path, body in BODIES.items():
                own = {"temperature": 0.7, "min_p": 0, "logit_bias": {"9": 1}, "max_tokens": 3}
                for fields in ({}, own):
                    response = await setup.post(path, body | fields)
                    assert response.status_code == 200, response.text
                    submit = setup.router.submits[-1]
                    sampling = submit.sampling
                    assert sampling.temperature == fields.get("temperature", 0.0)
                    assert sampling.min_p == fields.get("min_p", 0.1)
                    assert sampling.typical_p == 0.8
                    assert submit.max_tokens == fields.get("max_tokens", 5)
                    bias = 1.0 if fields else -100.0
                    assert dict(sampling.logit_bias) == {9: bias, 11: -100.0}

    asyncio.run(scenario())
