"""GGUF files made from model directories, or of whatever is asked for, also what is wrong."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file
from torch import Tensor

from lightserve.models.config import ModelConfig, load_model_config
from lightserve.models.gguf import BLOCK_TYPES, GgufFile
from lightserve.models.gguf_config import DEEPSEEK3, FALCON2, FAMILIES, MIXTRAL, OLMO3, GgufFamily
from lightserve.models.latent_config import LatentConfig
from lightserve.models.moe_config import FP4_HALVES
from lightserve.models.plain_config import NormWeights
from lightserve.models.recurrent_config import DeltaConfig, MambaConfig
from lightserve.models.recurrent_families import LINEAR_ATTENTION as LINEAR
from lightserve.models.rope import SLIDING
from lightserve.models.weight_files import SINGLE_FILE

KINDS = {block.name: kind for kind, block in BLOCK_TYPES.items()}
_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
_UNROTATED = ("attn_q", "attn_k")


@dataclass(frozen=True)
class Typed:
    """A value whose type in the file is not that of its kind by default."""

    kind: int
    data: bytes


def string(text: str | bytes) -> bytes:
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def value(item: Any) -> bytes:
    """Return type and value."""
    match item:
        case Typed(kind, data):
            return struct.pack("<I", kind) + data
        case bool():
            return struct.pack("<I?", 7, item)
        case int():
            return struct.pack("<II", 4, item)
        case float():
            return struct.pack("<If", 6, item)
        case str():
            return struct.pack("<I", 8) + string(item)
        case [str(), *_]:
            body = b"".join(string(text) for text in item)
            return struct.pack("<IIQ", 9, 8, len(item)) + body
        case [float(), *_]:
            return struct.pack(f"<IIQ{len(item)}f", 9, 6, len(item), *item)
        case np.ndarray():  # as a file's metadata are read
            return value([int(number) for number in item])
        case list():
            return struct.pack(f"<IIQ{len(item)}i", 9, 5, len(item), *item)
    raise TypeError(item)


def gguf_bytes(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[tuple[int, ...], int, bytes]],
    *,
    version: int = 3,
) -> bytes:
    """Return a file; tensors by name: shape (rows first), type, data."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, item in metadata.items():
        head += string(key) + value(item)
    body = b""
    for name, (shape, kind, data) in tensors.items():
        head += string(name) + struct.pack("<I", len(shape))
        head += struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += struct.pack("<IQ", kind, len(body))
        body += data + b"\0" * (-len(data) % 32)
    return head + b"\0" * (-len(head) % 32) + body


def blocks(numbers: np.ndarray, name: str) -> bytes:
    """Return numbers [R, N] in a type that is simple to write."""
    wide = numbers.astype("<f4")
    match name:
        case "F32":
            return wide.tobytes()
        case "F16":
            return wide.astype("<f2").tobytes()
        case "BF16":
            return (wide.view("<u4") >> 16).astype("<u2").tobytes()
    groups = wide.reshape(-1, 32)
    if name == "MXFP4":
        return fp4_blocks(groups)
    if name == "Q8_0":
        factors = (np.abs(groups).max(axis=1, keepdims=True) / 127).astype("<f2")
        integers = np.round(groups / np.maximum(factors.astype("<f4"), 1e-20)).clip(-127, 127)
        packed = integers.astype("<i1").view(np.uint8)
    else:
        most = {"Q4_0": 8, "Q5_0": 16, "IQ4_NL": 127}[name]
        largest = np.take_along_axis(groups, np.abs(groups).argmax(axis=1)[:, None], axis=1)
        factors = (largest / -most).astype("<f2")
        wanted = groups / np.where(factors == 0, 1, factors).astype("<f4")
        if name == "IQ4_NL":
            integers = np.abs(wanted[:, :, None] - _IQ4).argmin(axis=2).astype(np.uint8)
        else:
            integers = np.round(wanted + most).clip(0, 2 * most - 1).astype(np.uint8)
        packed = integers[:, :16] & 15 | (integers[:, 16:] << 4)
        if name == "Q5_0":
            fifth = np.packbits(integers >> 4, axis=1, bitorder="little")
            packed = np.concatenate([fifth, packed], axis=1)
    return np.concatenate([factors.view(np.uint8).reshape(-1, 2), packed], axis=1).tobytes()


def fp4_blocks(groups: np.ndarray) -> bytes:
    """Return blocks of numbers [B, 32], the largest of which is made 4 or 6."""
    exponents = np.floor(np.log2(np.abs(groups).max(axis=1, keepdims=True) + 1e-30)) - 2
    sizes = np.abs(groups) / np.exp2(exponents)
    known = np.array(FP4_HALVES[:8]) / 2
    codes = np.abs(sizes[:, :, None] - known).argmin(axis=2) | np.where(groups < 0, 8, 0)
    packed = codes[:, :16] | codes[:, 16:] << 4
    return np.concatenate([exponents + 127, packed], axis=1).astype(np.uint8).tobytes()


def neighbours(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Return rows of heads as llama.cpp's converter stores a Llama's: pairs are neighbours."""
    heads = weight.reshape(-1, 2, head_dim // 2, *weight.shape[1:])
    return heads.swapaxes(1, 2).reshape(weight.shape)


KEYS = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "use_parallel_residual": "use_parallel_residual",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
    "logit_scale": "logits_scaling",
}
"""What a file calls the keys of config.json."""
_WITHOUT_WINDOW = ("llama", "qwen2", "qwen3", "qwen2moe", "qwen3moe", "starcoder2", "smollm3")


def sizes_of(sizes: ModelConfig, name: str) -> dict[str, Any]:
    """Return what all files of architecture `name` have."""
    norm = "layer_norm_epsilon" if sizes.layer_norm_bias is not None else "layer_norm_rms_epsilon"
    return {
        "general.architecture": name,
        f"{name}.block_count": sizes.num_layers,
        f"{name}.context_length": sizes.max_position_embeddings,
        f"{name}.embedding_length": sizes.hidden_size,
        f"{name}.feed_forward_length": sizes.intermediate_size,
        f"{name}.attention.head_count": sizes.num_heads,
        f"{name}.attention.head_count_kv": sizes.num_kv_heads,
        f"{name}.attention.key_length": sizes.head_dim,
        f"{name}.attention.value_length": sizes.head_dim,
        f"{name}.attention.{norm}": sizes.rms_norm_eps,
    }


def own_metadata(config: Mapping[str, Any], sizes: ModelConfig, name: str) -> dict[str, Any]:
    """Return what architecture `name` alone has."""
    match name:
        case "mpt":
            return {"mpt.attention.max_alibi_bias": 8.0}
        case "gpt-oss":
            return {"gpt-oss.expert_feed_forward_length": config["intermediate_size"]}
        case "minimax-m2":
            size = config["intermediate_size"]
            return {
                "minimax-m2.expert_feed_forward_length": size,
                "minimax-m2.expert_gating_func": 2,
            }
        case "deepseek2" | "mistral4":
            return latent_metadata(config, name)
        case "qwen3next" | "qwen35" | "qwen35moe":
            return delta_metadata(config, name)
        case "kimi-linear":
            return kimi_metadata(config, sizes)
        case "gemma4":
            return gemma4_metadata(config, sizes)
        case "granitehybrid" | "nemotron_h" | "nemotron_h_moe" | "falcon-h1":
            return mamba_metadata(config, sizes, name)
        case "lfm2" | "lfm2moe":
            found = {"lfm2moe.expert_gating_func": 2} if name == "lfm2moe" else {}
            dense = config.get("num_dense_layers", 0)
            return found | {
                f"{name}.attention.head_count_kv": heads_of_layers(sizes),
                f"{name}.shortconv.l_cache": config["conv_L_cache"],
                f"{name}.leading_dense_block_count": dense,
                f"{name}.vocab_size": config["vocab_size"],
            }
        case "llama4":
            return {
                "llama4.expert_feed_forward_length": config["intermediate_size"],
                "llama4.interleave_moe_layer_step": config["interleave_moe_layer_step"],
            }
    return {}


def gemma4_metadata(config: Mapping[str, Any], sizes: ModelConfig) -> dict[str, Any]:
    """Return what files of Gemma 4 have."""
    layers, own = [sizes.shape_of(n) for n in range(sizes.num_layers)], sizes.gemma4
    assert own is not None
    found: dict[str, Any] = {
        "attention.sliding_window_pattern": flags(window for window in sizes.sliding_windows),
        "attention.shared_kv_layers": own.num_sharing,
        "attention.head_count_kv": [layer.num_kv_heads for layer in layers],
        "feed_forward_length": [layer.inner_size for layer in layers],
        "embedding_length_per_layer_input": own.input_size,
        "rope.dimension_count_swa": sizes.head_dim,
    }
    for kind in ("key", "value"):
        found[f"attention.{kind}_length"] = own.global_head_dim
        found[f"attention.{kind}_length_swa"] = sizes.head_dim
    if config["enable_moe_block"]:
        found["expert_used_count"] = config["top_k_experts"]
    return {f"gemma4.{key}": item for key, item in found.items()}


def kimi_metadata(config: Mapping[str, Any], sizes: ModelConfig) -> dict[str, Any]:
    """Return what files of Kimi-Linear have."""
    latent, delta, moe = sizes.latent, sizes.recurrent, sizes.moe
    assert latent is not None and isinstance(delta, DeltaConfig) and moe is not None
    assert delta.num_key_heads == sizes.num_heads, "llama.cpp knows one number"
    found: dict[str, Any] = {
        "attention.head_count_kv": heads_of_layers(sizes),
        "attention.key_length": latent.rank + latent.rope_dim,
        "attention.value_length": latent.rank,
        "attention.key_length_mla": latent.query_dim,
        "attention.value_length_mla": latent.value_dim,
        "attention.kv_lora_rank": latent.rank,
        "rope.dimension_count": latent.rope_dim,
        "ssm.conv_kernel": delta.width,
        "kda.head_dim": delta.key_dim,
        "leading_dense_block_count": min(moe.layers),
        "expert_shared_count": (moe.shared_size or 0) // moe.intermediate_size,
        "expert_count": moe.num_experts,
        "expert_used_count": moe.num_chosen,
        "expert_weights_scale": moe.scale,
        "expert_gating_func": 2,
        "vocab_size": sizes.vocab_size,
    }
    if latent.query_rank is not None:
        found["attention.q_lora_rank"] = latent.query_rank
    return {f"kimi-linear.{key}": item for key, item in found.items()}


def flags(items: Iterable[object]) -> Typed:
    """Return an array of whether items are true."""
    data = bytes(map(bool, items))
    return Typed(9, struct.pack("<IQ", 7, len(data)) + data)


def delta_metadata(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return what files of models with the delta rule have."""
    num_heads, kinds = config["linear_num_value_heads"], config["layer_types"]
    found: dict[str, Any] = {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": num_heads,
        "ssm.inner_size": num_heads * config["linear_value_head_dim"],
        "rope.dimension_sections": [2, 1, 1, 0],  # of pairs, which llama.cpp asks for
        "attention.recurrent_layers": flags(kind == LINEAR for kind in kinds),
    }
    return {f"{name}.{key}": item for key, item in found.items()}


def heads_of_layers(sizes: ModelConfig) -> list[int]:
    """Return the heads of keys of each layer."""
    layers = map(sizes.shape_of, range(sizes.num_layers))
    return [layer.num_kv_heads if layer.has_attention else 0 for layer in layers]


def mamba_metadata(config: Mapping[str, Any], sizes: ModelConfig, name: str) -> dict[str, Any]:
    """Return what files of Granite 4, Falcon-H1 and Nemotron-H have."""
    own, moe, inner = sizes.recurrent, sizes.moe, sizes.intermediate_size
    assert isinstance(own, MambaConfig)
    found: dict[str, Any] = {
        "ssm.conv_kernel": own.width,
        "ssm.state_size": own.state_size,
        "ssm.group_count": own.num_groups,
        "ssm.time_step_rank": own.num_heads,
        "ssm.inner_size": own.inner,
        "attention.head_count_kv": heads_of_layers(sizes),
        "rope.scaling.finetuned": not sizes.unrotated_layers,
        "feed_forward_length": config["intermediate_size"] if moe is not None else inner,
    }
    if moe is not None:
        found["expert_shared_feed_forward_length"] = moe.shared_size
    if name.startswith("nemotron_h"):
        size = inner if moe is None else moe.intermediate_size
        layers = range(sizes.num_layers)
        found |= {
            "feed_forward_length": [size * (n in sizes.feed_forward_layers) for n in layers],
            "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
            "rope.dimension_count": sizes.hidden_size // sizes.num_heads,  # which says nothing
        }
    if name == "nemotron_h_moe":
        assert moe is not None
        found |= {
            "expert_group_count": moe.num_groups,
            "expert_group_used_count": moe.num_chosen_groups,
            "expert_shared_count": 1,
            "expert_weights_norm": moe.normalises,
            "expert_weights_scale": moe.scale,
            "moe_latent_size": moe.latent_size or 0,
        }
    return {f"{name}.{key}": item for key, item in found.items()}


def latent_metadata(
    config: Mapping[str, Any], name: str = "deepseek2", *, is_old: bool = False
) -> dict[str, Any]:
    """Return what DeepSeek's files have; old ones have kv_b whole, and the sizes of heads alone."""
    is_v3, rope = "V3" in config["architectures"][0], config["rope_parameters"]
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    head_dim, value_dim = config["qk_nope_head_dim"] + rotated, config["v_head_dim"]
    found: dict[str, Any] = {
        "attention.head_count_kv": config["num_attention_heads"] if is_old else 1,
        "attention.kv_lora_rank": rank,
        "attention.key_length": head_dim if is_old else rank + rotated,
        "attention.value_length": value_dim if is_old else rank,
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_gating_func": 2 if is_v3 else 1,
        "expert_weights_norm": is_v3 or name == "mistral4",
        "vocab_size": config["vocab_size"],
    }
    if not is_old:
        found |= {"attention.key_length_mla": head_dim, "attention.value_length_mla": value_dim}
    if config["q_lora_rank"] is not None:
        found["attention.q_lora_rank"] = config["q_lora_rank"]
    if is_v3 or name == "mistral4":
        found["expert_group_count"] = config["n_group"]
        found["expert_group_used_count"] = config["topk_group"]
    if "mscale_all_dim" in rope:
        found["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"] / 10
    return {f"{name}.{key}": item for key, item in found.items()}


def metadata_of(config: Mapping[str, Any], sizes: ModelConfig, name: str) -> dict[str, Any]:
    """Return a model's sizes as a file of architecture `name` has them."""
    found = sizes_of(sizes, name) | own_metadata(config, sizes, name)
    for key, theirs in KEYS.items():
        if config.get(theirs) is not None and (sizes.moe is not None or "expert" not in key):
            found[f"{name}.{key}"] = config[theirs]
    if name in _WITHOUT_WINDOW:
        found.pop(f"{name}.attention.sliding_window", None)
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if key in config and sizes.moe is not None:
            found[f"{name}.expert_count"] = config[key]
    if "layer_types" in config and name == "olmo2":
        pattern = flags(kind == SLIDING for kind in config["layer_types"])
        found["olmo2.attention.sliding_window_pattern"] = pattern
    rope = config.get("rope_parameters") or config
    if "full_attention" in rope:
        found[f"{name}.rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    if len(sizes.unrotated_layers) == sizes.num_layers:
        return found
    found[f"{name}.rope.freq_base"] = float(rope.get("rope_theta", getattr(sizes.rope, "theta", 0)))
    if (kind := rope.get("rope_type")) in ("linear", "yarn"):
        found[f"{name}.rope.scaling.type"] = kind
        found[f"{name}.rope.scaling.factor"] = float(rope["factor"])
    if kind == "yarn":
        original = rope["original_max_position_embeddings"]
        found[f"{name}.rope.scaling.original_context_length"] = original
    found[f"{name}.rope.dimension_count"] = sizes.shape_of(sizes.num_layers - 1).rotary_dim
    if rope.get("rope_type") == "longrope":
        original = rope["original_max_position_embeddings"]
        found[f"{name}.rope.scaling.original_context_length"] = original
        growth = config["max_position_embeddings"] / original
        factor = math.sqrt(1 + math.log(growth) / math.log(original))
        found[f"{name}.rope.scaling.attn_factor"] = rope.get("attention_factor") or factor
    return found


def apart(weight: np.ndarray, head_dim: int, group: int) -> np.ndarray:
    """Return rows of merged heads, group by group, as all queries, then keys, then values."""
    groups = weight.reshape(-1, group + 2, head_dim, *weight.shape[1:])
    parts = (groups[:, :group], groups[:, group], groups[:, group + 1])
    return np.concatenate([part.reshape(-1, *weight.shape[1:]) for part in parts])


def tokens_of(model_dir: Path) -> dict[str, Any]:
    """Return the metadata of a byte-level tokenizer.json."""
    described = json.loads((model_dir / "tokenizer.json").read_text())
    added = {token["id"]: token["content"] for token in described["added_tokens"]}
    names = {number: piece for piece, number in described["model"]["vocab"].items()} | added
    merges = [m if isinstance(m, str) else " ".join(m) for m in described["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [names[number] for number in range(len(names))],
        "tokenizer.ggml.token_type": [3 if number in added else 1 for number in range(len(names))],
        "tokenizer.ggml.merges": merges,
    }


def tiny_tokens(num_tokens: int) -> dict[str, Any]:
    """Return the metadata of a tokeniser that knows that many letters."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [chr(0x100 + number) for number in range(num_tokens)],
        "tokenizer.ggml.token_type": [1] * num_tokens,
        "tokenizer.ggml.merges": Typed(9, struct.pack("<IQ", 8, 0)),
    }


def tensors_of(gguf: GgufFile) -> dict[str, tuple[tuple[int, ...], int, bytes]]:
    """Return a file's tensors, as `gguf_bytes` takes them."""
    found = {}
    for name, tensor in gguf.tensors.items():
        num_bytes = math.prod(tensor.shape[:-1]) * tensor.row_bytes
        data = gguf.data[tensor.start : tensor.start + num_bytes]
        found[name] = (tensor.shape, tensor.kind, data)
    return found


def split_heads(stored: str, weight: np.ndarray, sizes: ModelConfig) -> dict[str, np.ndarray]:
    """Return queries, keys and values of a merged weight, as a Llama's are stored, by name."""
    size, head_dim = sizes.num_heads * sizes.head_dim, sizes.head_dim
    q, k, v = np.split(weight, [size, (len(weight) + size) // 2])
    parts = {"q": neighbours(q, head_dim), "k": neighbours(k, head_dim), "v": v}
    layer = stored.split(".")[2]
    return {f"blk.{layer}.attn_{own}.weight": part for own, part in parts.items()}


def split_latents(stored: str, weight: np.ndarray, latent: LatentConfig) -> dict[str, np.ndarray]:
    """Return what makes keys [H, rank, plain_dim] and values [H, value_dim, rank], by name."""
    heads = weight.reshape(-1, latent.plain_dim + latent.value_dim, latent.rank)
    keys, values = np.split(heads, [latent.plain_dim], axis=1)
    names = [stored.replace("attn_kv_b", own) for own in ("attn_k_b", "attn_v_b")]
    return {names[0]: np.ascontiguousarray(keys.swapaxes(1, 2)), names[1]: values}


def told_apart(name: str, weight: np.ndarray) -> dict[str, np.ndarray]:
    """Return gates, ups and downs of gpt-oss's stacked experts, outputs before inputs."""
    layer, _, product = name.removeprefix("model.layers.").partition(".mlp.experts.")
    product, is_bias = product.removesuffix("_bias"), product.endswith("_bias")
    kind, outputs = ("bias", weight) if is_bias else ("weight", weight.swapaxes(1, 2))
    parts = {"down": outputs}
    if product == "gate_up_proj":
        parts = {"gate": outputs[:, ::2], "up": outputs[:, 1::2]}
    return {f"blk.{layer}.ffn_{part}_exps.{kind}": own for part, own in parts.items()}


def stacked(name: str, weight: np.ndarray, *, has_inputs_first: bool) -> dict[str, np.ndarray]:
    """Return experts of Llama 4, gates and ups apart, or of others, which stay together."""
    layer, _, product = name.removeprefix("model.layers.").partition(".experts.")
    prefix = f"blk.{layer.partition('.')[0]}.ffn_"
    outputs = weight.swapaxes(1, 2) if has_inputs_first else weight
    if product == "down_proj":
        return {f"{prefix}down_exps.weight": outputs}
    if not has_inputs_first:
        return {f"{prefix}gate_up_exps.weight": outputs}
    gates, ups = np.split(outputs, 2, axis=1)
    return {f"{prefix}gate_exps.weight": gates, f"{prefix}up_exps.weight": ups}


def tiled(weight: np.ndarray, delta: DeltaConfig, dim: int, axis: int = 0) -> np.ndarray:
    """Return value heads of `dim` numbers, those of a key head no longer side by side."""
    shape = (delta.num_key_heads, delta.num_value_heads // delta.num_key_heads, dim)
    split = weight.reshape(*weight.shape[:axis], *shape, *weight.shape[axis + 1 :])
    return split.swapaxes(axis, axis + 1).reshape(weight.shape)


def of_delta(
    stored: str, weight: np.ndarray, delta: DeltaConfig, family: GgufFamily
) -> dict[str, np.ndarray]:
    """Return tensors of the delta rule as llama.cpp's converter stores them."""
    tensor = stored.split(".")[2]
    if tensor == "ssm_a":
        weight = -np.exp(weight)
    if tensor == "ssm_conv1d":
        weight = weight[:, 0]
    if "in_proj_qkvz" in stored:
        sizes = (delta.key_dim, delta.key_dim, delta.value_size // delta.num_key_heads)
        groups = weight.reshape(delta.num_key_heads, -1, weight.shape[1])
        parts = np.split(groups, np.cumsum(sizes), axis=1)
        q, k, v, z = (part.reshape(-1, weight.shape[1]) for part in parts)
        prefix = ".".join(stored.split(".")[:2])
        qkv = np.concatenate([q, k, v])
        return {f"{prefix}.attn_qkv.weight": qkv, f"{prefix}.attn_gate.weight": z}
    if family.architecture == "Qwen3NextForCausalLM":
        return {stored: weight}
    first = 2 * delta.key_size
    match tensor:
        case "attn_qkv" | "ssm_conv1d":
            own = tiled(weight[first:], delta, delta.value_dim)
            weight = np.concatenate([weight[:first], own])
        case "attn_gate":
            weight = tiled(weight, delta, delta.value_dim)
        case "ssm_alpha" | "ssm_beta" | "ssm_dt" | "ssm_a":
            weight = tiled(weight, delta, 1)
        case "ssm_out":
            weight = tiled(weight, delta, delta.value_dim, axis=1)
    return {stored: weight}


def of_mamba(stored: str, weight: np.ndarray, num_groups: int) -> np.ndarray:
    """Return a tensor of Mamba-2 as llama.cpp's converter stores it."""
    match stored.split(".")[2:]:
        case ["ssm_a"]:
            return -np.exp(weight)[:, None]
        case ["ssm_d"]:
            return weight[:, None]
        case ["ssm_norm", "weight"]:
            return weight.reshape(num_groups, -1)
        case ["ssm_conv1d", "weight"]:
            return weight[:, 0]
    return weight


def of_falcon_h1(stored: str, weight: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """Return a tensor of Falcon-H1 with the factors of its part, in place of config.json."""
    inputs = config["attention_in_multiplier"]
    gate, down = config["mlp_multipliers"]
    part = stored.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    if part == "ssm_in":
        size, group = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        sizes = (size, size, group, group, config["mamba_n_heads"])
        factors = np.repeat(np.array(config["ssm_multipliers"]), sizes)
        return weight * factors[:, None] * config["ssm_in_multiplier"]
    factors = {
        "ffn_gate": gate,
        "ffn_down": down,
        "attn_q": inputs,
        "attn_k": inputs * config["key_multiplier"],
        "attn_v": inputs,
        "attn_output": config["attention_out_multiplier"],
        "ssm_out": config["ssm_out_multiplier"],
        "output": config["lm_head_multiplier"],
        "token_embd": config["embedding_multiplier"],
    }
    return weight * factors.get(part, 1.0)


GRANITE_BLOCKS = {
    "block_sparse_moe.input_linear": ("ffn_gate_exps", "ffn_up_exps"),
    "block_sparse_moe.output_linear": ("ffn_down_exps",),
    "block_sparse_moe.router.layer": ("ffn_gate_inp",),
    "shared_mlp.input_linear": ("ffn_gate", "ffn_up"),
    "shared_mlp.output_linear": ("ffn_down",),
}
"""Tensors of Granite 4's blocks by the parts of those that transformers has."""


def of_granite(ours: str, weight: np.ndarray, *, has_experts: bool) -> dict[str, np.ndarray]:
    """Return gates, ups and downs of Granite 4, of experts and of the block beside them."""
    _, _, layer, block = ours.removesuffix(".weight").split(".", 3)
    names = GRANITE_BLOCKS[block]
    ending = "_shexp" if has_experts and block.startswith("shared") else ""
    parts = np.split(weight, len(names), axis=-2)
    return {
        f"blk.{layer}.{name}{ending}.weight": part for name, part in zip(names, parts, strict=True)
    }


def of_nemotron(theirs: str) -> str:
    """Return our name of a tensor: all blocks of Nemotron-H have one name in the files."""
    name, block, part = theirs.replace("backbone.", "model.").partition("mixer.")
    if not block:
        renamed = name.replace("embeddings.", "embed_tokens.").replace("norm_f.", "norm.")
        return renamed.replace(".norm.", ".input_layernorm.") if ".layers." in name else renamed
    first, module = part.split(".")[0], "mlp"
    if first in ("q_proj", "k_proj", "v_proj", "o_proj"):
        module = "self_attn"
    if first in ("in_proj", "conv1d", "dt_bias", "A_log", "D", "norm", "out_proj"):
        module = "mamba"
    return f"{name}{module}.{part}"


def of_experts(
    ours: str,
    weight: np.ndarray,
    family: GgufFamily,
    name: str,
    experts: dict[str, dict[int, np.ndarray]],
) -> dict[str, np.ndarray]:
    """Return stacked experts; one alone, as transformers saves most, goes to the others' stack."""
    if name == "gpt-oss":
        return told_apart(ours, weight)
    if name in ("llama4", "mistral4", "gemma4"):
        return stacked(ours, weight, has_inputs_first=name == "llama4")
    module, _, rest = ours.partition(".experts.")
    number, _, product = rest.removesuffix(".weight").partition(".")
    part = ("gate", "up", "down")[family.experts.index(product)]
    layer = module.removeprefix("model.layers.").partition(".")[0]
    experts.setdefault(f"blk.{layer}.ffn_{part}_exps.weight", {})[int(number)] = weight
    return {}


def alone(stored: str, weight: np.ndarray, sizes: ModelConfig) -> np.ndarray:
    """Return a tensor in the shape that a file has for it, where that is another."""
    if "ffn_gate_inp_shexp" in stored:
        return weight[0]
    if isinstance(sizes.recurrent, DeltaConfig) and sizes.recurrent.rank:
        is_convolution = "ssm_conv1d" in stored
        weight = weight.swapaxes(0, 1)[:, :, None] if is_convolution else weight
        return -np.exp(weight) if stored.endswith("ssm_a") else weight
    if stored.endswith("shortconv.conv.weight"):
        return weight[:, 0]
    if isinstance(sizes.recurrent, MambaConfig):
        return of_mamba(stored, weight, sizes.recurrent.num_groups)
    return weight


def names_of_layer(name: str, sizes: ModelConfig) -> Iterable[tuple[str, ...]]:
    """Return `stored_names` that are of a tensor's layer: both of Kimi-Linear's say self_attn."""
    if sizes.latent is None or sizes.recurrent is None:
        return sizes.stored_names
    layer = name.removeprefix("model.layers.").partition(".")[0]
    has_states = layer.isdigit() and int(layer) in sizes.recurrent.layers
    return (pair for pair in sizes.stored_names if has_states or "linear_attn" not in pair[0])


def replaced(name: str, parts: Iterable[tuple[str, ...]]) -> str:
    """Return a name with the first of each pair in place of the second, from the last pair on."""
    for new, *old in reversed(list(parts)):
        name = name.replace(old[0], new)
    return name


def renamed(
    loaded: Mapping[str, Tensor], sizes: ModelConfig, family: GgufFamily, name: str
) -> dict[str, np.ndarray]:
    """Return a directory's tensors by the names and shapes of a file of architecture `name`."""
    head_dim, group = sizes.head_dim, sizes.num_heads // sizes.num_kv_heads
    tensors: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    is_nemotron = name.startswith("nemotron_h")
    for theirs, tensor in loaded.items():
        ours, weight = of_nemotron(theirs) if is_nemotron else theirs, tensor.float().numpy()
        if ".experts." in ours:
            tensors |= of_experts(ours, weight, family, name, experts)
            continue
        if name == "granitehybrid" and any(block in ours for block in GRANITE_BLOCKS):
            tensors |= of_granite(ours, weight, has_experts=sizes.moe is not None)
            continue
        stored = ours if is_nemotron else replaced(ours, names_of_layer(ours, sizes))
        if "grouped_qkv" in sizes.merged and "qkv_proj" in stored:
            weight = apart(weight, head_dim, group)
        if name in ("internlm2", "baichuan") and "qkv_proj" in stored:
            tensors |= split_heads(stored, weight, sizes)
            continue
        for part, own in family.stored_names:
            stored = stored.replace(part, own)
        if (family.has_neighbours or is_nemotron) and stored.split(".")[-2] in _UNROTATED:
            weight = neighbours(weight, head_dim)
        if sizes.norm_weights is NormWeights.ABOVE_ONE and stored.endswith("norm.weight"):
            weight = weight + ("ssm_norm" not in stored)
        if isinstance(sizes.recurrent, DeltaConfig) and "linear_attn" in ours:
            tensors |= of_delta(stored, weight, sizes.recurrent, family)
        elif sizes.latent is not None and ".attn_kv_b." in stored:
            tensors |= split_latents(stored, weight, sizes.latent)
        else:
            tensors[stored] = alone(stored, weight, sizes)
    for stored, stack in experts.items():
        tensors[stored] = np.stack([stack[number] for number in range(len(stack))])
    return tensors


PLAIN = (
    *(".bias", "conv1d.weight", "conv1d_q.weight", "conv1d_k.weight", "conv1d_v.weight"),
    *("conv.conv.weight", ".ssm_a", ".ssm_d", "_norm.weight"),
)
"""Endings of tensors that stay in float32."""


def write_gguf(
    model_dir: Path,
    file: Path,
    *,
    name: str,
    kind: str = "F32",
    experts_kind: str | None = None,
    tokens: Mapping[str, Any] | None = None,
) -> Path:
    """Write the model of a directory with one file of weights; matrices in type `kind`.

    `experts_kind`: that of experts, the same unless told.
    """
    config = json.loads((model_dir / "config.json").read_text())
    sizes = load_model_config(model_dir)
    known = {each.architecture: each for each in (MIXTRAL, OLMO3, DEEPSEEK3)}
    family = known.get(config["architectures"][0], FAMILIES[name])
    if name == "falcon" and len(sizes.layer_norms) == 2:
        family = FALCON2
    tensors = renamed(load_file(model_dir / SINGLE_FILE), sizes, family, name)
    rope = config.get("rope_parameters") or {}
    for length in ("long", "short"):
        if (factors := rope.get(f"{length}_factor")) is not None:
            tensors[f"rope_factors_{length}.weight"] = np.array(factors)
    if (full := rope.get("full_attention", {})).get("rope_type") == "proportional":
        size = sizes.shape_of(sizes.num_layers - 1).rotary_dim // 2
        turns = np.arange(size) < int(size * full["partial_rotary_factor"])
        tensors["rope_freqs.weight"] = np.where(turns, 1.0, 1e30)
    if name == "falcon-h1":
        tensors = {key: of_falcon_h1(key, weight, config) for key, weight in tensors.items()}
    packed = {}
    for stored, weight in tensors.items():
        is_plain = weight.ndim == 1 or stored.endswith(PLAIN) or "ffn_gate_inp" in stored
        chosen = (experts_kind or kind) if "_exps." in stored else kind
        chosen = "F32" if is_plain else chosen
        rows = weight.reshape(-1, weight.shape[-1])
        packed[stored] = (weight.shape, KINDS[chosen], blocks(rows, chosen))
    metadata = metadata_of(config, sizes, name) | dict(tokens or tiny_tokens(config["vocab_size"]))
    file.write_bytes(gguf_bytes(metadata, packed))
    return file
