"""Random small Hugging Face model directories of every served family.

Weights have a standard deviation of about 1/sqrt(fan-in), so that attention is neither flat nor
one-hot and early tokens change late logits.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils import logging as transformers_logging

from support.own_code_models import ARCHITECTURES, own_code_reference, write_own_code_model

VOCAB_SIZE = 200

BASE_CONFIG: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class TinyModel:
    """One random model: a family and what differs from BASE_CONFIG."""

    name: str
    family: str
    """transformers' prefix, such as Llama."""
    config: Mapping[str, Any] = field(default_factory=dict)
    sharded: bool = False
    legacy_layout: bool = False
    """Rewrite config.json as older transformers wrote it: rope_scaling, torch_dtype."""
    seed: int = 0

    @property
    def chooses_experts(self) -> bool:
        """Whether rounding may send a token to another expert."""
        sizes = [
            self.config.get(key) for key in ("num_local_experts", "num_experts", "n_routed_experts")
        ]
        return any(size not in (None, self.config.get("num_experts_per_tok")) for size in sizes)

    @property
    def has_window(self) -> bool:
        return self.config.get("sliding_window") is not None


def rope(kind: str, *, theta: float = 10_000.0, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **parameters}}


LLAMA3_ROPE = rope(
    "llama3",
    theta=500.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
PART_ROPE = rope("default", partial_rotary_factor=0.25, theta=1000.0)
LATENT: Mapping[str, Any] = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}
QWEN_DELTA: Mapping[str, Any] = {
    **rope("default", partial_rotary_factor=0.25, theta=1000.0),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
}
GEMMA4: Mapping[str, Any] = {
    "head_dim": 16,
    "global_head_dim": 24,
    "sliding_window": 21,
    "pad_token_id": 0,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.5,
            "rope_theta": 5000.0,
        },
    },
}
LINEAR = "linear_attention"
MAMBA: Mapping[str, Any] = {
    "num_local_experts": 0,
    "shared_intermediate_size": 80,
    "mamba_n_heads": 8,
    "mamba_d_state": 12,
}
FALCON: Mapping[str, Any] = {
    "mamba_d_ssm": 96,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
}
NEMOTRON_MOE: Mapping[str, Any] = {
    "n_routed_experts": 6,
    "moe_intermediate_size": 28,
    "moe_shared_expert_intermediate_size": 36,
}
NEMOTRON: Mapping[str, Any] = {
    "head_dim": 20,
    "mamba_num_heads": 6,
    "mamba_head_dim": 12,
    "n_groups": 2,
    "ssm_state_size": 20,
}
YARN_ROPE = rope("yarn", theta=1000.0, factor=4.0, original_max_position_embeddings=64)
DEEPSEEK_YARN_ROPE = rope(
    "yarn",
    theta=1000.0,
    factor=4.0,
    original_max_position_embeddings=64,
    mscale=0.7,
    mscale_all_dim=0.7,
)

TINY_MODELS = (
    TinyModel("llama-mha", "Llama", {"num_key_value_heads": 4}),
    TinyModel(
        "llama-biases-sharded", "Llama", {"attention_bias": True, "mlp_bias": True}, sharded=True
    ),
    TinyModel("llama-mqa-tied", "Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    TinyModel(
        "llama-head-dim", "Llama", {"head_dim": 24, "num_hidden_layers": 3, "vocab_size": 201}
    ),
    TinyModel("llama-linear-legacy", "Llama", rope("linear", factor=4.0), legacy_layout=True),
    TinyModel("llama-dynamic", "Llama", rope("dynamic", factor=2.0)),
    TinyModel("llama-llama3", "Llama", LLAMA3_ROPE),
    TinyModel("llama-llama3-legacy", "Llama", LLAMA3_ROPE, legacy_layout=True, sharded=True),
    TinyModel(
        "mistral-window", "Mistral", {"sliding_window": 24, "num_hidden_layers": 3}, sharded=True
    ),
    TinyModel(
        "mistral-window-mqa",
        "Mistral",
        {"sliding_window": 33, "num_key_value_heads": 1, "num_attention_heads": 8},
    ),
    TinyModel("mistral-full", "Mistral", {"sliding_window": None, "head_dim": 32}),
    TinyModel(
        "ministral3",
        "Ministral3",
        {
            "num_hidden_layers": 3,
            "head_dim": 16,
            **rope(
                "yarn",
                theta=1000.0,
                factor=4.0,
                original_max_position_embeddings=24,
                mscale=1.0,
                mscale_all_dim=1.0,
                llama_4_scaling_beta=0.4,
            ),
        },
    ),
    TinyModel("qwen2", "Qwen2"),
    TinyModel(
        "qwen2-yarn-tied-legacy",
        "Qwen2",
        {"tie_word_embeddings": True, **YARN_ROPE},
        legacy_layout=True,
    ),
    TinyModel(
        "qwen2-window",
        "Qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 1,
            "num_hidden_layers": 3,
        },
    ),
    TinyModel("qwen3", "Qwen3", {"head_dim": 32, "num_hidden_layers": 3}),
    TinyModel(
        "qwen3-biases-tied",
        "Qwen3",
        {
            "head_dim": 16,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "num_key_value_heads": 4,
        },
        sharded=True,
    ),
    TinyModel(
        "qwen3-window-yarn",
        "Qwen3",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 28,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "num_hidden_layers": 3,
            **YARN_ROPE,
        },
    ),
    TinyModel(
        "qwen3-mqa-yarn-mscale",
        "Qwen3",
        {
            "head_dim": 20,
            "num_key_value_heads": 1,
            **rope(
                "yarn",
                theta=1000.0,
                factor=4.0,
                original_max_position_embeddings=64,
                mscale=1.0,
                mscale_all_dim=0.5,
                beta_fast=8.0,
                beta_slow=2.0,
                truncate=False,
            ),
        },
    ),
    TinyModel("phi3", "Phi3", {"num_key_value_heads": 4, "sliding_window": 30}, sharded=True),
    TinyModel(
        "phi3-longrope-part",
        "Phi3",
        {
            "num_attention_heads": 4,
            "original_max_position_embeddings": 4,
            **rope(
                "longrope",
                partial_rotary_factor=0.75,
                short_factor=[1.0] * 6,
                long_factor=[1.0, 1.2, 1.5, 2.0, 3.0, 4.0],
                original_max_position_embeddings=4,
            ),
        },
    ),
    TinyModel(
        "granite",
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 4.0,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    TinyModel(
        "granite-tied",
        "Granite",
        {"embedding_multiplier": 6.0, "residual_multiplier": 1.5, "tie_word_embeddings": True},
    ),
    TinyModel(
        "smollm3",
        "SmolLM3",
        {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0]},
    ),
    TinyModel(
        "smollm3-window",
        "SmolLM3",
        {
            "num_hidden_layers": 3,
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 22,
            "tie_word_embeddings": True,
        },
    ),
    TinyModel("olmo2", "Olmo2", {"num_hidden_layers": 3}),
    TinyModel("olmo2-mqa-biases", "Olmo2", {"num_key_value_heads": 1, "attention_bias": True}),
    TinyModel("glm", "Glm", {"head_dim": 24}),
    TinyModel(
        "glm-0414",
        "Glm4",
        {"head_dim": 16, "attention_bias": False, "num_hidden_layers": 3},
        sharded=True,
    ),
    TinyModel("gemma", "Gemma", {"head_dim": 24, "tie_word_embeddings": True}),
    TinyModel("gemma-mqa", "Gemma", {"head_dim": 16, "num_key_value_heads": 1}),
    TinyModel(
        "gemma3",
        "Gemma3",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 12,
            "sliding_window": 21,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "num_hidden_layers": 3,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
            },
        },
        sharded=True,
    ),
    TinyModel(
        "mixtral", "Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}, sharded=True
    ),
    TinyModel(
        "mixtral-window",
        "Mixtral",
        {"num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": 26},
    ),
    TinyModel(
        "qwen2-moe",
        "Qwen2Moe",
        {
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 56,
            "num_hidden_layers": 4,
            "mlp_only_layers": [1],
            "decoder_sparse_step": 2,
        },
    ),
    TinyModel(
        "qwen2-moe-window",
        "Qwen2Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
            "qkv_bias": False,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 32,
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 3,
            "num_hidden_layers": 3,
        },
    ),
    TinyModel(
        "qwen3-moe",
        "Qwen3Moe",
        {
            "head_dim": 24,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "moe_intermediate_size": 36,
            "num_hidden_layers": 3,
        },
        sharded=True,
    ),
    TinyModel(
        "qwen3-moe-window",
        "Qwen3Moe",
        {
            "num_experts": 3,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "use_sliding_window": True,
            "sliding_window": 29,
            "tie_word_embeddings": True,
        },
    ),
    TinyModel(
        "olmoe",
        "Olmoe",
        {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 40},
    ),
    TinyModel(
        "deepseek-v2",
        "DeepseekV2",
        {
            **LATENT,
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "n_routed_experts": 6,
            "n_shared_experts": 2,
            "num_experts_per_tok": 2,
            "routed_scaling_factor": 1.5,
            "moe_intermediate_size": 40,
            "first_k_dense_replace": 1,
            "num_hidden_layers": 3,
            **DEEPSEEK_YARN_ROPE,
        },
        sharded=True,
    ),
    TinyModel(
        "deepseek-v2-groups",
        "DeepseekV2",
        {
            **LATENT,
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "attention_bias": True,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 24,
        },
    ),
    TinyModel(
        "deepseek-v3",
        "DeepseekV3",
        {
            **LATENT,
            "num_key_value_heads": 4,
            "q_lora_rank": 20,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "rope_interleave": False,
        },
    ),
    TinyModel(
        "glm4-moe-lite",
        "Glm4MoeLite",
        {
            **LATENT,
            "num_key_value_heads": 4,
            "q_lora_rank": 20,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
            "num_hidden_layers": 4,
        },
        sharded=True,
    ),
    TinyModel(
        "mistral4",
        "Mistral4",
        {
            **LATENT,
            "num_key_value_heads": 4,
            "q_lora_rank": 20,
            "n_routed_experts": 6,
            "n_group": 2,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "num_hidden_layers": 3,
            "routed_scaling_factor": 1.3,
            **rope(
                "yarn",
                theta=1000.0,
                factor=4.0,
                original_max_position_embeddings=24,
                mscale=1.0,
                mscale_all_dim=1.0,
                llama_4_scaling_beta=0.4,
            ),
        },
    ),
    TinyModel(
        "gpt-oss",
        "GptOss",
        {
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 3,
            "sliding_window": 22,
            "swiglu_limit": 1.5,
            **rope(
                "yarn",
                theta=1000.0,
                factor=4.0,
                original_max_position_embeddings=64,
                truncate=False,
            ),
        },
        sharded=True,
    ),
    TinyModel(
        "gpt-oss-mqa",
        "GptOss",
        {
            "head_dim": 24,
            "num_key_value_heads": 1,
            "num_local_experts": 3,
            "num_experts_per_tok": 3,
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 31,
            "attention_bias": False,
            "swiglu_alpha": 1.2,
        },
    ),
    TinyModel(
        "glm4-moe",
        "Glm4Moe",
        {
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.6,
            "first_k_dense_replace": 1,
            "num_hidden_layers": 3,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    TinyModel(
        "glm4-moe-plain",
        "Glm4Moe",
        {
            "head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 40,
            "norm_topk_prob": False,
        },
    ),
    TinyModel("gpt-neox", "GPTNeoX", {"num_hidden_layers": 3, **PART_ROPE}, sharded=True),
    TinyModel(
        "gpt-neox-serial",
        "GPTNeoX",
        {
            "use_parallel_residual": False,
            "attention_bias": False,
            "hidden_act": "gelu_new",
            "tie_word_embeddings": True,
            **rope("default", partial_rotary_factor=1.0),
        },
    ),
    TinyModel("phi", "Phi", {"num_key_value_heads": 4, "num_hidden_layers": 3, **PART_ROPE}),
    TinyModel("phi-mqa", "Phi", {"num_key_value_heads": 1, "vocab_size": 201}),
    TinyModel("starcoder2", "Starcoder2", {"sliding_window": 25}, sharded=True),
    TinyModel(
        "starcoder2-tied",
        "Starcoder2",
        {"use_bias": False, "tie_word_embeddings": True, "num_key_value_heads": 1},
    ),
    TinyModel("opt", "OPT", {"ffn_dim": 80, "num_hidden_layers": 3, "pad_token_id": 1}),
    TinyModel(
        "opt-tied",
        "OPT",
        {
            "tie_word_embeddings": True,
            "enable_bias": False,
            "activation_function": "gelu",
            "word_embed_proj_dim": 48,
        },
    ),
    TinyModel(
        "opt-350m",
        "OPT",
        {
            "ffn_dim": 80,
            "num_hidden_layers": 3,
            "pad_token_id": 1,
            "do_layer_norm_before": False,
            "word_embed_proj_dim": 32,
        },
        sharded=True,
        seed=2,
    ),
    TinyModel("falcon", "Falcon", {"num_hidden_layers": 3, "bias": True}, seed=2),
    TinyModel("falcon-serial", "Falcon", {"parallel_attn": False, "multi_query": False}),
    TinyModel(
        "falcon-groups",
        "Falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 72},
        sharded=True,
    ),
    TinyModel(
        "falcon-groups-one-norm",
        "Falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    TinyModel("falcon-alibi", "Falcon", {"alibi": True, "multi_query": False, "bias": True}),
    TinyModel("bloom", "Bloom", {"num_hidden_layers": 3}, sharded=True),
    TinyModel("bloom-6-heads", "Bloom", {"hidden_size": 48, "num_attention_heads": 6}),
    TinyModel("mpt", "Mpt", {"max_seq_len": 256, "num_hidden_layers": 3}),
    TinyModel(
        "mpt-6-heads",
        "Mpt",
        {
            "max_seq_len": 256,
            "hidden_size": 48,
            "num_attention_heads": 6,
            "tie_word_embeddings": True,
            "attn_config": {"softmax_scale": 0.3},
        },
    ),
    TinyModel("gpt-bigcode", "GPTBigCode", {"n_inner": 80, "num_hidden_layers": 3}),
    TinyModel("gpt-bigcode-tied", "GPTBigCode", {"tie_word_embeddings": True}, sharded=True),
    TinyModel(
        "qwen3-next",
        "Qwen3Next",
        {
            **QWEN_DELTA,
            "head_dim": 24,
            "num_hidden_layers": 5,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 28,
            "shared_expert_intermediate_size": 20,
            "mlp_only_layers": [2],
        },
        sharded=True,
    ),
    TinyModel(
        "granite-hybrid",
        "GraniteMoeHybrid",
        {
            **MAMBA,
            "num_hidden_layers": 5,
            "layer_types": [LINEAR, LINEAR, "full_attention", LINEAR, LINEAR],
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.3,
            "logits_scaling": 2.0,
        },
        sharded=True,
    ),
    TinyModel(
        "granite-hybrid-moe",
        "GraniteMoeHybrid",
        {
            **MAMBA,
            "num_hidden_layers": 3,
            "layer_types": [LINEAR, "full_attention", LINEAR],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
        },
    ),
    TinyModel(
        "granite-hybrid-rope",
        "GraniteMoeHybrid",
        {
            **MAMBA,
            "num_hidden_layers": 3,
            "layer_types": [LINEAR, "full_attention", LINEAR],
            "position_embedding_type": "rope",
            "mamba_n_groups": 2,
            "mamba_d_conv": 3,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    TinyModel(
        "falcon-h1",
        "FalconH1",
        {
            **FALCON,
            "num_hidden_layers": 3,
            "head_dim": 24,
            "embedding_multiplier": 1.5,
            "lm_head_multiplier": 0.7,
            "key_multiplier": 0.6,
            "attention_in_multiplier": 1.3,
            "attention_out_multiplier": 0.8,
            "ssm_in_multiplier": 1.2,
            "ssm_out_multiplier": 0.7,
            "ssm_multipliers": [0.9, 0.8, 1.1, 1.2, 0.7],
            "mlp_multipliers": [1.4, 0.6],
        },
        sharded=True,
    ),
    TinyModel(
        "falcon-h1-normed",
        "FalconH1",
        {
            **FALCON,
            "mamba_d_ssm": None,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_n_groups": 1,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "ssm_multipliers": [0.9, 0.8, 1.1, 1.2, 0.7],
            "attention_in_multiplier": 1.3,
        },
    ),
    TinyModel(
        "nemotron-h",
        "NemotronH",
        {
            **NEMOTRON,
            "layers_block_type": [LINEAR, "mlp", LINEAR, "full_attention", "mlp", LINEAR],
        },
        sharded=True,
    ),
    TinyModel(
        "nemotron-h-biased",
        "NemotronH",
        {
            **NEMOTRON,
            "layers_block_type": ["mlp", LINEAR, "full_attention", "mlp"],
            "n_groups": 1,
            "use_bias": True,
            "use_conv_bias": False,
            "mlp_bias": True,
        },
    ),
    TinyModel(
        "nemotron-h-moe",
        "NemotronH",
        {
            **NEMOTRON,
            **NEMOTRON_MOE,
            "layers_block_type": [LINEAR, "moe", "full_attention", "moe", LINEAR],
            "routed_scaling_factor": 1.5,
        },
        sharded=True,
    ),
    TinyModel(
        "nemotron-h-latent",
        "NemotronH",
        {
            **NEMOTRON,
            **NEMOTRON_MOE,
            "layers_block_type": [LINEAR, "moe", "full_attention", "mlp"],
            "moe_latent_size": 24,
            "n_group": 3,
            "topk_group": 2,
            "norm_topk_prob": False,
            "mlp_bias": True,
        },
    ),
    TinyModel("qwen3.5", "Qwen3_5", {**QWEN_DELTA, "head_dim": 32, "num_hidden_layers": 4}),
    TinyModel(
        "qwen3.5-tied",
        "Qwen3_5",
        {
            **QWEN_DELTA,
            "head_dim": 16,
            "linear_num_key_heads": 4,
            "linear_conv_kernel_dim": 2,
            "linear_value_head_dim": 24,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    TinyModel(
        "qwen3.5-moe",
        "Qwen3_5Moe",
        {
            **QWEN_DELTA,
            "head_dim": 24,
            "num_hidden_layers": 4,
            "num_experts": 4,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 24,
        },
    ),
    TinyModel(
        "olmo-hybrid",
        "OlmoHybrid",
        {
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 12,
            "linear_num_key_heads": 2,
            "num_hidden_layers": 4,
        },
    ),
    TinyModel(
        "olmo-hybrid-unrotated",
        "OlmoHybrid",
        {
            "linear_allow_neg_eigval": False,
            "linear_key_head_dim": 24,
            "linear_conv_kernel_dim": 3,
            "num_key_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_hidden_layers": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
        },
    ),
    TinyModel(
        "kimi-linear",
        "KimiLinear",
        {
            **LATENT,
            "num_key_value_heads": 4,
            "linear_head_dim": 16,
            "linear_num_heads": 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 4,
            "layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        },
    ),
    TinyModel(
        "lfm2",
        "Lfm2",
        {
            "conv_bias": True,
            "block_multiple_of": 32,
            "block_ffn_dim_multiplier": 1.5,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "num_hidden_layers": 4,
        },
        sharded=True,
    ),
    TinyModel(
        "lfm2-tied",
        "Lfm2",
        {
            "block_auto_adjust_ff_dim": False,
            "conv_L_cache": 5,
            "layer_types": ["full_attention", "conv", "full_attention"],
            "num_hidden_layers": 3,
            "tie_word_embeddings": True,
        },
    ),
    TinyModel(
        "lfm2-moe",
        "Lfm2Moe",
        {
            "conv_bias": False,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_hidden_layers": 3,
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "routed_scaling_factor": 1.3,
        },
    ),
    TinyModel(
        "gemma2",
        "Gemma2",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 12,
            "sliding_window": 21,
            "num_hidden_layers": 3,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
        sharded=True,
    ),
    TinyModel(
        "gemma2-tied",
        "Gemma2",
        {
            "head_dim": 24,
            "sliding_window": 34,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": None,
        },
    ),
    TinyModel(
        "olmo3",
        "Olmo3",
        {
            "num_hidden_layers": 4,
            "sliding_window": 23,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
                "full_attention": dict(YARN_ROPE["rope_parameters"]),
            },
        },
    ),
    TinyModel(
        "gemma4",
        "Gemma4",
        {
            **GEMMA4,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8,
            "final_logit_softcapping": 4.0,
        },
        sharded=True,
    ),
    TinyModel(
        "gemma4-shared-products",
        "Gemma4",
        {
            **GEMMA4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "tie_word_embeddings": True,
            "attention_bias": True,
        },
    ),
    TinyModel(
        "gemma4-moe",
        "Gemma4",
        {
            **GEMMA4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 4,
            "moe_intermediate_size": 40,
        },
    ),
    TinyModel("seed-oss", "SeedOss", {"head_dim": 24, "num_hidden_layers": 3}, sharded=True),
    TinyModel(
        "seed-oss-biases",
        "SeedOss",
        {
            "head_dim": 16,
            "attention_bias": False,
            "attention_out_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    TinyModel(
        "exaone4",
        "Exaone4",
        {
            "num_hidden_layers": 4,
            "sliding_window": 23,
            **LLAMA3_ROPE,
        },
        sharded=True,
    ),
    TinyModel(
        "exaone4-small",
        "Exaone4",
        {
            "sliding_window": None,
            "layer_types": ["full_attention", "full_attention"],
            "tie_word_embeddings": True,
            "num_key_value_heads": 1,
        },
    ),
    TinyModel(
        "minimax-m2",
        "MiniMaxM2",
        {
            "head_dim": 24,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 3,
            **rope("default", partial_rotary_factor=0.5, theta=1000.0),
        },
        sharded=True,
    ),
    TinyModel(
        "minimax-m2-all",
        "MiniMaxM2",
        {
            "head_dim": 16,
            "num_key_value_heads": 1,
            "num_local_experts": 3,
            "num_experts_per_tok": 3,
            "rotary_dim": 8,
        },
    ),
    TinyModel(
        "llama4",
        "Llama4",
        {
            "head_dim": 24,
            "intermediate_size": 40,
            "intermediate_size_mlp": 72,
            "num_hidden_layers": 4,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 40,
            "floor_scale": 16,
            "attn_scale": 0.4,
            **LLAMA3_ROPE,
        },
        sharded=True,
    ),
    TinyModel(
        "llama4-all",
        "Llama4",
        {
            "head_dim": 16,
            "intermediate_size": 40,
            "intermediate_size_mlp": 72,
            "num_key_value_heads": 1,
            "num_local_experts": 2,
            "num_experts_per_tok": 2,
            "attention_chunk_size": 37,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "attention_bias": True,
            "no_rope_layers": [1, 0, 1],
            "num_hidden_layers": 3,
            **rope("default", theta=1000.0),
        },
    ),
    TinyModel("qwen1", "QWen", {"num_hidden_layers": 3}),
    TinyModel("baichuan-7b", "Baichuan", {"z_loss_weight": 0}),
    TinyModel(
        "baichuan-13b",
        "Baichuan",
        {
            "max_position_embeddings": None,
            "model_max_length": 256,
            "hidden_size": 48,
            "num_attention_heads": 6,
        },
    ),
    TinyModel("internlm", "InternLM"),
    TinyModel("internlm2", "InternLM2", {"num_hidden_layers": 3}),
    TinyModel("chatglm", "ChatGLM", {"num_layers": 3}),
)


def find_tiny_model(name: str) -> TinyModel:
    return next(model for model in TINY_MODELS if model.name == name)


def write_tiny_model(
    model: TinyModel, path: Path, *, dtype: torch.dtype = torch.float32, is_published: bool = True
) -> Path:
    """Write the model as a Hugging Face directory and return its path.

    `is_published`: with the names that authors give, where transformers' are others.
    """
    transformers_logging.disable_progress_bar()
    if model.family in ARCHITECTURES:
        write_own_code_model(model.family, model.config, path, dtype, model.seed)
        return path
    config_class = getattr(
        transformers, f"{model.family}TextConfig", getattr(transformers, f"{model.family}Config")
    )
    model_class = getattr(transformers, f"{model.family}ForCausalLM")
    config = config_class(**{**BASE_CONFIG, **model.config})
    reference = model_class(config)
    randomise(reference, torch.Generator().manual_seed(model.seed))
    shard_size = "60KB" if model.sharded else "1GB"
    reference.to(dtype).save_pretrained(path, max_shard_size=shard_size)
    if is_published and model.family in ("OlmoHybrid", "KimiLinear"):
        _as_published(path / "model.safetensors", config)
    if model.legacy_layout:
        _to_legacy_layout(path / "config.json")
    return path


def _as_published(file: Path, config: Any) -> None:
    """Give tensors of OLMo-Hybrid and Kimi-Linear the names that their authors' files have.

    transformers writes one name for norms of both kinds of layers, or for blocks and experts, and
    thirds of the convolution.
    """
    tensors = load_file(file)
    if config.model_type == "kimi_linear":
        keys = values = config.linear_num_heads * config.linear_head_dim
    else:
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim
    for name in [name for name in tensors if "q_conv1d" in name]:
        names = [name.replace("q_conv1d", f"{part}_conv1d") for part in "qkv"]
        whole = torch.cat([tensors[part] for part in names])
        parts = whole.split((keys, keys, values))
        tensors |= {part: own.clone() for part, own in zip(names, parts, strict=True)}
    of_block = re.compile(r"block_sparse_moe\.(gate|up|down)_proj")
    renamed = {
        of_block.sub(r"mlp.\1_proj", name)
        .replace("attention_layer_norm", "input_layernorm")
        .replace("feedforward_layer_norm", "post_attention_layernorm"): tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed, file, metadata={"format": "pt"})


def load_reference(path: Path, dtype: torch.dtype) -> Any:
    """Load transformers' model, with attention that has all that it adds to scores, or a formula.

    Older versions say that soft caps go with sdpa, which leaves them out, and take GPT-OSS's own
    numbers for its gate's, whatever the configuration says.
    """
    if (formula := own_code_reference(path)) is not None:
        return formula
    transformers_logging.disable_progress_bar()
    values = json.loads((path / "config.json").read_text())
    model_class = getattr(transformers, values["architectures"][0])
    has_soft_cap = values.get("attn_logit_softcapping") is not None
    attention = "sdpa" if model_class._supports_sdpa and not has_soft_cap else "eager"
    reference = model_class.from_pretrained(path, dtype=dtype, attn_implementation=attention)
    for module in reference.modules():
        if type(module).__name__ == "GptOssExperts":
            module.alpha = values.get("swiglu_alpha", module.alpha)
            module.limit = values.get("swiglu_limit", module.limit)
    return reference.eval()


@torch.no_grad()
def randomise(reference: Any, generator: torch.Generator) -> None:
    """Fill all parameters."""
    for name, parameter in reference.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        is_tied, family = reference.config.tie_word_embeddings, reference.config.model_type
        parameter.copy_(_of_family(family, name, _scaled(name, noise, tied=is_tied), tied=is_tied))
    for name, buffer in reference.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.copy_(1.0 + 0.2 * torch.randn(buffer.shape, generator=generator))
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
        if name.endswith(("std_bias", "std_scale")):
            buffer.copy_(1.0 + 0.2 * torch.randn(buffer.shape, generator=generator))
        if name.endswith(("put_min", "put_max")):  # so that one number of ten is clipped
            bound = 1.5 + 0.3 * torch.rand(buffer.shape, generator=generator)
            buffer.copy_(-bound if name.endswith("min") else bound)


def _of_family(family: str, name: str, scaled: Tensor, *, tied: bool) -> Tensor:
    """Change what a family adds to its norms, or multiplies by."""
    is_norm = name.endswith("norm.weight")
    if family.startswith("gemma") and "embed_tokens" in name and not tied:
        return scaled / math.sqrt(scaled.shape[1])
    if family.startswith("gemma4"):  # scores have no other scale
        return scaled / math.sqrt(len(scaled)) if name.endswith("q_norm.weight") else scaled
    if family.startswith("gemma"):
        return scaled - 1.0 if is_norm else scaled
    if family.startswith(("qwen3_5", "qwen3_next")):
        return scaled - 1.0 if is_norm and "linear_attn" not in name else scaled
    if family.startswith("lfm2"):
        return scaled
    if any(part in name for part in ("attention.dense", "attn.dense", "attn.out_proj")):
        return scaled * 4.0  # blocks side by side: what comes from other tokens must show
    return scaled


def _scaled(name: str, noise: Tensor, *, tied: bool) -> Tensor:
    if noise.ndim == 1 and name.endswith(("weight", "scale")):  # of a norm, or of experts
        return 1.0 + 0.2 * noise
    if name.endswith("sinks"):
        return 1.0 + noise
    if name.endswith("bias"):
        return 0.3 * noise
    if any(
        part in name for part in ("embed_tokens", "embed_in", "word_embeddings", "wte")
    ):  # a look-up has a fan-in of one, a tied head one of `hidden_size`
        return 0.25 * noise if tied else noise
    # Beside a small tied embedding the blocks write less, or their rounding would be all there is.
    damping = 0.5 if tied and ("o_proj" in name or "down_proj" in name) else 1.0
    return damping * noise / math.sqrt(noise.shape[-1])  # experts are stacked


def _to_legacy_layout(file: Path) -> None:
    config = json.loads(file.read_text())
    parameters = config.pop("rope_parameters")
    config["rope_theta"] = parameters.pop("rope_theta")
    config["rope_scaling"] = None if parameters == {"rope_type": "default"} else parameters
    if config["rope_scaling"] and parameters["rope_type"] in ("linear", "yarn"):
        parameters["type"] = parameters.pop("rope_type")
    config["torch_dtype"] = config.pop("dtype")
    file.write_text(json.dumps(config))
