"""The bundled model as it is committed: facts, tokenizer and template, a small sampling check."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from jinja2.exceptions import TemplateError
from safetensors import safe_open
from tokenizers import Tokenizer

from lightserve.bundled import BUNDLED_MODEL_DIR
from tools.tiny_model.check import (
    Bundle,
    chat_prompt,
    draw_exchanges,
    judge,
    load_bundle,
    measure_loss,
    sample_answers,
)
from tools.tiny_model.corpus import Conversation, Exchange
from tools.tiny_model.rows import (
    BOS,
    IGNORED,
    SPECIAL_TOKENS,
    TRAINED_LENGTH,
    fill_rows,
    render,
    training_conversations,
)
from tools.tiny_model.train import learning_rate, train_model

_QUESTION = "Where is Mira's brass lantern?"


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return load_bundle(BUNDLED_MODEL_DIR)


def _config() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((BUNDLED_MODEL_DIR / "config.json").read_text())
    return content


def test_directory_is_complete_and_small() -> None:
    files = {path.name: path.stat().st_size for path in BUNDLED_MODEL_DIR.iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "MODEL_CARD.md",
    } == set(files)
    assert sum(files.values()) <= 16_000_000


def test_weights_are_bfloat16_and_few() -> None:
    num_parameters = 0
    with safe_open(BUNDLED_MODEL_DIR / "model.safetensors", framework="pt") as weights:
        for name in weights.keys():  # noqa: SIM118  # not a mapping
            tensor = weights.get_tensor(name)
            assert tensor.dtype == torch.bfloat16, name
            assert bool(torch.isfinite(tensor).all()), name
            num_parameters += tensor.numel()
    assert 0 < num_parameters <= 8_000_000
    assert f"{num_parameters:,} parameters" in (BUNDLED_MODEL_DIR / "MODEL_CARD.md").read_text()


def test_config_states_the_architecture() -> None:
    config = _config()
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["torch_dtype"] == "bfloat16"
    assert config["max_position_embeddings"] == 8192
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0


def test_special_tokens_agree(bundle: Bundle) -> None:
    config = _config()
    generation: dict[str, Any] = json.loads(
        (BUNDLED_MODEL_DIR / "generation_config.json").read_text()
    )
    for name in ("bos", "eos", "pad"):
        token_id = getattr(bundle.tokenizer, f"{name}_token_id")
        assert config[f"{name}_token_id"] == generation[f"{name}_token_id"] == token_id
    assert bundle.tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(range(6))
    assert len(bundle.tokenizer) <= config["vocab_size"]


@pytest.mark.parametrize("text", ["A kettle.", " \n\t", "naïve 日本語 🙂", "x" * 300, ""])
def test_tokenizer_is_byte_level(bundle: Bundle, text: str) -> None:
    token_ids = bundle.tokenizer.encode(text, add_special_tokens=False)
    assert bundle.tokenizer.decode(token_ids) == text


def test_bos_comes_once(bundle: Bundle) -> None:
    tokenizer = bundle.tokenizer
    rendered = chat_prompt(_QUESTION, tokenizer=tokenizer)
    bos_id = tokenizer.bos_token_id
    assert tokenizer.encode(rendered, add_special_tokens=False).count(bos_id) == 1
    assert tokenizer.encode(_QUESTION).count(bos_id) == 1
    assert tokenizer.encode(_QUESTION)[0] == bos_id


def test_template_renders_system_and_turns(bundle: Bundle) -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": " Hello. "},
        {"role": "assistant", "content": "Good day."},
        {"role": "user", "content": _QUESTION},
    ]
    rendered = bundle.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert rendered == (
        "<|bos|><|system|>Be kind.<|user|>Hello.<|assistant|>Good day.<|eos|>"
        f"<|user|>{_QUESTION}<|assistant|>"
    )
    calls = [{"function": {"name": "find", "arguments": {"thing": "kite"}}}]
    called = [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "the mill"},
    ]
    rendered = bundle.tokenizer.apply_chat_template(called, tokenize=False)
    assert re.search(r"<\|assistant\|>\[.*find.*kite.*\]<\|eos\|><\|system\|>the mill$", rendered)
    with pytest.raises(TemplateError, match="Unknown role: critic"):
        bundle.tokenizer.apply_chat_template([{"role": "critic", "content": "1"}], tokenize=False)


def test_training_text_is_what_the_template_renders(bundle: Bundle) -> None:
    exchange = Exchange("fact", _QUESTION, "In the mill.", 0.0)
    conversation = Conversation("chat", "Be kind.", (exchange, exchange))
    messages = [{"role": "system", "content": "Be kind."}]
    for _ in range(2):
        messages.append({"role": "user", "content": exchange.prompt})
        messages.append({"role": "assistant", "content": exchange.answer})
    rendered = bundle.tokenizer.apply_chat_template(messages, tokenize=False)
    assert rendered == "".join(segment.text for segment in render(conversation))


def test_rows_hold_documents_and_their_targets() -> None:
    tokenizer = Tokenizer.from_file(str(BUNDLED_MODEL_DIR / "tokenizer.json"))
    row = next(fill_rows(training_conversations(), tokenizer=tokenizer, num_tokens=64))
    token_ids, targets = row.token_ids[0].tolist(), row.targets[0].tolist()
    assert len(token_ids) == len(targets) == 64
    assert token_ids[0] == tokenizer.token_to_id(BOS)
    pairs = zip(targets, token_ids[1:], strict=False)
    assert all(target in (IGNORED, following) for target, following in pairs)
    starts = [i for i, t in enumerate(token_ids) if t == tokenizer.token_to_id(BOS)]
    steps = row.document_ids[0]
    assert starts == [0, *(i for i in range(1, 64) if steps[i] != steps[i - 1])]


@pytest.mark.long
def test_answers_follow_the_grammar(bundle: Bundle) -> None:
    """30 prompts: at the 190 of 200 that the model promises, fewer than 25 are very unlikely."""
    exchanges = draw_exchanges(31, num=30)
    report = judge(sample_answers(bundle, exchanges=exchanges), training_documents="")
    assert report.num_ended >= 28
    assert report.num_passed >= 26
    assert report.num_distinct == 30
    assert 8 <= report.mean_tokens["fact"] <= 15
    assert 70 <= report.mean_tokens["description"] <= 100
    assert 225 <= report.mean_tokens["story"] <= 290
    assert report.coefficient_of_variation >= 0.8


def test_held_out_loss_is_near_the_entropy(bundle: Bundle) -> None:
    report = measure_loss(bundle, num_exchanges=30)
    assert report.loss - report.entropy < 0.02


@pytest.mark.parametrize("history", ["system", "turns", "raw"])
def test_answers_in_other_forms(bundle: Bundle, history: str) -> None:
    """A system message, an earlier turn, or no template at all: greedy answers keep to the form."""
    tokenizer = bundle.tokenizer
    messages = {
        "system": [{"role": "system", "content": "You speak to children. Stay calm."}],
        "turns": [
            {"role": "user", "content": "Who has the paper kite?"},
            {"role": "assistant", "content": "The baker Agnes has the paper kite."},
        ],
        "raw": [],
    }[history]
    if history == "raw":
        token_ids = tokenizer.encode(f"{_QUESTION}\n")
    else:
        rendered = str(
            tokenizer.apply_chat_template(
                [*messages, {"role": "user", "content": _QUESTION}],
                tokenize=False,
                add_generation_prompt=True,
            )
        )
        token_ids = tokenizer.encode(rendered, add_special_tokens=False)
    inputs = torch.tensor([token_ids])
    output = bundle.model.generate(  # type: ignore[misc]  # the stub misses the mixin
        inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=40
    )
    answer = output[0, len(token_ids) :].tolist()
    assert answer[-1] == tokenizer.eos_token_id
    assert "Mira's" in tokenizer.decode(answer)


@pytest.mark.long
def test_training_is_deterministic(bundle: Bundle) -> None:
    """Two steps, twice, with the tokenizer that is committed."""
    tokenizer = Tokenizer.from_file(str(BUNDLED_MODEL_DIR / "tokenizer.json"))
    first, second = (train_model(tokenizer, num_steps=2).model.state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_learning_rate_ends_at_zero() -> None:
    rates = [learning_rate(step, num_steps=1000) for step in range(1000)]
    assert max(rates) == learning_rate(100, num_steps=1000)
    assert rates[-1] < 1e-4 * max(rates)


def test_package_is_light(tmp_path: Path) -> None:
    """Importing the package for the model's path must not import torch."""
    code = "import sys, lightserve.bundled; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=tmp_path).returncode == 0


def test_trained_length_is_stated() -> None:
    card = (BUNDLED_MODEL_DIR / "MODEL_CARD.md").read_text()
    assert f"Trained length: {TRAINED_LENGTH} tokens" in card
    assert "Held-out loss" in card
