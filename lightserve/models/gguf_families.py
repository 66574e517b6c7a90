"""The keys of single architectures in GGUF files, as entries of config.json. Torch-free.

Keys are those of llama.cpp's converter.
"""

from __future__ import annotations

from typing import Any

from lightserve.errors import ModelLoadError
from lightserve.models.gguf import GgufFile
from lightserve.models.moe_config import GPT_OSS_THETA, MAX_EXPERTS
from lightserve.models.rope import FREQUENCY_FACTORS, FULL, SLIDING, rope_of

_SOFTMAX, _SIGMOID = 1, 2
_WITH_LAYER_NORM = ("starcoder", "starcoder2", "gptneox", "phi2", "bloom", "mpt", "falcon")
_BAICHUAN_13B_LAYERS = 40


def epsilon_of(gguf: GgufFile) -> float:
    """Return what norms add to mean squares; Nemotron-H has one of two keys for it, or both."""
    key, other = (f".attention.layer_norm_{kind}epsilon" for kind in ("rms_", ""))
    is_other = gguf.architecture.startswith("nemotron_h") and not gguf.has_key(key)
    return gguf.number(other if is_other or gguf.architecture in _WITH_LAYER_NORM else key)


def qwen2(gguf: GgufFile) -> dict[str, Any]:
    """Nothing but that there must be biases."""
    gguf.need("attn_q.bias")
    return {}


def window_of(gguf: GgufFile) -> int | None:
    """Return how many tokens layers with a window see."""
    return gguf.integer(".attention.sliding_window", default=0) or None


def _num_experts(gguf: GgufFile) -> int:
    return gguf.integer(".expert_count", low=1, high=MAX_EXPERTS)


def experts(gguf: GgufFile) -> dict[str, Any]:
    """Return how many experts there are, and a token has."""
    return {
        "num_local_experts": (number := _num_experts(gguf)),
        "num_experts": number,
        "num_experts_per_tok": gguf.integer(".expert_used_count", low=1, high=number),
    }


def _sized_experts(gguf: GgufFile) -> dict[str, Any]:
    """Return experts that have a size of their own beside that of other blocks."""
    size = gguf.integer(".expert_feed_forward_length", low=1)
    return experts(gguf) | {"moe_intermediate_size": size}


def _grouped_experts(gguf: GgufFile) -> dict[str, Any]:
    """Return experts in groups, with weights that a factor multiplies; 0 is none to llama.cpp."""
    num_experts = _num_experts(gguf)
    groups = gguf.integer(".expert_group_count", default=1, low=1, high=num_experts)
    used = ".expert_group_used_count"
    return _sized_experts(gguf) | {
        "n_routed_experts": num_experts,
        "n_shared_experts": gguf.integer(".expert_shared_count", low=1),
        "norm_topk_prob": gguf.boolean(".expert_weights_norm", default=False),
        "routed_scaling_factor": gguf.number(".expert_weights_scale", default=0.0) or 1.0,
        "n_group": groups,
        "topk_group": gguf.integer(used, default=1, low=1, high=groups),
    }


def qwen_moe(gguf: GgufFile) -> dict[str, Any]:
    """Qwen2-MoE's experts keep the weights that all had together, Qwen3-MoE's do not."""
    own = _sized_experts(gguf) | {"norm_topk_prob": gguf.architecture != "qwen2moe"}
    if gguf.architecture == "qwen2moe":
        gguf.need("attn_q.bias")
    if gguf.architecture != "qwen3moe":
        shared = gguf.integer(".expert_shared_feed_forward_length", low=1)
        own["shared_expert_intermediate_size"] = shared
    return own


def gemma2(gguf: GgufFile) -> dict[str, Any]:
    """The file has no scale of attention; llama.cpp knows the model by its layers, too."""
    return {
        "query_pre_attn_scalar": _query_scale(gguf, of_largest=46),
        "sliding_window": window_of(gguf) or 4096,
        "attn_logit_softcapping": gguf.number(".attn_logit_softcapping", default=50.0),
        "final_logit_softcapping": gguf.number(".final_logit_softcapping", default=30.0),
    }


def gemma3(gguf: GgufFile) -> dict[str, Any]:
    """Without a window in the file every layer sees all, by one embedding, as in llama.cpp."""
    key = ".attention.sliding_window_pattern"
    return {
        "query_pre_attn_scalar": _query_scale(gguf, of_largest=62),
        "sliding_window": window_of(gguf),
        "sliding_window_pattern": gguf.integer(key, default=6, low=1),
        "rope_local_base_freq": gguf.number(".rope.freq_base_swa", default=10_000.0),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }


def gemma4(gguf: GgufFile) -> dict[str, Any]:
    """Layers that see everything, which the last is, have sizes of their own."""
    layers = range(num_layers := gguf.integer(".block_count"))
    kinds = _kinds(gguf, key := ".attention.sliding_window_pattern", SLIDING)
    if kinds[-1] != FULL:
        raise gguf.error(key, "must be false for the last layer")
    heads = _of_kinds(gguf, ".attention.head_count_kv", kinds)
    size = gguf.integer(".attention.key_length_swa", low=1)
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if (found := gguf.integer(key := f".{key}")) != size:
            raise gguf.error(key, f"must be that of keys, {size}, got {found}")
    for key in ("scaling.factor", "scale_linear", "scaling.attn_factor"):
        if gguf.number(key := f".rope.{key}", default=1.0) not in (0.0, 1.0):
            raise gguf.error(key, "must be 1")
    if FREQUENCY_FACTORS not in gguf.tensors:
        raise ModelLoadError(f"{gguf.path}: tensor {FREQUENCY_FACTORS!r} is missing")
    full_size = gguf.integer(".attention.key_length")
    full = {"num_key_value_heads": heads[FULL], "head_dim": full_size}
    theta = gguf.number(".rope.freq_base_swa", default=10_000.0)
    has_values = [f"blk.{n}.attn_v.weight" in gguf.tensors for n in layers if kinds[n] == FULL]
    own = {
        "num_key_value_heads": heads.get(SLIDING, heads[FULL]),
        "head_dim": size,
        "per_layer_config": {str(n): full for n in layers if kinds[n] == FULL},
        "attention_k_eq_v": not any(has_values),
        "layer_types": kinds,
        "sliding_window": gguf.integer(".attention.sliding_window", low=1),
        "rope_parameters": {
            FULL: rope_of(gguf, full_size, 10_000.0),
            SLIDING: {"rope_type": "default", "rope_theta": theta},
        },
        "final_logit_softcapping": gguf.number(".final_logit_softcapping", default=30.0) or None,
        **_gemma4_blocks(gguf, num_layers),
    }
    input_size = gguf.integer(".embedding_length_per_layer_input")
    if input_size and "per_layer_token_embd.weight" in gguf.tensors:
        vocab = gguf.tensors["per_layer_token_embd.weight"].shape[0]
        own["vocab_size_per_layer_input"] = vocab
    return own | {"hidden_size_per_layer_input": input_size}


def _gemma4_blocks(gguf: GgufFile, num_layers: int) -> dict[str, Any]:
    """Return sizes of blocks, which layers that read keys and values of others may have twice."""
    num_sharing = gguf.integer(".attention.shared_kv_layers", default=0, high=num_layers - 1)
    sizes = gguf.integers(key := ".feed_forward_length", num_layers)
    inner, last = sizes[0], sizes[-1]
    expected = [inner] * (num_layers - num_sharing) + [last] * num_sharing
    if sizes != expected or last not in (inner, 2 * inner):
        raise gguf.error(key, f"must be one number, or twice it in the last {num_sharing} layers")
    own = {
        "num_kv_shared_layers": num_sharing,
        "intermediate_size": inner,
        "use_double_wide_mlp": last != inner,
        "enable_moe_block": bool(gguf.integer(".expert_count", default=0)),
    }
    if not own["enable_moe_block"]:
        return own
    return own | {
        "num_experts": (number := _num_experts(gguf)),
        "top_k_experts": gguf.integer(".expert_used_count", low=1, high=number),
        "moe_intermediate_size": gguf.integer(".expert_feed_forward_length", low=1),
    }


def _of_kinds(gguf: GgufFile, key: str, kinds: list[str]) -> dict[str, int]:
    """Return the number that a key has for all layers of a kind, by kind."""
    found: dict[str, int] = {}
    for kind, number in zip(kinds, gguf.integers(key, len(kinds)), strict=True):
        if found.setdefault(kind, number) != number:
            raise gguf.error(key, f"must have one number for all layers of {kind}")
    return found


def _query_scale(gguf: GgufFile, *, of_largest: int) -> int:
    """Return the number whose root queries are divided by: the size of a head, or an even share."""
    if gguf.integer(".block_count") == of_largest:
        return gguf.integer(".embedding_length") // gguf.integer(".attention.head_count", low=1)
    return _size_of_a_head(gguf)


def _size_of_a_head(gguf: GgufFile) -> int:
    share = gguf.integer(".embedding_length") // gguf.integer(".attention.head_count", low=1)
    return gguf.integer(".attention.key_length", default=share, low=1)


def granite(gguf: GgufFile) -> dict[str, Any]:
    """A context that was not extended is no embedding of places to llama.cpp."""
    if not gguf.boolean(key := ".rope.scaling.finetuned", default=True):
        raise gguf.error(key, "must be true: models without rotary embeddings are not supported")
    return _granite_factors(gguf)


def _granite_factors(gguf: GgufFile) -> dict[str, Any]:
    """To llama.cpp, 0 is no factor."""
    attention = gguf.number(".attention.scale", default=0.0)
    return {
        "embedding_multiplier": gguf.number(".embedding_scale", default=0.0) or 1.0,
        "residual_multiplier": gguf.number(".residual_scale", default=0.0) or 1.0,
        "attention_multiplier": attention or _size_of_a_head(gguf) ** -0.5,
        "logits_scaling": gguf.number(".logit_scale", default=1.0),
    }


def olmo3(gguf: GgufFile) -> dict[str, Any]:
    """Layers with a window have the embedding without its scaling, by the same base."""
    window, key = window_of(gguf), ".attention.sliding_window_pattern"
    own: dict[str, Any] = {
        "sliding_window": window,
        "rope_theta": (theta := gguf.number(".rope.freq_base", default=10_000.0)),
        "rope_local_base_freq": gguf.number(".rope.freq_base_swa", default=theta),
    }
    if gguf.has_key(key):
        own["layer_types"] = _kinds(gguf, key, SLIDING)
    return own


def _kinds(gguf: GgufFile, key: str, kind: str) -> list[str]:
    """Return the kinds of layers by an array of flags."""
    flags, num_layers = gguf.numbers(key), gguf.integer(".block_count")
    if len(flags) != num_layers:
        raise gguf.error(key, f"must have {num_layers} entries, got {len(flags)}")
    return [kind if is_one else FULL for is_one in flags]


def qwen_delta(gguf: GgufFile) -> dict[str, Any]:
    """Qwen3-Next and Qwen3.5 without their layers for several tokens at once."""
    num_layers = _own_layers(gguf)
    own: dict[str, Any] = {
        "num_hidden_layers": num_layers,
        **_states(gguf, _DELTA_SIZES),
        "full_attention_interval": gguf.integer(".full_attention_interval", default=4),
    }
    if gguf.has_key(key := ".attention.recurrent_layers"):
        own["layer_types"] = _kinds(gguf, key, "linear_attention")[:num_layers]
    return own if gguf.architecture == "qwen35" else own | qwen_moe(gguf)


_DELTA_SIZES = (
    *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads"),
    *("linear_num_value_heads", "linear_value_head_dim"),
)
_MAMBA_SIZES = ("mamba_d_conv", "mamba_d_state", "mamba_n_groups", "mamba_n_heads", "mamba_d_head")
_NEMOTRON_SIZES = ("conv_kernel", "ssm_state_size", "n_groups", "mamba_num_heads", "mamba_head_dim")
"""Words of config.json for the sizes of `_states`."""


def _states(gguf: GgufFile, words: tuple[str, ...]) -> dict[str, int]:
    """Return sizes of layers with states by the words that config.json has for them.

    `words`: of the convolution's width, a head's state, groups, heads, and numbers of a head.
    """
    num_heads = gguf.integer(".ssm.time_step_rank", low=1)
    if (inner := gguf.integer(key := ".ssm.inner_size", low=1)) % num_heads:
        raise gguf.error(key, f"must be a multiple of {num_heads}, got {inner}")
    keys = ("conv_kernel", "state_size", "group_count")
    sizes = [gguf.integer(f".ssm.{key}", low=1) for key in keys]
    return dict(zip(words, [*sizes, num_heads, inner // num_heads], strict=True))


def _kinds_by_heads(gguf: GgufFile, kind: str) -> list[str]:
    """Return the kinds of layers: those without heads of keys are of `kind`."""
    heads = gguf.integers(".attention.head_count_kv", gguf.integer(".block_count"))
    return [FULL if number else kind for number in heads]


def granite_hybrid(gguf: GgufFile) -> dict[str, Any]:
    """Layers without heads of keys are Mamba-2's; the shared expert is the block of a model
    without experts."""
    inner = gguf.integer(".ssm.inner_size")
    is_rotated = gguf.boolean(".rope.scaling.finetuned", default=True)
    own: dict[str, Any] = {
        **_granite_factors(gguf),
        **_states(gguf, _MAMBA_SIZES),
        "mamba_expand": inner / gguf.integer(".embedding_length"),
        "mamba_conv_bias": gguf.has("ssm_conv1d.bias"),
        "layer_types": _kinds_by_heads(gguf, "linear_attention"),
        "position_embedding_type": "rope" if is_rotated else "nope",
    }
    if not gguf.integer(".expert_count", default=0):
        size = gguf.integer(".feed_forward_length")
        return own | {"num_local_experts": 0, "shared_intermediate_size": size}
    shared = gguf.integer(".expert_shared_feed_forward_length", low=1)
    return own | experts(gguf) | {"shared_intermediate_size": shared}


def falcon_h1(gguf: GgufFile) -> dict[str, Any]:
    """Weights have the factors of parts in them."""
    return {
        **_states(gguf, _MAMBA_SIZES),
        "mamba_d_ssm": gguf.integer(".ssm.inner_size"),
        "mamba_rms_norm": gguf.has("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "mamba_conv_bias": gguf.has("ssm_conv1d.bias"),
    }


def nemotron(gguf: GgufFile) -> dict[str, Any]:
    """Each layer is one block: a feed-forward where it has a size, else attention where it has
    heads of keys, else Mamba-2. Layers for several tokens at once are left out."""
    num_layers, num_blocks = _own_layers(gguf), gguf.integer(".block_count")
    sizes = gguf.integers(".feed_forward_length", num_blocks)
    kinds = _kinds_by_heads(gguf, "linear_attention")
    block = "moe" if gguf.integer(".expert_count", default=0) else "mlp"
    kinds = [block if size else kind for size, kind in zip(sizes, kinds, strict=True)]
    own: dict[str, Any] = {
        **_states(gguf, _NEMOTRON_SIZES),
        "num_hidden_layers": num_layers,
        "layers_block_type": kinds[:num_layers],
        "use_conv_bias": gguf.has("ssm_conv1d.bias"),
    }
    if block == "mlp":
        return own
    shared = gguf.integer(".expert_shared_feed_forward_length", low=1)
    own["moe_shared_expert_intermediate_size"] = shared
    own["moe_latent_size"] = gguf.integer(".moe_latent_size", default=0) or None
    return own | _grouped_experts(gguf)


def lfm2(gguf: GgufFile) -> dict[str, Any]:
    """Layers without heads of keys are short convolutions."""
    for key in ("attention.sliding_window", "decision.block_count", "embedding_length_out"):
        gguf.integer(f".{key}", default=0, high=0)
    if not gguf.boolean(key := ".attention.causal", default=True):
        raise gguf.error(key, "must be true")
    own: dict[str, Any] = {
        "layer_types": _kinds_by_heads(gguf, "conv"),
        "conv_L_cache": gguf.integer(".shortconv.l_cache"),
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
    }
    if gguf.architecture == "lfm2":
        return own
    _need_sigmoid(gguf)
    num_dense = gguf.integer(".leading_dense_block_count", default=0)
    return own | _sized_experts(gguf) | {"num_dense_layers": num_dense}


def llama4(gguf: GgufFile) -> dict[str, Any]:
    """Chunks and growth are llama.cpp's own numbers; models of 128 experts norm no heads."""
    if gguf.integer(key := ".attention.sliding_window", default=1) == 0:
        raise gguf.error(key, "must not be 0: models without chunks are not supported")
    return experts(gguf) | {
        "intermediate_size_mlp": gguf.integer(".feed_forward_length"),
        "intermediate_size": gguf.integer(".expert_feed_forward_length", low=1),
        "interleave_moe_layer_step": gguf.integer(".interleave_moe_layer_step", low=1),
        "use_qk_norm": _num_experts(gguf) != 128,
    }


def gpt_oss(gguf: GgufFile) -> dict[str, Any]:
    """YaRN as its authors have it: between frequencies, not between whole dimensions of them.

    llama.cpp rounds these bounds, and keeps the same alpha and limit of gates as is default here.
    """
    head_dim = gguf.integer(".attention.key_length")
    inner = gguf.integer(".expert_feed_forward_length")
    return experts(gguf) | {
        "intermediate_size": inner,
        "sliding_window": gguf.integer(".attention.sliding_window"),
        "rope_parameters": rope_of(gguf, head_dim, GPT_OSS_THETA) | {"truncate": False},
    }


def has_sigmoid(gguf: GgufFile) -> bool:
    """Whether experts' weights are sigmoids (DeepSeek-V3), not a softmax (DeepSeek-V2)."""
    kind = gguf.integer(key := ".expert_gating_func", default=_SOFTMAX) or _SOFTMAX
    if kind not in (_SOFTMAX, _SIGMOID):
        raise gguf.error(key, f"must be {_SOFTMAX} (softmax) or {_SIGMOID} (sigmoid), got {kind}")
    return kind == _SIGMOID


def _need_sigmoid(gguf: GgufFile) -> None:
    if not has_sigmoid(gguf):
        raise gguf.error(".expert_gating_func", f"must be {_SIGMOID} (sigmoid)")


def deepseek(gguf: GgufFile) -> dict[str, Any]:
    """DeepSeek-V2, DeepSeek-V3 or Mistral 4, without its layers for several tokens at once.

    Older files have the sizes of heads, newer ones those of the latent beside them.
    """
    if gguf.has_key(key := ".attention.temperature_scale"):
        raise gguf.error(key, "is not supported")
    is_v3, rotated = has_sigmoid(gguf), gguf.integer(".rope.dimension_count")
    head_dim = _size_of_heads(gguf, "key")
    if head_dim <= rotated:
        raise gguf.error(".rope.dimension_count", f"must be below {head_dim}, got {rotated}")
    normalises = gguf.boolean(key := ".expert_weights_norm", default=False)
    if normalises and not is_v3 and gguf.architecture != "mistral4":
        raise gguf.error(key, "must be false where weights are a softmax")
    experts = _grouped_experts(gguf)
    choice = "group_limited_greedy" if experts["n_group"] > 1 else "greedy"
    if is_v3 or gguf.architecture == "mistral4":
        choice = "noaux_tc"
    rope = rope_of(gguf, rotated, 10_000.0)
    if rope["rope_type"] == "yarn":
        if (
            rope.pop("attention_factor", None)
            and gguf.number(key := ".rope.scaling.attn_factor") != 1.0
        ):
            raise gguf.error(key, "must be 1")
        # A tenth of it is in the file, and both of config.json's numbers are the same. Without it
        # llama.cpp scales cos and sin, and the scores once more.
        scale = 10 * gguf.number(".rope.scaling.yarn_log_multiplier", default=0.0)
        rope |= {"mscale": scale, "mscale_all_dim": scale} if scale else {"mscale_all_dim": 1.0}
        if gguf.architecture == "mistral4":
            rope["mscale"] = 1.0
    return experts | {
        "num_hidden_layers": _own_layers(gguf),
        "q_lora_rank": gguf.integer(".attention.q_lora_rank", default=0) or None,
        "kv_lora_rank": gguf.integer(".attention.kv_lora_rank"),
        "qk_nope_head_dim": head_dim - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": _size_of_heads(gguf, "value"),
        "first_k_dense_replace": gguf.integer(".leading_dense_block_count"),
        "topk_method": choice,
        "scoring_func": "sigmoid" if is_v3 else "softmax",
        "rope_parameters": rope,
    }


def kimi(gguf: GgufFile) -> dict[str, Any]:
    """Layers without heads of keys have Kimi Delta Attention, of as many heads as the others."""
    _need_sigmoid(gguf)
    if gguf.has("attn_gate.weight"):
        raise ModelLoadError(f"{gguf.path}: tensors 'attn_gate.weight' are not supported")
    for key in ("moe_latent_size", "attn_res.block_size"):
        gguf.integer(f".{key}", default=0, high=0)
    return deepseek(gguf) | {
        "norm_topk_prob": gguf.boolean(".expert_weights_norm", default=True),
        "rope_parameters": None,
        "layer_types": _kinds_by_heads(gguf, "linear_attention"),
        "linear_num_heads": gguf.integer(".attention.head_count"),
        "linear_head_dim": gguf.integer(".kda.head_dim", low=1),
        "linear_conv_kernel_dim": gguf.integer(".ssm.conv_kernel"),
    }


def _own_layers(gguf: GgufFile) -> int:
    """Return the number of layers but for those that guess tokens."""
    num_layers = gguf.integer(".block_count")
    num_more = gguf.integer(key := ".nextn_predict_layers", default=0)
    if num_more >= num_layers:
        raise gguf.error(key, f"must be below {num_layers}, got {num_more}")
    return num_layers - num_more


def _size_of_heads(gguf: GgufFile, of: str) -> int:
    key = f".attention.{of}_length"
    return gguf.integer(f"{key}_mla" if gguf.has_key(f"{key}_mla") else key)


def chatglm(gguf: GgufFile) -> dict[str, Any]:
    """Half of each head is rotated; GLM-4-9B's later files have queries, keys and values apart."""
    num_heads = gguf.integer(".attention.head_count")
    head_dim = gguf.integer(".embedding_length") // num_heads
    if 2 * (size := gguf.integer(key := ".rope.dimension_count")) != head_dim:
        raise gguf.error(key, f"must be half a head's {head_dim}, got {size}")
    return {
        "kv_channels": head_dim,
        "multi_query_attention": True,
        "add_qkv_bias": gguf.has("attn_qkv.bias") or gguf.has("attn_q.bias"),
        "rope_ratio": gguf.number(".rope.freq_base", default=10_000.0) / 10_000.0,
    }


def baichuan(gguf: GgufFile) -> dict[str, Any]:
    """13B has ALiBi, which llama.cpp, too, knows by the number of layers."""
    if gguf.integer(".block_count") != _BAICHUAN_13B_LAYERS:
        return {}
    length = gguf.integer(".context_length")
    return {"max_position_embeddings": None, "model_max_length": length}


def falcon(gguf: GgufFile) -> dict[str, Any]:
    """Falcon, before and since its new architecture."""
    num_kv_heads = gguf.integer(".attention.head_count_kv", default=1)
    num_norms = 2 if gguf.has("attn_norm_2.weight") else 1
    return {
        "new_decoder_architecture": num_norms == 2 or num_kv_heads > 1,
        "num_kv_heads": num_kv_heads,
        "num_ln_in_parallel_attn": num_norms,
    }


def seed_oss(gguf: GgufFile) -> dict[str, Any]:
    """Seed-OSS: a bias of the output of attention, too."""
    return {"attention_out_bias": gguf.has("attn_output.bias")}


def minimax(gguf: GgufFile) -> dict[str, Any]:
    """MiniMax-M2."""
    _need_sigmoid(gguf)
    size = gguf.integer(".expert_feed_forward_length", low=1)
    return experts(gguf) | {"intermediate_size": size}


def gpt_neox(gguf: GgufFile) -> dict[str, Any]:
    """GPT-NeoX: its biases are those of one product."""
    return {
        "use_parallel_residual": gguf.boolean(".use_parallel_residual", default=True),
        "attention_bias": gguf.has("attn_qkv.bias"),
    }


def mpt(gguf: GgufFile) -> dict[str, Any]:
    """MPT: ALiBi, blocks of a multiple of the hidden size."""
    hidden = gguf.integer(".embedding_length")
    inner = gguf.integer(".feed_forward_length")
    if not hidden or inner % hidden:
        key = ".feed_forward_length"
        raise gguf.error(key, f"must be a multiple of {hidden}, got {inner}")
    if gguf.number(key := ".attention.clamp_kqv", default=0.0):
        raise gguf.error(key, "must be 0")
    return {
        "expansion_ratio": inner // hidden,
        "attn_config": {
            "alibi_bias_max": gguf.number(".attention.max_alibi_bias"),
            "qk_ln": gguf.has("attn_q_norm.weight"),
        },
    }


def starcoder2(gguf: GgufFile) -> dict[str, Any]:
    """The file has no window, and llama.cpp none."""
    return {"use_bias": gguf.has("attn_q.bias"), "sliding_window": None}
