"""A GGUF file's model in the words of config.json, and where its tensors are. Torch-free."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from lightserve.errors import ModelLoadError
from lightserve.models.config import ModelConfig
from lightserve.models.gguf import BLOCK_TYPES, GgufFile, GgufTensor
from lightserve.models.gguf_families import (
    DEEPSEEK3,
    FALCON2,
    FAMILIES,
    MIXTRAL,
    OLMO3,
    GgufFamily,
    epsilon_of,
    has_sigmoid,
    window_of,
)
from lightserve.models.moe_config import MAX_EXPERTS
from lightserve.models.plain_config import MAX_LAYERS, NormWeights
from lightserve.models.recurrent_config import DeltaConfig, Joined
from lightserve.models.rope import rope_of

_GATES = "ffn_gate_inp_shexp.weight"
_EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
_GATES_AND_UPS = "ffn_gate_up_exps"
"""The first two of these in one tensor, gates before ups."""
_BY_HEAD = ("attn_k_b.weight", "attn_v_b.weight")
_CONVOLUTIONS = (
    *(f".ssm_conv1d{part}.weight" for part in ("", "_q", "_k", "_v")),
    ".shortconv.conv.weight",
)
_VECTORS = (".ssm_a", ".ssm_d", ".ssm_norm.weight")
"""Tensors of states that files may have as matrices."""
_MAX_ALONE = 1 << 18
"""Tensors, where experts are counted one by one."""


def family_of(gguf: GgufFile) -> GgufFamily:
    """Return a file's family. Raises ModelLoadError: it is none that can be served."""
    name = gguf.string("general.architecture")
    if name == "llama" and gguf.integer("llama.expert_count", default=0):
        return MIXTRAL
    if name == "olmo2" and window_of(gguf) is not None:
        return OLMO3
    if name == "deepseek2" and has_sigmoid(gguf):
        return DEEPSEEK3
    if name == "falcon" and gguf.has("attn_norm_2.weight"):
        return FALCON2
    if name not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise gguf.error("general.architecture", f"names {name!r}; supported in GGUF are {known}")
    return FAMILIES[name]


def one_by_one(gguf: GgufFile) -> GgufFile:
    """Return a file with experts as tensors of their own, by the names that layers have.

    Raises:
        ModelLoadError: there are more than any model has.
    """
    family, tensors = family_of(gguf), dict(gguf.tensors)
    for name, tensor in gguf.tensors.items():
        layer, _, rest = name.rpartition(".ffn_")
        if f"ffn_{rest}" == _GATES and len(tensor.shape) == 1:
            tensors[name] = dataclasses.replace(tensor, shape=(1, *tensor.shape))
        if name.endswith(_BY_HEAD) and len(tensor.shape) == 3:
            first, second, columns = tensor.shape
            tensors[name] = dataclasses.replace(tensor, shape=(first * second, columns))
        size, width = math.prod(tensor.shape), tensor.shape[-1]
        if name.endswith(_CONVOLUTIONS):
            tensors[name] = dataclasses.replace(tensor, shape=(size // width, 1, width))
        if name.endswith(_VECTORS):
            is_kimi = name.endswith(".ssm_a") and family.architecture == "KimiLinearForCausalLM"
            shape = (1, 1, size, 1) if is_kimi else (size,)
            tensors[name] = dataclasses.replace(tensor, shape=shape)
        kind, _, part = f"ffn_{rest}".partition(".")
        products = (kind,) if kind in _EXPERTS else _EXPERTS[:2] if kind == _GATES_AND_UPS else ()
        if not products or len(tensor.shape) != {"weight": 3, "bias": 2}.get(part):
            continue
        if tensor.shape[0] > MAX_EXPERTS or len(tensors) > _MAX_ALONE:
            raise ModelLoadError(
                f"{gguf.path}: tensor {name!r} has {tensor.shape[0]} experts, at most {MAX_EXPERTS}"
                f" are supported, and {_MAX_ALONE} tensors of all layers"
            )
        for expert in range(tensor.shape[0]):
            for number, each in enumerate(products):
                product = family.experts[_EXPERTS.index(each)]
                own = f"{layer}.{family.module}.experts.{expert}.{product}.{part}"
                tensors[own] = _slice(tensor, expert, number, len(products))
    return dataclasses.replace(gguf, tensors=tensors)


def name_in_file(gguf: GgufFile, name: str) -> str:
    """Return which tensor of the file has one of `one_by_one` in it, as a refusal should say."""
    family = family_of(gguf)
    layer, found, rest = name.partition(f".{family.module}.experts.")
    if not found:
        return name
    _, product, part = rest.split(".")
    own = _EXPERTS[family.experts.index(product)]
    if f"{layer}.{own}.{part}" not in gguf.tensors and own != _EXPERTS[-1]:
        own = _GATES_AND_UPS if f"{layer}.{_GATES_AND_UPS}.{part}" in gguf.tensors else own
    return f"{layer}.{own}.{part}"


def _slice(tensor: GgufTensor, number: int, part: int, num_parts: int) -> GgufTensor:
    """Return one of the matrices, or biases, of a tensor, or a part of its rows."""
    shape = (tensor.shape[1] // num_parts, *tensor.shape[2:])
    if tensor.kind not in BLOCK_TYPES:
        return dataclasses.replace(tensor, shape=shape)
    size = math.prod(shape[:-1]) * tensor.row_bytes
    start = tensor.start + (number * num_parts + part) * size
    return dataclasses.replace(tensor, shape=shape, start=start)


def as_stored(config: ModelConfig, gguf: GgufFile) -> ModelConfig:
    """Return a model as its GGUF file has it, where safetensors have it otherwise.

    Norms have the one in them; products are merged, if they are, one after the other; each
    expert has tensors of its own, once `one_by_one` has told them apart.
    """
    merged = config.merged
    if merged & {"qkv", "grouped_qkv"}:  # all queries, then all keys, then all values
        merged = merged - {"qkv", "grouped_qkv"}
        if gguf.has("attn_qkv.weight"):
            merged |= {"qkv"}
    if gguf.has("ffn_gate.weight") or gguf.has("ffn_gate_shexp.weight"):
        merged = merged - {"gate_up"}
    moe = config.moe and dataclasses.replace(config.moe, stacked=None)
    latent = config.latent and dataclasses.replace(
        config.latent, is_split=gguf.has("attn_k_b.weight")
    )
    recurrent = config.recurrent
    if isinstance(recurrent, DeltaConfig) and recurrent.joined is Joined.GROUPS:
        recurrent = dataclasses.replace(recurrent, joined=Joined.GATES)
    norms = config.norm_weights
    if norms is NormWeights.ABOVE_ONE:
        norms = NormWeights.WIDE
    return dataclasses.replace(
        config, norm_weights=norms, merged=merged, moe=moe, latent=latent, recurrent=recurrent
    )


def config_of(gguf: GgufFile) -> dict[str, Any]:
    """Return the entries that config.json would have. Raises ModelLoadError naming a key or a
    tensor."""
    family, name = family_of(gguf), gguf.string("general.architecture")
    num_layers = gguf.integer(".block_count", low=1, high=MAX_LAYERS)
    num_heads = gguf.integer(".attention.head_count", low=1)
    hidden = gguf.integer(".embedding_length", low=num_heads)
    key = ".attention.key_length"
    head_dim = gguf.integer(key, default=hidden // num_heads, low=1)
    rotated, key = head_dim, ".attention.value_length"
    if name in ("deepseek2", "mistral4", "kimi-linear"):  # whose keys and values are of other sizes
        rotated = gguf.integer(".rope.dimension_count")
    elif (size := gguf.integer(key, default=head_dim)) != head_dim:
        raise gguf.error(key, f"must be that of keys, {head_dim}, got {size}")
    if "token_embd.weight" not in gguf.tensors:
        raise ModelLoadError(f"{gguf.path}: tensor 'token_embd.weight' is missing")
    own = family.own(gguf)
    if "intermediate_size" not in own or "num_key_value_heads" not in own:
        own = _sizes_of_all(gguf, num_layers, num_heads) | own
    return {
        "architectures": [family.architecture],
        "vocab_size": gguf.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "head_dim": head_dim,
        "rms_norm_eps": epsilon_of(gguf),
        "max_position_embeddings": gguf.integer(".context_length"),
        "rope_parameters": rope_of(gguf, rotated, family.theta) if family.is_rotated else None,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": name in ("llama", "granite", "smollm3") and gguf.has("attn_q.bias"),
        "dtype": "bfloat16",
        **own,
    }


def _sizes_of_all(gguf: GgufFile, num_layers: int, num_heads: int) -> dict[str, int]:
    """Return sizes that all layers have which have a block, or attention."""
    inner = gguf.integer(".expert_feed_forward_length", default=0) or None
    key = ".attention.head_count_kv"
    return {
        "intermediate_size": gguf.integer(
            ".feed_forward_length", default=inner, num_layers=num_layers
        ),
        "num_key_value_heads": gguf.integer(
            key, default=num_heads, low=1, high=num_heads, num_layers=num_layers
        ),
    }
