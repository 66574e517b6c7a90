"""Gemma 4: layers of two kinds in one pool, and layers without keys and values of their own."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import transformers
from support.model_runs import load_tiny
from support.parity import Chunk, TokenSequence
from support.tiny_models import find_tiny_model, write_tiny_model

from lightserve.config import ServeConfig
from lightserve.errors import ModelLoadError
from lightserve.kernels.select import make_kernels, missing_core
from lightserve.models.base import kv_layout
from lightserve.models.config import check_tp, load_model_config
from lightserve.models.rope import DefaultRope, ProportionalRope
from lightserve.worker.build import build_runner
from lightserve.worker.memory import KVPool


def test_a_slot_holds_the_heads_of_both_kinds(tmp_path: Path) -> None:
    """Four windows of 2 heads of 16, and two of 24, of which the last two layers have none."""
    path = write_tiny_model(find_tiny_model("gemma4"), tmp_path)
    config = load_model_config(path)
    assert config.kv_groups == ((0, 1, 3), (2,))
    shapes = [config.shape_of(layer) for layer in range(6)]
    assert [shape.kv_source for shape in shapes] == [0, 1, 2, 3, 3, 2]
    assert [shape.inner_size for shape in shapes[3:]] == [96, 192, 192]
    assert [shape.products for shape in shapes[3:]] == ["qkv", "q", "q"]
    layout = kv_layout(config, tp_size=1, dtype="float32")
    assert layout.bytes_per_token == 2 * 4 * (3 * 2 * 16 + 2 * 24)
    assert kv_layout(config, tp_size=2, dtype="float32").bytes_per_token == 4 * (96 + 48)
    pool = KVPool(layout, 20, torch.device("cpu"))
    assert [k.shape[1:] for k in pool.k] == [(2, 16)] * 3 + [(2, 24)]


@pytest.mark.parametrize("name", ["gemma4", "gemma4-shared-products", "gemma4-moe"])
def test_a_cut_anywhere_changes_no_bit(name: str, tmp_path: Path) -> None:
    kind = "torch" if missing_core() else "native"
    path = write_tiny_model(find_tiny_model(name), tmp_path)
    loaded = load_tiny(path, torch.float32, make_kernels(kind, batch_invariant=True))
    tokens = torch.randint(0, 200, (40,), generator=torch.Generator().manual_seed(1))
    sequence = TokenSequence(tokens, torch.empty(0))
    whole = loaded.run([sequence], [[Chunk(0, 0, 40)]])
    assert whole is not None
    for cut in (1, 20, 22, 39):
        found = loaded.run([sequence], [[Chunk(0, 0, cut)], [Chunk(0, cut, 40 - cut)]])
        assert found is not None and torch.equal(found[0], whole[0]), cut


@pytest.mark.parametrize("kv_type", ["auto", "int8"])
def test_a_runner_is_built(kv_type: str, tmp_path: Path) -> None:
    if kv_type == "int8" and missing_core():
        pytest.skip(missing_core())
    path = write_tiny_model(find_tiny_model("gemma4"), tmp_path)
    served = ServeConfig(model=str(path), max_kv_tokens=400, max_num_seqs=4, kv_dtype=kv_type)
    runner = build_runner(served)
    assert [len(runner.pool.k), len(runner.pool.tensors)] == [4, 2]


def test_a_file_without_its_window_has_that_of_transformers(tmp_path: Path) -> None:
    path = write_tiny_model(find_tiny_model("gemma4-moe"), tmp_path)
    values = json.loads((path / "config.json").read_text())
    del values["sliding_window"]
    (path / "config.json").write_text(json.dumps(values))
    theirs = transformers.Gemma4TextConfig(**values)
    assert {*load_model_config(path).sliding_windows} == {theirs.sliding_window, None}


def test_published_files_say_the_same_as_those_of_transformers(tmp_path: Path) -> None:
    """By keys for all layers that see everything, where transformers writes an object for each."""
    text = {
        "attention_k_eq_v": True,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_size": 5376,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_global_key_value_heads": 4,
        "num_hidden_layers": 12,
        "num_key_value_heads": 16,
        "sliding_window": 1024,
    }
    file = tmp_path / "config.json"
    whole = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": text}
    file.write_text(json.dumps(whole))
    ours = load_model_config(tmp_path)
    theirs = transformers.Gemma4TextConfig(**text)
    file.write_text(json.dumps({**whole, "text_config": theirs.to_dict()}))
    assert load_model_config(tmp_path) == ours
    local, whole = ours.shape_of(4), ours.shape_of(5)
    assert (local.num_kv_heads, local.head_dim, local.products) == (16, 256, "qkv")
    assert (whole.num_kv_heads, whole.head_dim, whole.products) == (4, 512, "qkk")
    assert ours.rope == ProportionalRope(theta=1e6, share=0.25, factor=1.0)
    assert ours.local_rope == DefaultRope(theta=1e4)
    assert ours.vocab_size == theirs.vocab_size and ours.tie_word_embeddings
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.sliding_windows.count(None) == theirs.layer_types.count("full_attention")
    with pytest.raises(ModelLoadError, match="'num_global_key_value_heads' is 4, which neither"):
        check_tp(dataclasses.replace(ours, num_heads=12, num_kv_heads=12), 6)
