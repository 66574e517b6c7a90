"""Random small models of every architecture that a GGUF file may be of, and files of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from lightserve.models.gguf_reader import numbers_of_blocks
from lightserve.models.weight_files import SINGLE_FILE
from support.gguf_files import KINDS, blocks, write_gguf
from support.tiny_models import (
    DEEPSEEK_YARN_ROPE,
    FALCON,
    GEMMA4,
    LATENT,
    LINEAR,
    PART_ROPE,
    QWEN_DELTA,
    TinyModel,
    rope,
    write_tiny_model,
)

MODELS = {
    "llama": TinyModel("", "Llama", {"num_hidden_layers": 3, "vocab_size": 201}),
    "qwen2": TinyModel("", "Qwen2", {"tie_word_embeddings": True}),
    "qwen3": TinyModel("", "Qwen3", {"head_dim": 32}),
}
GEMMA3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
}
OLMO3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    "full_attention": {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
PHI3_ROPE = rope(
    "longrope",
    partial_rotary_factor=0.75,
    short_factor=[1.0] * 6,
    long_factor=[1.0, 1.2, 1.5, 2.0, 3.0, 4.0],
    original_max_position_embeddings=4,
)
MISTRAL4_ROPE = rope(
    "yarn",
    theta=1000.0,
    factor=4.0,
    original_max_position_embeddings=200,  # so far queries do not grow, of which files say nothing
    mscale=1.0,
    mscale_all_dim=1.0,
    llama_4_scaling_beta=0.1,
)
GPT_OSS = TinyModel(
    "",
    "GptOss",
    {
        "head_dim": 32,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 3,
        "sliding_window": 22,
        **rope(
            "yarn",
            theta=1024.0,
            factor=4.0,
            original_max_position_embeddings=201,  # here llama.cpp's bounds, rounded, are the same
            truncate=False,
        ),
    },
)
BAICHUAN_13B = {
    "num_hidden_layers": 40,
    "max_position_embeddings": None,
    "model_max_length": 256,
}
EXPERTS = {
    **LATENT,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
"""Of DeepSeek, with its latents."""
DELTA = {**QWEN_DELTA, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
GRANITE_HYBRID = {
    "num_hidden_layers": 3,
    "layer_types": [LINEAR, "full_attention", LINEAR],
    "shared_intermediate_size": 96,
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.3,
    "logits_scaling": 2.0,
}
NEMOTRON_H = {
    "head_dim": 24,
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "n_groups": 2,
    "ssm_state_size": 16,
}
NEMOTRON_EXPERTS = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 64,
    "routed_scaling_factor": 1.5,
    "n_group": 3,
    "topk_group": 2,
}
GEMMA4_HEADS = {**GEMMA4, "head_dim": 32, "global_head_dim": 64, "tie_word_embeddings": True}
FALCON_H1 = {
    **FALCON,
    "num_hidden_layers": 3,
    "head_dim": 32,
    "mamba_d_ssm": 128,
    "mamba_d_state": 16,
    # Of powers of two rounded weights are the same numbers, with their factors or without.
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.5,
    "key_multiplier": 0.5,
    "attention_in_multiplier": 2.0,
    "attention_out_multiplier": 0.5,
    "ssm_in_multiplier": 0.5,
    "ssm_out_multiplier": 2.0,
    "ssm_multipliers": [1.0, 0.5, 4.0, 2.0, 0.25],
    "mlp_multipliers": [2.0, 0.5],
}
CONVERTED = {
    **MODELS,
    "mixtral": TinyModel("", "Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2moe": TinyModel(
        "",
        "Qwen2Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 56,
        },
    ),
    "qwen3moe": TinyModel(
        "",
        "Qwen3Moe",
        {
            "head_dim": 32,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "moe_intermediate_size": 48,
        },
    ),
    "qwen3next": TinyModel(
        "",
        "Qwen3Next",
        {
            **DELTA,
            "head_dim": 32,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
        },
    ),
    "qwen35": TinyModel(
        "",
        "Qwen3_5",
        {
            **DELTA,
            "head_dim": 32,
            "linear_num_value_heads": 6,
            "num_hidden_layers": 4,
        },
    ),
    "qwen35moe": TinyModel(
        "",
        "Qwen3_5Moe",
        {
            **DELTA,
            "head_dim": 32,
            "num_hidden_layers": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "llama4": TinyModel(
        "",
        "Llama4",
        {
            "head_dim": 32,
            "intermediate_size": 32,
            "intermediate_size_mlp": 96,
            "num_hidden_layers": 4,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
        },
    ),
    "mistral4": TinyModel(
        "",
        "Mistral4",
        {
            **EXPERTS,
            "q_lora_rank": 24,
            "n_group": 2,
            "topk_group": 1,
            "num_hidden_layers": 3,
            **MISTRAL4_ROPE,
        },
    ),
    "gemma": TinyModel("", "Gemma", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma2": TinyModel(
        "",
        "Gemma2",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 21,
            "num_hidden_layers": 3,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": TinyModel(
        "",
        "Gemma3",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 22,
            "num_hidden_layers": 7,
            "rope_parameters": GEMMA3_ROPE,
            "tie_word_embeddings": True,
        },
    ),
    "gemma4": TinyModel(
        "",
        "Gemma4",
        {
            **GEMMA4_HEADS,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 32,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma4-moe": TinyModel(
        "",
        "Gemma4",
        {
            **GEMMA4_HEADS,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
            "final_logit_softcapping": 3.0,
        },
    ),
    "phi3": TinyModel("", "Phi3", {"original_max_position_embeddings": 4, **PHI3_ROPE}),
    "granite": TinyModel(
        "",
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 4.0,
        },
    ),
    "granitehybrid": TinyModel("", "GraniteMoeHybrid", {**GRANITE_HYBRID, "num_local_experts": 0}),
    "granitehybrid-moe": TinyModel(
        "",
        "GraniteMoeHybrid",
        {
            **GRANITE_HYBRID,
            "mamba_n_groups": 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "position_embedding_type": "rope",
            "attention_bias": True,
        },
    ),
    "falcon-h1": TinyModel("", "FalconH1", FALCON_H1),
    "falcon-h1-normed": TinyModel(
        "", "FalconH1", {**FALCON_H1, "mamba_rms_norm": True, "mamba_norm_before_gate": False}
    ),
    "nemotron_h": TinyModel(
        "",
        "NemotronH",
        {
            **NEMOTRON_H,
            "layers_block_type": [LINEAR, "mlp", LINEAR, "full_attention", "mlp"],
            "mlp_bias": True,
        },
    ),
    "nemotron_h_moe": TinyModel(
        "",
        "NemotronH",
        {
            **NEMOTRON_H,
            **NEMOTRON_EXPERTS,
            "layers_block_type": [LINEAR, "moe", "full_attention", "moe", LINEAR],
            "moe_latent_size": 32,
        },
    ),
    "lfm2": TinyModel(
        "",
        "Lfm2",
        {
            "block_multiple_of": 32,
            "block_ffn_dim_multiplier": 1.5,
            "conv_bias": False,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "num_hidden_layers": 4,
            "tie_word_embeddings": True,
        },
    ),
    "lfm2moe": TinyModel(
        "",
        "Lfm2Moe",
        {
            "conv_bias": False,
            "conv_L_cache": 4,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_hidden_layers": 3,
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "seed_oss": TinyModel("", "SeedOss", {"head_dim": 32, "num_hidden_layers": 3}),
    "exaone4": TinyModel("", "Exaone4", {"num_hidden_layers": 5, "sliding_window": 23}),
    "minimax-m2": TinyModel(
        "",
        "MiniMaxM2",
        {
            "head_dim": 32,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            **rope("default", partial_rotary_factor=0.5, theta=1000.0),
        },
    ),
    "olmo2": TinyModel("", "Olmo2", {"num_hidden_layers": 3}),
    "olmo3": TinyModel(
        "", "Olmo3", {"num_hidden_layers": 5, "sliding_window": 23, "rope_parameters": OLMO3_ROPE}
    ),
    "gpt-oss": GPT_OSS,
    "gpt-oss-mxfp4": GPT_OSS,
    "deepseek2": TinyModel(
        "",
        "DeepseekV2",
        {
            **EXPERTS,
            "q_lora_rank": 24,
            "num_experts_per_tok": 2,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.5,
            "num_hidden_layers": 3,
            **DEEPSEEK_YARN_ROPE,
        },
    ),
    "deepseek2-lite": TinyModel(
        "", "DeepseekV2", {**EXPERTS, "q_lora_rank": None, "num_hidden_layers": 26}
    ),
    "deepseek3": TinyModel(
        "",
        "DeepseekV3",
        {**EXPERTS, "q_lora_rank": 20, "n_group": 2, "topk_group": 1, "n_shared_experts": 1},
    ),
    "kimi-linear": TinyModel(
        "",
        "KimiLinear",
        {
            **LATENT,
            "qk_nope_head_dim": 32,
            "v_head_dim": 24,
            "num_key_value_heads": 4,
            "linear_head_dim": 32,
            "linear_num_heads": 4,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 4,
            "layer_types": [LINEAR, LINEAR, "full_attention", LINEAR],
        },
    ),
    "glm4": TinyModel("", "Glm4", {"head_dim": 16, "num_hidden_layers": 3}),
    "chatglm": TinyModel("", "ChatGLM", {"num_layers": 3}),
    "internlm2": TinyModel("", "InternLM2"),
    "baichuan": TinyModel("", "Baichuan", {"num_hidden_layers": 32}),
    "baichuan-13b": TinyModel("", "Baichuan", BAICHUAN_13B),
    "falcon": TinyModel("", "Falcon", {"new_decoder_architecture": False}),
    "falcon-40b": TinyModel("", "Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "olmoe": TinyModel(
        "", "Olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "num_key_value_heads": 4}
    ),
    "gptneox": TinyModel("", "GPTNeoX", {"num_hidden_layers": 3, **PART_ROPE}),
    "phi2": TinyModel("", "Phi", {"num_key_value_heads": 4, **PART_ROPE}),
    "bloom": TinyModel("", "Bloom", {"tie_word_embeddings": True}),
    "mpt": TinyModel("", "Mpt", {"max_seq_len": 256, "tie_word_embeddings": True}),
    "starcoder": TinyModel("", "GPTBigCode", {"n_inner": 80}),
    "smollm3": TinyModel("", "SmolLM3", {"num_hidden_layers": 5}),
    "starcoder2": TinyModel("", "Starcoder2", {"sliding_window": None}),
}
"""By what `general.architecture` says, but for those in `SAYS`."""
SAYS = {
    "mixtral": "llama",
    "gemma4-moe": "gemma4",
    "falcon-h1-normed": "falcon-h1",
    "granitehybrid-moe": "granitehybrid",
    "olmo3": "olmo2",
    "gpt-oss-mxfp4": "gpt-oss",
    "deepseek2-lite": "deepseek2",
    "deepseek3": "deepseek2",
    "baichuan-13b": "baichuan",
    "falcon-40b": "falcon",
}


def converted(name: str, tmp_path: Path, kind: str = "F32") -> tuple[Path, Path]:
    """Write a model and a file of it; return both."""
    plain = write_tiny_model(CONVERTED[name], tmp_path / "plain")
    experts_kind = None
    if name == "gpt-oss-mxfp4":
        experts_kind = "MXFP4"
        round_experts(plain / SINGLE_FILE)
    file = tmp_path / "model.gguf"
    said = SAYS.get(name, name)
    return plain, write_gguf(plain, file, name=said, kind=kind, experts_kind=experts_kind)


def round_experts(file: Path) -> None:
    """Make the numbers of gpt-oss's experts those that MXFP4 has."""
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            outputs = np.ascontiguousarray(tensor.mT.numpy())
            packed = np.frombuffer(blocks(outputs, "MXFP4"), np.uint8)
            rows = packed.reshape(outputs.shape[0] * outputs.shape[1], -1)
            numbers = numbers_of_blocks(rows, KINDS["MXFP4"]).reshape(outputs.shape)
            tensors[name] = torch.from_numpy(numbers).mT.contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
