"""Rotary tables against transformers', bit for bit, over every kind and many parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from lightserve.errors import ConfigError
from lightserve.models.config import load_model_config, resolve_context_len
from lightserve.models.layers.rotary import RotaryTable, frequencies

MAX_LEN = 128

factors = st.floats(1.0, 40.0)
common = {"rope_theta": st.sampled_from([500.0, 10_000.0, 1e6])}
original = {"original_max_position_embeddings": st.sampled_from([16, 64, 4096])}
KINDS = st.one_of(
    st.fixed_dictionaries({"rope_type": st.just("default"), **common}),
    st.fixed_dictionaries({"rope_type": st.just("linear"), "factor": factors, **common}),
    st.fixed_dictionaries({"rope_type": st.just("dynamic"), "factor": factors, **common}),
    st.fixed_dictionaries(
        {
            "rope_type": st.just("llama3"),
            "factor": factors,
            "low_freq_factor": st.floats(0.5, 2.0),
            "high_freq_factor": st.floats(2.5, 8.0),
            **common,
            **original,
        }
    ),
    st.fixed_dictionaries(
        {"rope_type": st.just("yarn"), "factor": factors, **common, **original},
        optional={
            "attention_factor": st.floats(0.5, 2.0),
            "mscale": st.floats(0.1, 2.0),
            "mscale_all_dim": st.floats(0.1, 2.0),
            "beta_fast": st.floats(8.0, 64.0),
            "beta_slow": st.floats(0.5, 4.0),
            "truncate": st.booleans(),
        },
    ),
)


def write_config(path: Path, rope: dict[str, Any], head_dim: int, *, legacy: bool) -> Path:
    values: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 10,
        "hidden_size": 4 * head_dim,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": MAX_LEN,
    }
    if legacy:
        inner = {key: value for key, value in rope.items() if key != "rope_theta"}
        values |= {"rope_theta": rope["rope_theta"], "rope_scaling": inner}
    else:
        values["rope_parameters"] = rope
    (path / "config.json").write_text(json.dumps(values))
    return path


def our_table(path: Path, *, context_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    config = load_model_config(path)
    found = frequencies(
        config.rope,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        context_len=context_len,
    )
    table = RotaryTable(found, context_len=context_len, device=torch.device("cpu"))
    return table.select(torch.arange(context_len))


def their_table(path: Path, *, context_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    config = transformers.AutoConfig.from_pretrained(path)
    rotary = LlamaRotaryEmbedding(config)
    cos, sin = rotary(torch.zeros(1), torch.arange(context_len)[None])
    half = cos.shape[-1] // 2
    return cos[0, :, :half], sin[0, :, :half]


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(rope=KINDS, head_dim=st.sampled_from([8, 20, 64, 128]), legacy=st.booleans())
def test_tables_equal_transformers(
    rope: dict[str, Any], head_dim: int, legacy: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = write_config(tmp_path_factory.mktemp("rope"), rope, head_dim, legacy=legacy)
    ours, theirs = our_table(path, context_len=MAX_LEN), their_table(path, context_len=MAX_LEN)
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, rtol=0, atol=2e-6)


def test_dynamic_beyond_the_trained_length_has_one_base(tmp_path: Path) -> None:
    """A longer served context gives, everywhere, what transformers gives at that length."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
    path = write_config(tmp_path, rope, 64, legacy=False)
    long = 2 * MAX_LEN
    ours, theirs = our_table(path, context_len=long), their_table(path, context_len=long)
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=2e-6)
    assert not torch.allclose(ours[0][:MAX_LEN], our_table(path, context_len=MAX_LEN)[0])


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "default"}, MAX_LEN),
        ({"rope_type": "linear", "factor": 4.0}, 4 * MAX_LEN),
        ({"rope_type": "dynamic", "factor": 2.0}, 2 * MAX_LEN),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": MAX_LEN},
            4 * MAX_LEN,
        ),
        (
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
            MAX_LEN,
        ),
    ],
)
def test_longest_context_that_may_be_asked_for(
    rope: dict[str, Any], expected: int, tmp_path: Path
) -> None:
    path = write_config(tmp_path, {"rope_theta": 10_000.0, **rope}, 8, legacy=False)
    config = load_model_config(path)
    assert config.max_context_len == expected
    assert resolve_context_len(0, config) == MAX_LEN
    assert resolve_context_len(expected, config) == expected
    with pytest.raises(ConfigError, match=f"at most the model's {expected}, got {expected + 1}"):
        resolve_context_len(expected + 1, config)
