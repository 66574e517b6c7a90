"""Model directories that cannot be served: every one is a ModelLoadError naming file and key."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import find_tiny_model, write_tiny_model

from lightserve.errors import ModelLoadError
from lightserve.kernels.reference import ReferenceKernels
from lightserve.models.base import SingleRank
from lightserve.models.config import check_tp, load_model_config
from lightserve.models.loader import load_model
from lightserve.models.rope import DefaultRope, LinearRope
from lightserve.models.weight_files import (
    INDEX_FILE,
    SINGLE_FILE,
    check_digests,
    check_weights,
    find_weights,
)

NORM = "model.norm.weight"
Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in several shards."""
    path = tmp_path_factory.mktemp("sharded")
    return write_tiny_model(find_tiny_model("llama-biases-sharded"), path)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mistral in one file."""
    path = tmp_path_factory.mktemp("single")
    return write_tiny_model(find_tiny_model("mistral-full"), path)


@pytest.fixture
def sharded_copy(sharded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sharded, tmp_path / "model"))


@pytest.fixture
def single_copy(single: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(single, tmp_path / "model"))


def start_up(path: Path) -> None:
    """What the supervisor does before it starts anything."""
    check_weights(path, load_model_config(path))


def test_whole_directories_start(sharded: Path, single: Path) -> None:
    start_up(sharded)
    start_up(single)
    assert len(list(sharded.glob("*.safetensors"))) > 2


def edit_json(file: Path, **changes: Any) -> None:
    """Set keys; `...` removes one."""
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))


YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

BAD_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ...}, "'architectures' is missing"),
    ({"architectures": ["GPT2LMHeadModel"]}, "'architectures' names 'GPT2LMHeadModel'; supported"),
    ({"architectures": []}, "'architectures' must name one"),
    ({"architectures": [7]}, "'architectures' must name one"),
    ({"architectures": "LlamaForCausalLM"}, "'architectures' must be a list"),
    ({"vocab_size": ...}, "'vocab_size' is missing"),
    ({"vocab_size": None}, "'vocab_size' is null"),
    ({"vocab_size": "200"}, "'vocab_size' must be an integer"),
    ({"vocab_size": True}, "'vocab_size' must be an integer"),
    ({"vocab_size": -200}, "'vocab_size' must be between 1 and"),
    ({"vocab_size": 2**40}, "'vocab_size' must be between 1 and"),
    ({"hidden_size": 64.5}, "'hidden_size' must be an integer"),
    ({"hidden_size": 0}, "'hidden_size' must be between"),
    ({"hidden_size": 66, "head_dim": ...}, "'hidden_size' must be 4 times an even number"),
    ({"intermediate_size": []}, "'intermediate_size' must be an integer"),
    ({"num_hidden_layers": 10**9}, "'num_hidden_layers' must be between 1 and 4096"),
    ({"num_attention_heads": ...}, "'num_attention_heads' is missing"),
    ({"num_key_value_heads": 3}, "'num_key_value_heads' must divide num_attention_heads 4, got 3"),
    ({"head_dim": 15}, "'head_dim' must be even, got 15"),
    ({"rms_norm_eps": ...}, "'rms_norm_eps' is missing"),
    ({"rms_norm_eps": -1e-5}, "'rms_norm_eps' must be finite and greater than 0"),
    ({"rms_norm_eps": float("nan")}, "'rms_norm_eps' must be finite"),
    ({"max_position_embeddings": ...}, "'max_position_embeddings' is missing"),
    ({"hidden_act": "gelu"}, "'hidden_act' must be 'silu', got 'gelu'"),
    ({"attention_bias": "yes"}, "'attention_bias' must be true or false"),
    ({"mlp_bias": 1}, "'mlp_bias' must be true or false"),
    ({"tie_word_embeddings": "false"}, "'tie_word_embeddings' must be true or false"),
    ({"dtype": "int8"}, "'dtype' must be one of float32"),
    ({"dtype": 16}, "'dtype' must be a string"),
    ({"quantization_config": {"bits": 4}}, "'quantization_config.quant_method' is missing"),
    ({"rope_parameters": [1]}, "'rope_parameters' must be an object"),
    ({"rope_parameters": {"rope_type": "spiral"}}, "'rope_parameters.rope_type' must be one of"),
    ({"rope_parameters": {"rope_type": "longrope"}}, "'rope_parameters.short_factor' is missing"),
    ({"rope_parameters": {"rope_type": 3}}, "'rope_parameters.rope_type' must be a string"),
    ({"rope_parameters": {"rope_theta": 0}}, "'rope_parameters.rope_theta' must be finite"),
    ({"rope_scaling": {"type": "linear"}}, "'rope_scaling.factor' is missing"),
    ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "'rope_scaling.factor' must be at least"),
    ({"rope_scaling": {"type": "axial"}}, "'rope_scaling.rope_type' must be"),
    ({"rope_parameters": {**YARN, "beta_fast": "x"}}, "'rope_parameters.beta_fast' must be a"),
    ({"rope_parameters": {**YARN, "partial_rotary_factor": 0.5}}, "partial_rotary_factor' must be"),
    ({"rope_parameters": {**LLAMA3, "low_freq_factor": ...}}, "'rope_parameters.low_freq_factor'"),
    ({"rope_parameters": {**LLAMA3, "low_freq_factor": 4.0}}, "high_freq_factor' must exceed"),
]


@pytest.mark.parametrize(("changes", "complaint"), BAD_CONFIGS, ids=lambda value: str(value)[:50])
def test_bad_config_key(changes: dict[str, Any], complaint: str, sharded_copy: Path) -> None:
    for key, value in changes.items():
        if isinstance(value, dict):
            changes = changes | {key: {k: v for k, v in value.items() if v is not ...}}
    edit_json(sharded_copy / "config.json", **changes)
    with pytest.raises(ModelLoadError) as caught:
        start_up(sharded_copy)
    assert complaint in str(caught.value)
    assert str(sharded_copy / "config.json") in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"sliding_window": "4k"}, "'sliding_window' must be an integer"),
        ({"sliding_window": -1}, "'sliding_window' must be between"),
        ({"use_sliding_window": "no"}, "'use_sliding_window' must be true or false"),
        ({"layer_types": ["full_attention"]}, "'layer_types' must have 3 entries, got 1"),
        ({"layer_types": ["linear_attention"] * 3}, "'layer_types' has the unknown entry"),
        ({"layer_types": ..., "max_window_layers": -1}, "'max_window_layers' must be between 0"),
        ({"num_key_value_heads": ...}, "'num_key_value_heads' is missing"),
    ],
    ids=str,
)
def test_bad_window_key(changes: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    write_tiny_model(find_tiny_model("qwen2-window"), tmp_path)
    edit_json(tmp_path / "config.json", **changes)
    with pytest.raises(ModelLoadError, match=r"config\.json") as caught:
        load_model_config(tmp_path)
    assert complaint in str(caught.value)


LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize(
    ("name", "changes", "complaint"),
    [
        ("phi3", {"rope_parameters": {**LONG, "long_factor": [1.0] * 7}}, "must be 8 numbers"),
        ("phi3", {"rope_parameters": {**LONG, "short_factor": [0.0] * 8}}, "must be 8 numbers"),
        ("phi3", {"rope_parameters": {**LONG, "long_factor": ["x"] * 8}}, "must be 8 numbers"),
        (
            "phi3",
            {"rope_parameters": LONG, "original_max_position_embeddings": 1},
            "original_max_position_embeddings' must exceed 1",
        ),
        ("phi3", {"rope_parameters": {"partial_rotary_factor": 0.2}}, "must leave an even part"),
        ("glm", {"partial_rotary_factor": 1.5, "rope_parameters": ...}, "must leave an even part"),
        ("mixtral", {"num_local_experts": 0}, "'num_local_experts' must be between 1 and 4096"),
        ("mixtral", {"num_experts_per_tok": 6}, "'num_experts_per_tok' must be between 1 and 5"),
        ("qwen2-moe", {"mlp_only_layers": [True]}, "'mlp_only_layers' has the entry True"),
        ("qwen2-moe", {"decoder_sparse_step": 5}, "'decoder_sparse_step' 5 leaves no layer"),
        ("qwen3-moe", {"moe_intermediate_size": "x"}, "'moe_intermediate_size' must be an int"),
        ("olmoe", {"clip_qkv": 8.0}, "'clip_qkv' must be null"),
        ("glm4-moe", {"n_group": 3}, "'n_group' must give even groups of 8, got 3"),
        ("glm4-moe", {"topk_group": 5}, "'topk_group' must be between 1 and 4"),
        (
            "glm4-moe",
            {"topk_group": 1},
            "'num_experts_per_tok' must be at most 2, the ex",
        ),
        ("glm4-moe", {"first_k_dense_replace": 3}, "'first_k_dense_replace' must be below 3"),
        ("glm4-moe-lite", {"mlp_layer_types": ["dense"]}, "must be 4 times 'dense' or 'sparse'"),
        (
            "glm4-moe-lite",
            {"topk_method": "greedy"},
            "'topk_method' must be 'noaux_tc', got 'greedy'",
        ),
        (
            "mistral4",
            {"scoring_func": "sigmoid"},
            "'scoring_func' must be 'softmax', got 'sigmoid'",
        ),
        ("mistral4", {"rope_parameters": ...}, "'rope_parameters' is missing"),
        ("mistral4", {"n_group": 4}, "'n_group' must give even groups of 6, got 4"),
        ("llama4", {"layer_types": ["full_attention"] * 4}, "must be 'chunked_attention' in all"),
        ("llama4", {"attn_temperature_tuning": "x"}, "must be true or false, got 'x'"),
        ("llama4", {"moe_layers": [4]}, "'moe_layers' must leave layers with experts, from 0 to 3"),
        ("llama4", {"moe_layers": [True]}, "'moe_layers' has the entry True"),
        ("llama4", {"no_rope_layers": [1, 0]}, "'no_rope_layers' must be 4 times 0 or 1"),
        ("llama4", {"num_key_value_heads": 3}, "'num_key_value_heads' must divide"),
        ("minimax-m2", {"use_qk_norm": False}, "'use_qk_norm' must be true, got false"),
        ("minimax-m2", {"qk_norm_type": "per_head"}, "'qk_norm_type' must be 'per_layer', got"),
        ("minimax-m2", {"scoring_func": "softmax"}, "'scoring_func' must be 'sigmoid', got 'soft"),
        ("minimax-m2", {"shared_intermediate_size": 64}, "'shared_intermediate_size' must be 0"),
        ("minimax-m2", {"rotary_dim": 25, "rope_parameters": ...}, "must leave an even part"),
        ("exaone4", {"layer_types": ["chunked_attention"] * 4}, "has the unknown entry 'chunked"),
        ("exaone4", {"layer_types": ..., "sliding_window_pattern": "LLLG"}, "must be an integer"),
        ("seed-oss", {"attention_out_bias": 1}, "'attention_out_bias' must be true or false"),
        ("gpt-neox", {"hidden_act": "silu"}, "'hidden_act' must be one of gelu, gelu_new"),
        ("gpt-neox", {"hidden_size": 66}, "'hidden_size' must be 4 times an even number, got 66"),
        ("phi", {"qk_layernorm": True}, "'qk_layernorm' must be false"),
        ("starcoder2", {"num_key_value_heads": 3}, "'num_key_value_heads' must divide"),
        ("opt", {"do_layer_norm_before": 0}, "'do_layer_norm_before' must be true or false"),
        ("opt", {"_remove_final_layer_norm": True}, "'_remove_final_layer_norm' must be false"),
        ("opt", {"word_embed_proj_dim": 0}, "'word_embed_proj_dim' must be between 1 and"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "must be false"),
        ("mpt-6-heads", {"attn_config": {"clip_qkv": 6}}, "'attn_config.clip_qkv' must be null"),
        ("mpt", {"no_bias": False}, "'no_bias' must be true"),
        ("gpt-bigcode", {"multi_query": False}, "'multi_query' must be true"),
        ("gpt-bigcode", {"n_embd": 66}, "'n_embd' must be 4 times an even number, got 66"),
        ("gemma2", {"attn_logit_softcapping": 0}, "must be finite and greater than 0"),
        (
            "qwen3.5",
            {"layer_types": ["mamba"] * 4},
            "'layer_types' has the entry 'mamba'; full_att",
        ),
        ("qwen3.5", {"layer_types": ["full_attention"] * 4}, "gives no layers of linear_attention"),
        ("qwen3.5", {"layer_types": ["linear_attention"] * 4}, "gives only layers of linear_att"),
        (
            "qwen3.5",
            {"layer_types": ["full_attention"]},
            "'layer_types' must have 4 entries, got 1",
        ),
        (
            "qwen3.5",
            {"layer_types": ..., "full_attention_interval": 1},
            "'full_attention_interval' gives no layers",
        ),
        ("qwen3.5", {"linear_num_value_heads": 5}, "must be a multiple of linear_num_key_heads 2"),
        (
            "qwen3.5",
            {"linear_key_head_dim": 513},
            "'linear_key_head_dim' must be between 1 and 512",
        ),
        ("qwen3-next", {"linear_conv_kernel_dim": 1}, "'linear_conv_kernel_dim' must be between 2"),
        ("qwen3-next", {"hidden_act": "gelu"}, "'hidden_act' must be 'silu', got 'gelu'"),
        ("qwen3.5-moe", {"num_key_value_heads": 3}, "'num_key_value_heads' must divide"),
        ("olmo-hybrid", {"hidden_act": "gelu"}, "'hidden_act' must be 'silu', got 'gelu'"),
        ("olmo-hybrid", {"hidden_size": 66}, "'hidden_size' must be 4 times an even number"),
        ("kimi-linear", {"linear_num_heads": 0}, "'linear_num_heads' must be between 1 and 4096"),
        ("kimi-linear", {"linear_head_dim": 513}, "'linear_head_dim' must be between 1 and 512"),
        ("kimi-linear", {"layer_types": ["full_attention"] * 4}, "gives no layers of linear_att"),
        ("lfm2", {"layer_types": ["conv"] * 4}, "'layer_types' gives only layers of conv"),
        ("lfm2", {"layer_types": ["mamba"] * 4}, "has the entry 'mamba'; full_attention and conv"),
        (
            "lfm2",
            {"layer_types": ..., "full_attn_idxs": [4]},
            "'full_attn_idxs' must hold layers from 0 to 3, got [4]",
        ),
        ("lfm2", {"conv_L_cache": 17}, "'conv_L_cache' must be between 2 and 16, got 17"),
        ("lfm2-moe", {"num_dense_layers": 3}, "'num_dense_layers' must be between 0 and 2"),
        ("qwen1", {"kv_channels": 8}, "'kv_channels' must be 16, got 8"),
        ("qwen1", {"intermediate_size": 193}, "'intermediate_size' must be even"),
        ("baichuan-13b", {"model_max_length": 0}, "'model_max_length' must be between 1"),
        ("internlm", {"rotary": {"type": "dynamic"}}, "'rotary.type' must be 'origin'"),
        ("internlm2", {"num_key_value_heads": 3}, "'num_key_value_heads' must divide"),
        ("chatglm", {"rmsnorm": False}, "'rmsnorm' must be true"),
        ("chatglm", {"kv_channels": 10}, "'kv_channels' must be a multiple of 4, got 10"),
        ("falcon-groups", {"num_kv_heads": 3}, "'num_kv_heads' must divide"),
        ("falcon-groups", {"num_ln_in_parallel_attn": 3}, "must be between 1 and 2, got 3"),
        ("granite-hybrid-moe", {"num_experts_per_tok": 5}, "'num_experts_per_tok' must be between"),
        (
            "nemotron-h",
            {"layers_block_type": ["conv"]},
            "'layers_block_type' has the entry 'conv'; li",
        ),
        ("nemotron-h", {"hybrid_override_pattern": "M*"}, "gives no layer of mlp or moe"),
        ("nemotron-h-moe", {"n_shared_experts": 2}, "'n_shared_experts' must be 1, got 2"),
        ("nemotron-h-latent", {"n_group": 4}, "'n_group' must give even groups of 6, got 4"),
        ("nemotron-h-latent", {"moe_latent_size": 0}, "'moe_latent_size' must be between 1"),
        ("falcon-h1", {"mlp_multipliers": [1.0]}, "'mlp_multipliers' must hold 2 positive numbers"),
        ("falcon-h1", {"ssm_multipliers": [1, 1, 1, 1, 0]}, "must hold 5 positive numbers, got"),
        ("falcon-h1", {"mamba_d_head": 11}, "'mamba_d_head' times mamba_n_heads 8 must be 96"),
        ("falcon-h1", {"projectors_bias": True}, "must be False, as mamba_proj_bias"),
        ("falcon-h1", {"mamba_rms_norm": True}, "'mamba_norm_before_gate' must be false with mam"),
        ("nemotron-h", {"hybrid_override_pattern": "M-"}, "gives no layer of full_attention"),
        ("nemotron-h", {"n_groups": 4}, "'n_groups' must divide mamba_num_heads 6, got 4"),
        ("nemotron-h", {"mamba_hidden_act": "relu"}, "'mamba_hidden_act' must be 'silu'"),
        ("nemotron-h", {"head_dim": 15}, "'head_dim' must be even, got 15"),
        ("granite-hybrid", {"mamba_n_groups": 3}, "'mamba_n_groups' must divide mamba_n_heads 8"),
        ("granite-hybrid", {"mamba_d_state": 513}, "'mamba_d_state' must be between 1 and 512"),
        ("granite-hybrid", {"mamba_d_head": 5}, "'mamba_d_head' times mamba_n_heads 8 must be 128"),
        ("granite-hybrid", {"mamba_d_conv": 17}, "'mamba_d_conv' must be between 2 and 16"),
        ("granite-hybrid", {"time_step_limit": [0, 1]}, "must be [0, Infinity], got [0, 1]"),
        ("nemotron-h", {"time_step_limit": [0, 1]}, "must be [0, Infinity], got [0, 1]"),
        ("granite-hybrid", {"position_embedding_type": "alibi"}, "must be one of rope, nope, got"),
        ("granite-hybrid", {"layer_types": ["mamba"] * 5}, "gives only layers of linear_attention"),
        ("granite-hybrid", {"layer_types": ["mlp"] * 5}, "'layer_types' has the entry 'mlp'"),
        (
            "granite-hybrid",
            {"num_attention_heads": 5, "num_key_value_heads": 5},
            "'hidden_size' must be 5 times an even",
        ),
        ("granite", {"logits_scaling": 0}, "'logits_scaling' must be finite and greater than 0"),
        ("granite", {"residual_multiplier": "1"}, "'residual_multiplier' must be a number"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "'no_rope_layers' must be 4 times 0 or 1"),
        ("smollm3", {"no_rope_layers": [1, 0, 2, 0]}, "'no_rope_layers' must be 4 times 0 or 1"),
        ("gemma", {"hidden_act": "silu"}, "'hidden_act' must be 'gelu_pytorch_tanh' or 'gelu'"),
        ("gemma", {"use_bidirectional_attention": True}, "must be false"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "'final_logit_softcapping' must be null"),
        (
            "gemma3",
            {"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}},
            "'rope_parameters.sliding_attention.rope_type' must be 'default'",
        ),
        ("gemma4", {"use_bidirectional_attention": "all"}, "must be null or 'vision', got 'all'"),
        ("gemma4", {"hidden_activation": "gelu"}, "must be 'gelu_pytorch_tanh', got 'gelu'"),
        ("gemma4", {"num_kv_shared_layers": 4}, "must leave a layer of each kind before the last"),
        ("gemma4", {"num_kv_shared_layers": 6}, "'num_kv_shared_layers' must be between 0 and 5"),
        ("gemma4", {"vocab_size_per_layer_input": 199}, "must be at least vocab_size 200, got 199"),
        ("gemma4", {"per_layer_config": {"2": {}}}, "'per_layer_config' must hold one object for"),
        (
            "gemma4",
            {"per_layer_config": ..., "global_head_dim": 23},
            "'global_head_dim' must be even, got 23",
        ),
        (
            "gemma4-moe",
            {"per_layer_config": ..., "num_global_key_value_heads": 3},
            "'num_global_key_value_heads' must divide num_attention_heads 4, got 3",
        ),
        ("gemma4-moe", {"top_k_experts": 5}, "'top_k_experts' must be between 1 and 4"),
        ("gemma4-moe", {"num_experts": None}, "'num_experts' is null"),
        (
            "smollm3",
            {"no_rope_layers": ..., "no_rope_layer_interval": 0},
            "'no_rope_layer_interval' must be between 1",
        ),
    ],
    ids=str,
)
def test_bad_key_of_one_family(
    name: str, changes: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    path = write_tiny_model(find_tiny_model(name), tmp_path)
    load_model_config(path)
    edit_json(path / "config.json", **changes)
    with pytest.raises(ModelLoadError, match=r"config\.json") as caught:
        load_model_config(path)
    assert complaint in str(caught.value)


def test_older_files_of_gemma_say_the_same(tmp_path: Path) -> None:
    path = write_tiny_model(find_tiny_model("gemma3"), tmp_path)
    config = load_model_config(path)
    assert config.local_rope == DefaultRope(theta=500.0)
    assert config.rope == LinearRope(theta=5000.0, factor=4.0)
    edit_json(
        path / "config.json",
        rope_parameters=...,
        rope_theta=5000.0,
        rope_local_base_freq=500.0,
        rope_scaling={"rope_type": "linear", "factor": 4.0},
        layer_types=...,
        sliding_window_pattern=3,
    )
    assert load_model_config(path) == config
    edit_json(path / "config.json", rope_theta=..., rope_scaling=..., rope_local_base_freq=...)
    plain = load_model_config(path)
    assert (plain.rope, plain.local_rope) == (DefaultRope(theta=1e6), DefaultRope(theta=1e4))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("phi3", "model.layers.0.self_attn.qkv_proj.weight"),
        ("glm", "model.layers.1.mlp.gate_up_proj.weight"),
        ("glm-0414", "model.layers.0.post_mlp_layernorm.weight"),
        ("olmo2", "model.layers.0.self_attn.k_norm.weight"),
        ("llama4", "model.layers.1.feed_forward.experts.down_proj"),
        ("llama4", "model.layers.0.feed_forward.gate_proj.weight"),
        ("mistral4", "model.layers.1.mlp.experts.gate_up_proj"),
        ("olmo-hybrid", "model.layers.0.linear_attn.v_conv1d.weight"),
        ("olmo-hybrid", "model.layers.3.post_feedforward_layernorm.weight"),
        ("kimi-linear", "model.layers.0.self_attn.f_b_proj.weight"),
        ("kimi-linear", "model.layers.1.block_sparse_moe.experts.3.w2.weight"),
        ("lfm2", "model.layers.1.conv.in_proj.bias"),
        ("lfm2-moe", "model.layers.2.feed_forward.experts.5.w3.weight"),
        ("lfm2-moe", "model.layers.1.feed_forward.expert_bias"),
        ("gemma4", "model.layers.4.per_layer_projection.weight"),
        ("gemma4", "model.embed_tokens_per_layer.weight"),
        ("gemma4-moe", "model.layers.1.experts.gate_up_proj"),
        ("gemma4-moe", "model.layers.1.router.per_expert_scale"),
        ("mistral4", "model.layers.2.mlp.shared_experts.up_proj.weight"),
        ("minimax-m2", "model.layers.1.block_sparse_moe.e_score_correction_bias"),
    ],
)
def test_tensors_of_one_family_must_be_there(name: str, tensor: str, tmp_path: Path) -> None:
    tiny = dataclasses.replace(find_tiny_model(name), sharded=False)
    path = write_tiny_model(tiny, tmp_path)
    tensors = load_file(path / SINGLE_FILE)
    shape = list(tensors[tensor].shape)
    save_file({**tensors, tensor: tensors[tensor][1:].clone()}, path / SINGLE_FILE)
    with pytest.raises(ModelLoadError, match=f"config.json implies \\{shape}"):
        start_up(path)
    del tensors[tensor]
    save_file(tensors, path / SINGLE_FILE)
    with pytest.raises(ModelLoadError, match=f"{tensor}' is missing"):
        start_up(path)


def void(_: object) -> None:
    """Make a lambda of an expression return nothing."""


def remove(name: str) -> Damage:
    return lambda path: (path / name).unlink()


def write(name: str, content: bytes) -> Damage:
    return lambda path: void((path / name).write_bytes(content))


def shard_of(path: Path, tensor: str) -> Path:
    weight_map = json.loads((path / INDEX_FILE).read_text())["weight_map"]
    return path / str(weight_map[tensor])


def point_to(target: str) -> Damage:
    """Make the index name another file for one tensor."""

    def damage(path: Path) -> None:
        index = path / INDEX_FILE
        weight_map = json.loads(index.read_text())["weight_map"]
        edit_json(index, weight_map=weight_map | {NORM: target})

    return damage


def link_outside(path: Path) -> None:
    shard = shard_of(path, NORM)
    outside = path.parent / "outside.safetensors"
    shard.rename(outside)
    shard.symlink_to(outside)


def truncate_shard(path: Path) -> None:
    shard = shard_of(path, NORM)
    os.truncate(shard, shard.stat().st_size - 1)


def truncate_header(path: Path) -> None:
    os.truncate(shard_of(path, NORM), 20)


def huge_header(path: Path) -> None:
    shard = shard_of(path, NORM)
    shard.write_bytes((2**62).to_bytes(8, "little") + shard.read_bytes()[8:])


def edit_shard(change: Callable[[dict[str, torch.Tensor]], None]) -> Damage:
    def damage(path: Path) -> None:
        shard = shard_of(path, NORM)
        tensors = load_file(shard)
        change(tensors)
        save_file(tensors, shard)

    return damage


BAD_FILES: dict[str, tuple[Damage, str]] = {
    "no config": (remove("config.json"), "config.json: no such file"),
    "truncated config": (write("config.json", b'{"vocab_size": 20'), "config.json: not valid JSON"),
    "config of another kind": (write("config.json", b"[1, 2]"), "config.json: must hold a JSON"),
    "config not text": (write("config.json", b"\xff\xfe\x00"), "config.json: not valid JSON"),
    "deep config": (write("config.json", b"[" * 100_000), "config.json: not valid JSON"),
    "no index": (remove(INDEX_FILE), f"has neither {SINGLE_FILE} nor {INDEX_FILE}"),
    "truncated index": (write(INDEX_FILE, b'{"weight_map": {'), f"{INDEX_FILE}: not valid JSON"),
    "index without map": (write(INDEX_FILE, b"{}"), f"{INDEX_FILE}: key 'weight_map' is missing"),
    "index of numbers": (write(INDEX_FILE, b'{"weight_map": {"a": 1}}'), "'weight_map.a' must be"),
    "map without tensor": (write(INDEX_FILE, b'{"weight_map": {}}'), "'model.embed_tokens.weight'"),
    "path upwards": (point_to("../../etc/passwd"), f"'weight_map.{NORM}' must name a .safetensors"),
    "path upwards to weights": (point_to("../x.safetensors"), "must name a .safetensors file"),
    "absolute path": (point_to("/etc/passwd"), f"'weight_map.{NORM}' must name a .safetensors"),
    "pickle": (point_to("pytorch_model.bin"), f"'weight_map.{NORM}' must name a .safetensors file"),
    "missing shard": (point_to("gone.safetensors"), "names 'gone.safetensors', which does not"),
    "link outside": (link_outside, "leads out of the model directory"),
    "truncated shard": (truncate_shard, "not a whole safetensors file"),
    "truncated header": (truncate_header, "not a whole safetensors file"),
    "huge header": (huge_header, "not a whole safetensors file"),
    "missing tensor": (edit_shard(lambda t: void(t.pop(NORM))), f"tensor '{NORM}' is missing"),
    "wrong shape": (
        edit_shard(lambda t: t.update({NORM: torch.ones(63)})),
        f"tensor '{NORM}' has shape [63], config.json implies [64]",
    ),
    "wrong type": (
        edit_shard(lambda t: t.update({NORM: torch.ones(64, dtype=torch.int8)})),
        f"tensor '{NORM}' has type I8",
    ),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_file(name: str, sharded_copy: Path) -> None:
    damage, complaint = BAD_FILES[name]
    damage(sharded_copy)
    with pytest.raises(ModelLoadError) as caught:
        start_up(sharded_copy)
    assert complaint in str(caught.value)
    assert str(sharded_copy) in str(caught.value)


def load(path: Path, dtype: torch.dtype = torch.float32) -> None:
    load_model(
        path, load_model_config(path), dtype=dtype, kernels=ReferenceKernels(), tp=SingleRank()
    )


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite(value: float, single_copy: Path) -> None:
    tensors = load_file(single_copy / SINGLE_FILE)
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors[name][3, 5] = value
    save_file(tensors, single_copy / SINGLE_FILE)
    start_up(single_copy)  # headers do not show it
    with pytest.raises(ModelLoadError, match=f"{SINGLE_FILE}: tensor '{name}' has values that"):
        load(single_copy)


def test_weights_beyond_the_range_of_float16(single_copy: Path) -> None:
    tensors = load_file(single_copy / SINGLE_FILE)
    tensors[NORM][0] = 1e6
    save_file(tensors, single_copy / SINGLE_FILE)
    load(single_copy, torch.bfloat16)
    with pytest.raises(ModelLoadError, match=f"'{NORM}' has values beyond torch.float16"):
        load(single_copy, torch.float16)


def test_code_in_the_directory_never_runs(single_copy: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    evil = f"open({str(marker)!r}, 'w').close()\n"
    for name in ("modeling_evil.py", "configuration_evil.py", "pytorch_model.bin"):
        (single_copy / name).write_text(evil)
    edit_json(
        single_copy / "config.json",
        auto_map={
            "AutoConfig": "configuration_evil.EvilConfig",
            "AutoModelForCausalLM": "modeling_evil.EvilForCausalLM",
        },
    )
    start_up(single_copy)
    load(single_copy)
    assert not marker.exists()


def test_links_within_a_hub_cache_are_followed(single: Path, tmp_path: Path) -> None:
    """`snapshots/<revision>/` of a hub cache links to `blobs/`."""
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(single.iterdir()):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    start_up(snapshot)
    load(snapshot)


@pytest.mark.parametrize(
    ("tp", "key", "number"),
    [(3, "num_attention_heads", 4), (8, "num_attention_heads", 4)],
)
def test_sizes_that_do_not_divide(tp: int, key: str, number: int, sharded: Path) -> None:
    config = load_model_config(sharded)
    for good in (1, 2, 4):
        check_tp(config, good)
    with pytest.raises(ModelLoadError, match=f"'{key}' is {number}, not divisible by --tp {tp}"):
        check_tp(config, tp)


def test_kv_heads_that_neither_divide_nor_replicate(sharded: Path) -> None:
    config = dataclasses.replace(load_model_config(sharded), num_heads=12, num_kv_heads=3)
    check_tp(config, 1)
    check_tp(config, 3)
    check_tp(config, 12)
    with pytest.raises(ModelLoadError, match=r"'num_key_value_heads' is 3, which neither.*--tp 2"):
        check_tp(config, 2)


BAD_MANIFESTS: dict[str, tuple[dict[str, Any], str]] = {
    "a shard left out": ({"SHARD": ...}, "manifest.json: 'SHARD' is missing, which holds weights"),
    "no digest": ({"SHARD": "abc"}, "manifest.json: key 'SHARD' must be a SHA-256 digest"),
    "no text": ({"SHARD": 7}, "manifest.json: key 'SHARD' must be a string"),
    "other weights": ({"SHARD": "0" * 64}, "model/SHARD: its SHA-256 is "),
    "another config": ({"config.json": "0" * 64}, "model/config.json: its SHA-256 is "),
    "a file too many": ({"other": "0" * 64}, "key 'other' names "),
    "a file elsewhere": ({"../manifest.json": "0" * 64}, "must name a file in the model directory"),
}


@pytest.mark.parametrize("case", BAD_MANIFESTS)
def test_files_are_those_of_the_manifest(case: str, sharded_copy: Path, tmp_path: Path) -> None:
    files = find_weights(sharded_copy)
    shards = sorted(set(files.file_of.values()))
    listed = [*shards, sharded_copy / "config.json"]
    digests: dict[str, Any] = {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest().upper() for file in listed
    }
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps(digests))
    check_digests(sharded_copy, files, manifest)
    changes, complaint = BAD_MANIFESTS[case]
    shard = shards[1].name
    edit_json(manifest, **{name.replace("SHARD", shard): value for name, value in changes.items()})
    with pytest.raises(ModelLoadError) as caught:
        check_digests(sharded_copy, files, manifest)
    assert complaint.replace("SHARD", shard) in str(caught.value)
