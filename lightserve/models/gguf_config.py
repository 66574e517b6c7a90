"""A GGUF file's model in the words of config.json, and where its tensors are. Torch-free.

Names, and the ways in which weights are stored, are those of llama.cpp's converter.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from lightserve.errors import ModelLoadError
from lightserve.models import gguf_families as keys
from lightserve.models.config import ModelConfig
from lightserve.models.gguf import BLOCK_TYPES, GgufFile, GgufTensor
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


_NAMES = (
    ("model.layers.", "blk."),
    ("model.embed_tokens.", "token_embd."),
    ("model.norm.", "output_norm."),
    ("lm_head.", "output."),
    ("self_attn.q_proj.", "attn_q."),
    ("self_attn.k_proj.", "attn_k."),
    ("self_attn.v_proj.", "attn_v."),
    ("self_attn.o_proj.", "attn_output."),
    ("self_attn.q_norm.", "attn_q_norm."),
    ("self_attn.k_norm.", "attn_k_norm."),
    ("mlp.gate_proj.", "ffn_gate."),
    ("mlp.up_proj.", "ffn_up."),
    ("mlp.down_proj.", "ffn_down."),
    ("input_layernorm.", "attn_norm."),
    ("post_attention_layernorm.", "ffn_norm."),
)
"""See `ModelConfig.stored_names`."""
_OUTPUT_NORMS = (
    ("post_attention_layernorm.", "post_attention_norm."),
    ("pre_feedforward_layernorm.", "ffn_norm."),
    ("post_feedforward_layernorm.", "post_ffw_norm."),
)
_GEMMA4 = (
    ("model.embed_tokens_per_layer.", "per_layer_token_embd."),
    ("model.per_layer_model_projection.", "per_layer_model_proj."),
    ("model.per_layer_projection_norm.", "per_layer_proj_norm."),
    ("per_layer_input_gate.", "inp_gate."),
    ("post_per_layer_input_norm.", "post_norm."),
    ("per_layer_projection.", "proj."),
    ("layer_scalar", "layer_output_scale.weight"),
    ("mlp.router.", "ffn_gate_inp."),
    ("router.scale", "ffn_gate_inp.scale"),
    ("router.per_expert_scale", "ffn_down_exps.scale"),
    ("pre_feedforward_layernorm_2.", "pre_ffw_norm_2."),
    ("post_feedforward_layernorm_1.", "post_ffw_norm_1."),
    ("post_feedforward_layernorm_2.", "post_ffw_norm_2."),
    *_OUTPUT_NORMS,
)
_MERGED = ("self_attn.qkv_proj.", "attn_qkv.")


@dataclasses.dataclass(frozen=True)
class GgufFamily:
    """One value of `general.architecture`."""

    architecture: str
    """In the words of config.json."""
    _: dataclasses.KW_ONLY
    own_names: tuple[tuple[str, str], ...] = ()
    """Names that it alone has, or has for something else."""
    has_neighbours: bool = False
    """True: rotated pairs of queries and keys are neighbours in the file."""
    experts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names by which layers call the products of an expert; a file has those of all in one
    tensor."""
    module: str = "mlp"
    """Module that holds the experts."""
    is_rotated: bool = True
    """Whether the file's keys of rotary embeddings are read; if not, nothing is rotated."""
    theta: float = 10_000.0
    """Base of rotary embeddings where the file gives none."""
    own: Callable[[GgufFile], dict[str, Any]] = lambda _: {}
    """Further entries that config.json would have."""

    @property
    def stored_names(self) -> tuple[tuple[str, str], ...]:
        """See `ModelConfig.stored_names`."""
        return self.own_names + _NAMES


_QWEN_EXPERTS = (
    ("mlp.gate.", "ffn_gate_inp."),
    ("mlp.shared_expert.gate_proj.", "ffn_gate_shexp."),
    ("mlp.shared_expert.up_proj.", "ffn_up_shexp."),
    ("mlp.shared_expert.down_proj.", "ffn_down_shexp."),
    ("mlp.shared_expert_gate.", "ffn_gate_inp_shexp."),
)
_DELTA = (
    ("linear_attn.in_proj_qkv.", "attn_qkv."),
    ("linear_attn.in_proj_z.", "attn_gate."),
    ("linear_attn.in_proj_ba.", "ssm_ba."),
    ("linear_attn.in_proj_a.", "ssm_alpha."),
    ("linear_attn.in_proj_b.", "ssm_beta."),
    ("linear_attn.conv1d.", "ssm_conv1d."),
    ("linear_attn.dt_bias", "ssm_dt.bias"),
    ("linear_attn.A_log", "ssm_a"),
    ("linear_attn.norm.", "ssm_norm."),
    ("linear_attn.out_proj.", "ssm_out."),
    ("post_attention_layernorm.", "post_attention_norm."),
)
_MAMBA = (
    ("mamba.in_proj.", "ssm_in."),
    ("mamba.conv1d.", "ssm_conv1d."),
    ("mamba.dt_bias", "ssm_dt.bias"),
    ("mamba.A_log", "ssm_a"),
    ("mamba.D", "ssm_d"),
    ("mamba.norm.", "ssm_norm."),
    ("mamba.out_proj.", "ssm_out."),
)
_SHORT_CONVOLUTIONS = ((".conv.", ".shortconv."), ("model.norm.", "token_embd_norm."))
MIXTRAL = GgufFamily(
    "MixtralForCausalLM",
    own_names=(("block_sparse_moe.gate.", "ffn_gate_inp."),),
    has_neighbours=True,
    experts=("w1", "w3", "w2"),
    module="block_sparse_moe",
    own=keys.experts,
)
"""A `llama` with experts."""
OLMO3 = GgufFamily("Olmo3ForCausalLM", own_names=_OUTPUT_NORMS, own=keys.olmo3)
"""An `olmo2` with windows."""
_DEEPSEEK_EXPERTS = (
    ("mlp.gate.e_score_correction_bias", "exp_probs_b.bias"),
    ("mlp.gate.", "ffn_gate_inp."),
    ("mlp.shared_experts.gate_proj.", "ffn_gate_shexp."),
    ("mlp.shared_experts.up_proj.", "ffn_up_shexp."),
    ("mlp.shared_experts.down_proj.", "ffn_down_shexp."),
)
_LATENTS = (
    ("self_attn.q_a_proj.", "attn_q_a."),
    ("self_attn.q_b_proj.", "attn_q_b."),
    ("self_attn.q_a_layernorm.", "attn_q_a_norm."),
    ("self_attn.kv_a_proj_with_mqa.", "attn_kv_a_mqa."),
    ("self_attn.kv_a_layernorm.", "attn_kv_a_norm."),
    ("self_attn.kv_b_proj.", "attn_kv_b."),
    ("self_attn.k_b_proj.", "attn_k_b."),
    ("self_attn.v_b_proj.", "attn_v_b."),
    *_DEEPSEEK_EXPERTS,
)
_KIMI = (
    *((f"linear_attn.in_proj_{part}.", f"attn_{part}.") for part in "qkv"),
    *((f"linear_attn.{part}_conv1d.", f"ssm_conv1d_{part}.") for part in "qkv"),
    *((f"linear_attn.{part}_proj.", f"ssm_{part}.") for part in ("f_a", "f_b", "g_a", "g_b")),
    ("linear_attn.in_proj_b.", "ssm_beta."),
    ("linear_attn.dt_bias", "ssm_dt.bias"),
    ("linear_attn.A_log", "ssm_a"),
    ("linear_attn.norm.", "ssm_norm."),
    ("linear_attn.out_proj.", "attn_output."),
    *((ours.replace("mlp.", "block_sparse_moe."), stored) for ours, stored in _LATENTS),
)
DEEPSEEK3 = GgufFamily("DeepseekV3ForCausalLM", own_names=_LATENTS, own=keys.deepseek)
"""A `deepseek2` whose experts' weights are sigmoids."""
FALCON2 = GgufFamily(
    "FalconForCausalLM",
    own_names=(
        _MERGED,
        ("post_attention_layernorm.", "attn_norm."),
        ("input_layernorm.", "attn_norm_2."),
    ),
    own=keys.falcon,
)
"""A `falcon` that norms for each block."""
_NEMOTRON = GgufFamily(
    "NemotronHForCausalLM",
    own_names=(
        *_MAMBA,
        *_DEEPSEEK_EXPERTS,
        ("mlp.fc1_latent_proj.", "ffn_latent_down."),
        ("mlp.fc2_latent_proj.", "ffn_latent_up."),
    ),
    is_rotated=False,
    own=keys.nemotron,
)
FAMILIES = {
    "llama": GgufFamily("LlamaForCausalLM", has_neighbours=True),
    "qwen2": GgufFamily("Qwen2ForCausalLM", own=keys.qwen2),
    "qwen3": GgufFamily("Qwen3ForCausalLM"),
    "qwen2moe": GgufFamily("Qwen2MoeForCausalLM", own_names=_QWEN_EXPERTS, own=keys.qwen_moe),
    "qwen3moe": GgufFamily("Qwen3MoeForCausalLM", own_names=_QWEN_EXPERTS, own=keys.qwen_moe),
    "qwen3next": GgufFamily(
        "Qwen3NextForCausalLM", own_names=_QWEN_EXPERTS + _DELTA, own=keys.qwen_delta
    ),
    "qwen35": GgufFamily("Qwen3_5ForCausalLM", own_names=_DELTA, own=keys.qwen_delta),
    "qwen35moe": GgufFamily(
        "Qwen3_5MoeForCausalLM", own_names=_QWEN_EXPERTS + _DELTA, own=keys.qwen_delta
    ),
    "llama4": GgufFamily(
        "Llama4ForCausalLM",
        own_names=(("mlp.router.", "ffn_gate_inp."), *_QWEN_EXPERTS),
        theta=5e5,
        own=keys.llama4,
    ),
    "gemma": GgufFamily("GemmaForCausalLM"),
    "gemma2": GgufFamily("Gemma2ForCausalLM", own_names=_OUTPUT_NORMS, own=keys.gemma2),
    "gemma3": GgufFamily("Gemma3ForCausalLM", own_names=_OUTPUT_NORMS, theta=1e6, own=keys.gemma3),
    "gemma4": GgufFamily("Gemma4ForCausalLM", own_names=_GEMMA4, own=keys.gemma4),
    "phi3": GgufFamily(
        "Phi3ForCausalLM",
        own_names=(_MERGED, ("mlp.gate_up_proj.", "ffn_up.")),
        own=lambda gguf: {"sliding_window": keys.window_of(gguf)},
    ),
    "granite": GgufFamily("GraniteForCausalLM", has_neighbours=True, own=keys.granite),
    "granitehybrid": GgufFamily(
        "GraniteMoeHybridForCausalLM",
        own_names=(
            *_MAMBA,
            ("block_sparse_moe.router.layer.", "ffn_gate_inp."),
            ("block_sparse_moe.mlp.gate_proj.", "ffn_gate_shexp."),
            ("block_sparse_moe.mlp.up_proj.", "ffn_up_shexp."),
            ("block_sparse_moe.mlp.down_proj.", "ffn_down_shexp."),
        ),
        has_neighbours=True,
        module="block_sparse_moe",
        own=keys.granite_hybrid,
    ),
    "falcon-h1": GgufFamily(
        "FalconH1ForCausalLM",
        own_names=(*_MAMBA, ("post_attention_layernorm.weight", "ffn_norm")),
        own=keys.falcon_h1,
    ),
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": _NEMOTRON,
    "lfm2": GgufFamily("Lfm2ForCausalLM", own_names=_SHORT_CONVOLUTIONS, own=keys.lfm2),
    "lfm2moe": GgufFamily(
        "Lfm2MoeForCausalLM",
        own_names=(
            *_SHORT_CONVOLUTIONS,
            ("feed_forward.gate.e_score_correction_bias", "exp_probs_b.bias"),
            ("feed_forward.gate.", "ffn_gate_inp."),
        ),
        experts=("w1", "w3", "w2"),
        module="feed_forward",
        own=keys.lfm2,
    ),
    "seed_oss": GgufFamily(
        "SeedOssForCausalLM",
        own_names=(("post_attention_layernorm.", "post_attention_norm."),),
        own=keys.seed_oss,
    ),
    "exaone4": GgufFamily(
        "Exaone4ForCausalLM",
        own_names=_OUTPUT_NORMS,
        own=lambda gguf: {"sliding_window": keys.window_of(gguf), "sliding_window_pattern": 4},
    ),
    "minimax-m2": GgufFamily(
        "MiniMaxM2ForCausalLM",
        own_names=(
            ("block_sparse_moe.gate.e_score_correction_bias", "exp_probs_b.bias"),
            ("block_sparse_moe.gate.", "ffn_gate_inp."),
        ),
        experts=("w1", "w3", "w2"),
        module="block_sparse_moe",
        theta=5e6,
        own=keys.minimax,
    ),
    "olmo2": GgufFamily("Olmo2ForCausalLM", own_names=_OUTPUT_NORMS),
    "olmoe": GgufFamily(
        "OlmoeForCausalLM",
        own_names=(("mlp.gate.", "ffn_gate_inp."),),
        own=lambda gguf: keys.experts(gguf) | {"norm_topk_prob": False},
    ),
    "gpt-oss": GgufFamily(
        "GptOssForCausalLM",
        own_names=(
            ("self_attn.sinks", "attn_sinks.weight"),
            ("mlp.router.", "ffn_gate_inp."),
            ("post_attention_layernorm.", "post_attention_norm."),
        ),
        own=keys.gpt_oss,
    ),
    "deepseek2": GgufFamily("DeepseekV2ForCausalLM", own_names=_LATENTS, own=keys.deepseek),
    "kimi-linear": GgufFamily(
        "KimiLinearForCausalLM",
        own_names=_KIMI,
        experts=("w1", "w3", "w2"),
        module="block_sparse_moe",
        is_rotated=False,
        own=keys.kimi,
    ),
    "mistral4": GgufFamily("Mistral4ForCausalLM", own_names=_LATENTS, own=keys.deepseek),
    "glm4": GgufFamily(
        "Glm4ForCausalLM",
        own_names=(
            ("mlp.gate_up_proj.", "ffn_up."),
            ("post_self_attn_layernorm.", "post_attention_norm."),
            ("post_mlp_layernorm.", "post_ffw_norm."),
        ),
    ),
    "chatglm": GgufFamily(
        "ChatGLMModel", own_names=(_MERGED, ("mlp.gate_up_proj.", "ffn_up.")), own=keys.chatglm
    ),
    "internlm2": GgufFamily("InternLM2ForCausalLM", has_neighbours=True),
    "baichuan": GgufFamily("BaichuanForCausalLM", has_neighbours=True, own=keys.baichuan),
    "falcon": GgufFamily("FalconForCausalLM", own_names=(_MERGED,), own=keys.falcon),
    "gptneox": GgufFamily("GPTNeoXForCausalLM", own_names=(_MERGED,), own=keys.gpt_neox),
    "phi2": GgufFamily("PhiForCausalLM"),
    "bloom": GgufFamily(
        "BloomForCausalLM", own_names=(_MERGED, ("model.embed_norm.", "token_embd_norm."))
    ),
    "mpt": GgufFamily("MptForCausalLM", own_names=(_MERGED,), own=keys.mpt),
    "starcoder": GgufFamily(
        "GPTBigCodeForCausalLM", own_names=(_MERGED, ("model.embed_positions.", "position_embd."))
    ),
    "smollm3": GgufFamily(
        "SmolLM3ForCausalLM", has_neighbours=True, own=lambda gguf: {"no_rope_layer_interval": 4}
    ),
    "starcoder2": GgufFamily("Starcoder2ForCausalLM", own=keys.starcoder2),
}
"""By `general.architecture`; Mistral's is `llama`."""


def family_of(gguf: GgufFile) -> GgufFamily:
    """Return a file's family. Raises ModelLoadError: it is none that can be served."""
    name = gguf.string("general.architecture")
    if name == "llama" and gguf.integer("llama.expert_count", default=0):
        return MIXTRAL
    if name == "olmo2" and keys.window_of(gguf) is not None:
        return OLMO3
    if name == "deepseek2" and keys.has_sigmoid(gguf):
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


_WORDS = {
    "vocab_size": ("padded_vocab_size",),
    "hidden_size": ("n_embd", "d_model"),
    "intermediate_size": ("ffn_hidden_size", "n_inner"),
    "num_hidden_layers": ("num_layers", "n_layer", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("multi_query_group_num",),
    "max_position_embeddings": ("seq_length", "n_positions", "max_seq_len"),
    "rms_norm_eps": ("layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_epsilon"),
}
"""Words of config.json, and words that some families have in their place."""


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
    found = {
        "architectures": [family.architecture],
        "vocab_size": gguf.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "head_dim": head_dim,
        "rms_norm_eps": keys.epsilon_of(gguf),
        "max_position_embeddings": gguf.integer(".context_length"),
        "rope_parameters": rope_of(gguf, rotated, family.theta) if family.is_rotated else None,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": gguf.has("attn_q.bias"),
        "mlp_bias": gguf.has("ffn_up.bias"),
        "dtype": "bfloat16",
        **own,
    }
    return found | {other: found[word] for word, others in _WORDS.items() for other in others}


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
