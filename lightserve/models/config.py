"""A Hugging Face `config.json`, read and checked. Torch-free.

Imported by the supervisor, the router and the frontends as well as by the workers.
`auto_map` and every other key that names code are never looked at.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightserve.errors import ConfigError, ModelLoadError
from lightserve.models import mamba_families, own_config, plain_config, recurrent_families
from lightserve.models.architectures import (
    CROSS_ENCODERS,
    HEADLESS,
    THETAS,
    Architecture,
    Gemma4Config,
    LayerShape,
    fields_of,
    parse_gemma4,
    sliding_windows,
)
from lightserve.models.encoder_config import Encoder, parse_bert, parse_nomic_bert, parse_roberta
from lightserve.models.json_fields import JsonFields, read_json_object
from lightserve.models.latent_config import (
    LatentConfig,
    parse_deepseek_v2,
    parse_deepseek_v3,
    parse_glm_lite,
    parse_mistral4,
)
from lightserve.models.moe_config import MoeConfig, parse_gpt_oss, parse_llama4
from lightserve.models.plain_config import NormWeights, rotary_fields, sizes_of
from lightserve.models.recurrent_config import RecurrentConfig
from lightserve.models.rope import (
    DEFAULT_THETA,
    DynamicRope,
    LinearRope,
    QueryGrowth,
    RopeConfig,
    YarnRope,
    parse_query_growth,
)
from lightserve.models.vision_config import VisionConfig, text_part
from lightserve.models.vision_families import parse_vision
from lightserve.models.weight_format import WeightFormat, is_mxfp4, parse_weight_format
from lightserve.types import Activation

CONFIG_FILE = "config.json"
MODULES_FILE = "modules.json"
"""File of Sentence Transformers: the steps behind the transformer that make a vector of a
prompt, …"""
LOGIT_SCORE = "LogitScore"
"""… or, with a module of this kind, the score of a pair."""
DTYPE_NAMES = ("float32", "bfloat16", "float16")


_GLM = (Architecture.GLM, Architecture.GLM4)
_GEMMA = (Architecture.GEMMA, Architecture.GEMMA2, Architecture.GEMMA3)
_OLMO = (Architecture.OLMO2, Architecture.OLMO3)
_BIASED = (
    Architecture.LLAMA,
    Architecture.QWEN3,
    Architecture.GRANITE,
    Architecture.SMOLLM3,
    *_OLMO,
    Architecture.QWEN3_MOE,
    Architecture.OLMOE,
    *_GEMMA,
)
"""Families whose `attention_bias` is that of all four products, …"""
_QKV_BIASED = (*_GLM, Architecture.GLM4_MOE, Architecture.SEED_OSS)
"""… and families where it is that of queries, keys and values."""
_HEAD_NORM = (Architecture.QWEN3, Architecture.GEMMA3, Architecture.QWEN3_MOE, Architecture.EXAONE4)
_HEADS_OF_128 = (
    Architecture.QWEN3,
    Architecture.MINISTRAL3,
    Architecture.SEED_OSS,
    Architecture.MINIMAX_M2,
    *_GLM,
)
_HEADS_ALONE = (
    Architecture.LLAMA,
    Architecture.PHI3,
    Architecture.GRANITE,
    *_OLMO,
    Architecture.OLMOE,
)
"""Families each of whose query heads has a KV head of its own where the file does not say."""
_PARTLY_ROTATED = (*_GLM, Architecture.GLM4_MOE, Architecture.PHI3, Architecture.MINIMAX_M2)
_WITH_DRAFT_HEADS = (Architecture.DEEPSEEK_V3, Architecture.GLM4_MOE, Architecture.GLM4_MOE_LITE)
"""Families whose files may have a layer that guesses tokens."""
_PLAIN = {
    Architecture.GPT_NEOX: plain_config.parse_gpt_neox,
    Architecture.PHI: plain_config.parse_phi,
    Architecture.STARCODER2: plain_config.parse_starcoder2,
    Architecture.OPT: plain_config.parse_opt,
    Architecture.FALCON: plain_config.parse_falcon,
    Architecture.GPT_OSS: parse_gpt_oss,
    Architecture.DEEPSEEK_V2: parse_deepseek_v2,
    Architecture.DEEPSEEK_V3: parse_deepseek_v3,
    Architecture.GLM4_MOE_LITE: parse_glm_lite,
    Architecture.MISTRAL4: parse_mistral4,
    Architecture.LLAMA4: parse_llama4,
    Architecture.GEMMA4: parse_gemma4,
    Architecture.BLOOM: plain_config.parse_bloom,
    Architecture.MPT: plain_config.parse_mpt,
    Architecture.GPT_BIGCODE: plain_config.parse_gpt_bigcode,
    Architecture.QWEN: own_config.parse_qwen1,
    Architecture.BAICHUAN: own_config.parse_baichuan,
    Architecture.BAICHUAN_FIRST: own_config.parse_baichuan,
    Architecture.INTERNLM: own_config.parse_internlm,
    Architecture.INTERNLM2: own_config.parse_internlm2,
    Architecture.CHATGLM: own_config.parse_chatglm,
    Architecture.CHATGLM_WHOLE: own_config.parse_chatglm,
    Architecture.QWEN3_NEXT: recurrent_families.parse_qwen3_next,
    Architecture.GRANITE_HYBRID: mamba_families.parse_granite_hybrid,
    Architecture.FALCON_H1: mamba_families.parse_falcon_h1,
    Architecture.NEMOTRON_H: mamba_families.parse_nemotron_h,
    Architecture.QWEN3_5: recurrent_families.parse_qwen3_5,
    Architecture.QWEN3_5_MOE: recurrent_families.parse_qwen3_5_moe,
    Architecture.OLMO_HYBRID: recurrent_families.parse_olmo_hybrid,
    Architecture.KIMI_LINEAR: recurrent_families.parse_kimi_linear,
    Architecture.LFM2: recurrent_families.parse_lfm2,
    Architecture.LFM2_MOE: recurrent_families.parse_lfm2_moe,
    Architecture.BERT: parse_bert,
    Architecture.ROBERTA: parse_roberta,
    Architecture.XLM_ROBERTA: parse_roberta,
    Architecture.NOMIC_BERT: parse_nomic_bert,
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and switches of one model, of whatever family; all checked against each other."""

    architecture: Architecture
    encoder: Encoder | None = None
    """Set for a model whose tokens see all others: a prompt is computed whole, and has no KV."""
    is_headless: bool = False
    """Whether a decoder is for vectors of prompts alone, and needs no LM head of its own."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    """A divisor of `num_heads`."""
    head_dim: int
    """Even; not necessarily hidden_size / num_heads."""
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether queries and keys are normalised per head before the rotary embedding."""
    latent: LatentConfig | None = None
    """Attention over latent vectors; `head_dim` is the size of a token's kept vector then. None:
    no."""
    has_sinks: bool = False
    """Whether the softmax of attention has a score more for each head."""
    has_whole_qk_norm: bool = False
    """Whether all heads together are."""
    rotary_share: int | None = None
    """Number of a head's dimensions that are rotated; None: all."""
    local_rope: RopeConfig | None = None
    """Rotary embedding of layers with a window; None: the same."""
    rotates_neighbours: bool = False
    """Whether the file has a rotated pair as dimensions 2i and 2i + 1, not half a head apart."""
    query_growth: QueryGrowth | None = None
    """None: queries are the same at every position but for their rotation."""
    unrotated_layers: frozenset[int] = frozenset()
    attention_chunk: int | None = None
    """Rotated layers see no further back than the last multiple of this position; None: they do."""
    merged: frozenset[str] = frozenset()
    """Products that the file has as one tensor: `qkv`, `gate_up`, or `grouped_qkv`, where each KV
    head stands behind its query heads."""
    stored_names: tuple[tuple[str, ...], ...] = ()
    """Parts of tensors' names here, and the file's parts in their places, one after the other: one
    part, or several that files may have."""
    layer_norm_bias: bool | None = None
    """Norms are LayerNorm with biases (true) or without (false), or RMS norms (None); either kind
    adds `rms_norm_eps`."""
    has_embedding_norm: bool = False
    """Whether embeddings are normalised before the first layer."""
    activation: Activation | None = None
    """Activation of feed-forward blocks without a gate; None: they have one."""
    is_parallel: bool = False
    """Whether both blocks of a layer read the same sum, and add to it."""
    is_post_norm: bool = False
    """Whether norms stand behind the sums: the model's last norm is that of its last layer."""
    word_size: int | None = None
    """Numbers of a token's embedding; None: as many as layers have."""
    position_offset: int | None = None
    """Place of the first learned position in their table; None: there is no table."""
    alibi_slopes: tuple[float, ...] | None = None
    """One per head, see `ScoreMod`; None: positions do not change scores."""
    attention_soft_cap: float | None = None
    """Cap of scores, see `ScoreMod`."""
    logits_soft_cap: float | None = None
    """Cap of logits, applied in the same way."""
    has_normalised_head: bool = False
    """Whether each token's row of the output layer is divided by its length when it is read."""
    lm_head_bias: bool = False
    has_gelu: bool = False
    """Whether the gate is GELU, by its approximation with tanh, in place of SiLU."""
    norm_weights: NormWeights = NormWeights.PLAIN
    layer_norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    embedding_multiplier: float | None = 1.0
    """None: the root of `hidden_size`, rounded to the model's type."""
    residual_multiplier: float = 1.0
    """Factor of the results that attention and feed-forward add."""
    attention_scale: float | None = None
    """Factor of products of queries and keys; None: head_dim ** -0.5."""
    logits_divisor: float = 1.0
    moe: MoeConfig | None = None
    """None: no layer has experts."""
    recurrent: RecurrentConfig | None = None
    """The layers that keep a state in place of keys and values; None: there are none."""
    gemma4: Gemma4Config | None = None
    """Kinds of layers with heads of their own; None: the heads of all layers are alike."""
    feed_forward_layers: frozenset[int] = frozenset()
    """Layers that are a feed-forward block alone: the others have none. Empty: all have both."""
    has_output_gate: bool = False
    """Results of attention are multiplied by sigmoids that are made beside the queries."""
    tie_word_embeddings: bool
    sliding_windows: tuple[int | None, ...]
    """One per layer; None: the layer sees everything."""
    dtype: str | None
    """One of DTYPE_NAMES as stated by the model, None when it states none."""
    weight_format: WeightFormat | None = None
    """Format of weights that are quantised in the files; None: there are none."""
    vision: VisionConfig | None = None
    """The encoder of images; None: the model reads text alone."""
    has_draft_head: bool = False
    """Whether the last of the layers is none of the model's own, but guesses the token behind the
    next one."""

    def shape_of(self, layer: int) -> LayerShape:
        """Return what one layer has."""
        own, states = self.gemma4, self.recurrent
        if states is not None and layer not in states.layers:
            states = None
        shape = LayerShape(
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rotary_dim=self.rotary_share or self.head_dim,
            products="qkv",
            kv_source=layer,
            inner_size=self.intermediate_size,
            states=states,
            has_attention=layer not in self.feed_forward_layers
            and (states is None or states.beside is not None),
            norms=(states and states.norms) or self.layer_norms,
        )
        if own is None:
            return shape
        windows = self.sliding_windows
        if windows[layer] is None:
            shape = shape._replace(
                num_kv_heads=own.num_global_kv_heads,
                head_dim=own.global_head_dim,
                rotary_dim=own.global_head_dim,
                products="qkv" if own.has_global_values else "qkk",
            )
        if layer < (first := self.num_layers - own.num_sharing):
            return shape
        return shape._replace(
            products="q",
            kv_source=next(n for n in range(first - 1, -1, -1) if windows[n] == windows[layer]),
            inner_size=self.intermediate_size * (1 + own.widens_sharing),
        )

    @property
    def kv_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the layers with keys and values of their own, by the sizes of their heads."""
        groups: dict[tuple[int, int], list[int]] = {}
        for layer in range(self.num_layers):
            shape = self.shape_of(layer)
            if shape.has_attention and shape.kv_source == layer:
                groups.setdefault((shape.num_kv_heads, shape.head_dim), []).append(layer)
        return tuple(map(tuple, groups.values()))

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """Return the layers with keys and values of their own, in the order of pools."""
        return tuple(layer for group in self.kv_groups for layer in group)

    @property
    def has_blocks(self) -> bool:
        """Whether there are layers with a block of `intermediate_size`."""
        moe, blocks = self.moe, self.feed_forward_layers or frozenset(range(self.num_layers))
        return moe is None or moe.is_beside or not blocks <= moe.layers

    @property
    def embedding_size(self) -> int:
        """Numbers of an embedding, and of a row of the output layer."""
        return self.word_size or self.hidden_size

    @property
    def max_context_len(self) -> int:
        """The longest sequence that may be asked for with --max-model-len.

        The default is `max_position_embeddings`; RoPE kinds that are configured beside an
        unchanged `max_position_embeddings` (YaRN as Qwen documents it, linear, dynamic) can be
        stretched by their factor.
        """
        match self.rope:
            case LinearRope(factor=factor) | DynamicRope(factor=factor):
                stretched = int(self.max_position_embeddings * factor)
            case YarnRope(factor=factor, original_max_position_embeddings=original):
                stretched = int(original * factor)
            case _:
                stretched = 0
        return max(self.max_position_embeddings, stretched)


def load_model_config(path: Path, *, has_draft_head: bool = False) -> ModelConfig:
    """Read and check `path/config.json`; with the layer that guesses tokens, if that is asked for.

    Raises:
        ModelLoadError: names file and key.
    """
    file = path / CONFIG_FILE
    fields = JsonFields(file, read_json_object(file))
    config = _model_config(path, fields)
    return _with_draft_head(config, fields) if has_draft_head else config


def _with_draft_head(config: ModelConfig, fields: JsonFields) -> ModelConfig:
    """Return a model with the first of the layers behind its last that guess tokens."""
    if config.architecture not in _WITH_DRAFT_HEADS:
        known = ", ".join(_WITH_DRAFT_HEADS)
        complaint = f"with --speculation mtp must be one of {known}, got {config.architecture}"
        raise fields.error("architectures", complaint)
    if not fields.integer(key := "num_nextn_predict_layers", default=0, low=0):
        raise fields.error(key, "must be at least 1 with --speculation mtp, got 0")
    layer, moe = config.num_layers, config.moe
    return replace(
        config,
        num_layers=layer + 1,
        sliding_windows=(*config.sliding_windows, None),
        moe=None if moe is None else replace(moe, layers=moe.layers | {layer}),
        has_draft_head=True,
    )


def _model_config(path: Path, fields: JsonFields) -> ModelConfig:
    architecture = _architecture(fields)
    weight_format = None
    if architecture is not Architecture.GPT_OSS or not is_mxfp4(fields):
        weight_format = parse_weight_format(fields)
    is_headless = fields.array("architectures")[0] in HEADLESS or _is_for_vectors(path)
    vision = parse_vision(fields, architecture)
    architecture, fields = text_part(fields, architecture, _dtype(fields))
    if architecture in _PLAIN:
        own = _PLAIN[architecture](fields)
        return ModelConfig(
            architecture=architecture,
            dtype=_dtype(fields),
            weight_format=weight_format,
            vision=vision,
            **own,
        )
    _check_activation(fields, is_gemma=architecture in _GEMMA)
    is_glm_moe = architecture is Architecture.GLM4_MOE
    is_seed = architecture is Architecture.SEED_OSS
    attention_bias = fields.boolean("attention_bias", default=architecture in _GLM or is_seed)
    reads_mlp_bias = architecture in (
        Architecture.LLAMA,
        Architecture.GRANITE,
        Architecture.SMOLLM3,
        Architecture.SEED_OSS,
    )
    has_all_biases = architecture in _BIASED and attention_bias
    sizes = sizes_of(fields.with_defaults(_defaults(fields, architecture)))
    rotary = rotary_fields(
        fields,
        sizes,
        share=_rotated_share(fields, architecture),
        theta=THETAS.get(architecture, DEFAULT_THETA),
        is_phi=architecture is Architecture.PHI3,
    )
    if rotary["rotary_share"] < sizes["head_dim"] and architecture not in _PARTLY_ROTATED:
        raise fields.error("partial_rotary_factor", "must be 1 in this architecture")
    num_layers = sizes["num_layers"]
    own = {
        "sliding_windows": sliding_windows(fields, architecture, num_layers),
        "tie_word_embeddings": is_headless or sizes["tie_word_embeddings"],
        **rotary,
        **fields_of(fields, architecture, num_layers),
    }
    return ModelConfig(
        architecture=architecture,
        intermediate_size=fields.integer("intermediate_size"),
        qkv_bias=architecture is Architecture.QWEN2
        or has_all_biases
        or (architecture in _QKV_BIASED and attention_bias)
        or (architecture is Architecture.QWEN2_MOE and fields.boolean("qkv_bias", default=True)),
        attention_output_bias=has_all_biases
        or (is_seed and fields.boolean("attention_out_bias", default=False)),
        mlp_bias=reads_mlp_bias and fields.boolean("mlp_bias", default=False),
        qk_norm=architecture in _HEAD_NORM
        or (is_glm_moe and fields.boolean("use_qk_norm", default=False)),
        query_growth=parse_query_growth(fields, sizes["max_position_embeddings"])
        if architecture is Architecture.MINISTRAL3
        else None,
        is_headless=is_headless,
        dtype=_dtype(fields),
        weight_format=weight_format,
        vision=vision,
        **(sizes | own),
    )


def _defaults(fields: JsonFields, architecture: Architecture) -> dict[str, Any]:
    """Return sizes that transformers takes where their config is silent."""
    is_tied = architecture in (*_GEMMA, Architecture.SMOLLM3)
    defaults: dict[str, Any] = {"tie_word_embeddings": is_tied}
    if architecture in _GEMMA:
        defaults["head_dim"] = 256
    elif architecture in _HEADS_OF_128:
        defaults["head_dim"] = 128
    if architecture in _HEADS_ALONE:
        defaults["num_key_value_heads"] = fields.integer("num_attention_heads")
    return defaults


def _rotated_share(fields: JsonFields, architecture: Architecture) -> float:
    """Return the share of a head that is rotated where `partial_rotary_factor` is absent."""
    if architecture is Architecture.MINIMAX_M2 and fields.has("rotary_dim"):
        return fields.integer("rotary_dim") / fields.integer("head_dim", default=128)
    return 0.5 if architecture in (*_GLM, Architecture.GLM4_MOE) else 1.0


def _is_for_vectors(path: Path) -> bool:
    """Whether Sentence Transformers has saved a model in this directory that makes vectors."""
    file = path / MODULES_FILE
    return file.is_file() and LOGIT_SCORE not in file.read_text(errors="replace")


def num_ids(config: ModelConfig) -> int:
    """Return how many ids there are that a prompt may have, see `Encoder.tells_pairs`."""
    tells_pairs = config.encoder is not None and config.encoder.tells_pairs
    return (1 + tells_pairs) * config.vocab_size


def _check_activation(fields: JsonFields, *, is_gemma: bool) -> None:
    key = "hidden_activation" if fields.has("hidden_activation") else "hidden_act"
    # Gemma's first files say `gelu` and mean its approximation.
    fields.only(key, *(("gelu_pytorch_tanh", "gelu") if is_gemma else ("silu",)))


def resolve_dtype(
    requested: str, config: ModelConfig, *, device_type: str, batch_invariant: bool = False
) -> str:
    """Return the type of weights and KV for --dtype `requested`, one of DTYPE_NAMES.

    `auto` is the model's own type (float32 when it states none), float32 under
    --batch-invariant. On a GPU ("cuda") a model of float32 becomes bfloat16: there float32 takes
    twice the memory, and its products none of the fast units. On the CPU a quantised model of
    float16 does, as the products that keep its weights as they are have no float16.
    """
    if requested != "auto":
        return requested
    own = "float32" if batch_invariant else config.dtype or "float32"
    if device_type == "cpu" and own == "float16" and config.weight_format is not None:
        return "bfloat16"
    return "bfloat16" if device_type == "cuda" and own == "float32" else own


def resolve_context_len(requested: int, config: ModelConfig) -> int:
    """Return the longest sequence that is served, for --max-model-len `requested` (0: auto).

    Raises:
        ConfigError: more than the model can be stretched to.
    """
    if requested > config.max_context_len:
        raise ConfigError(
            f"--max-model-len must be at most the model's {config.max_context_len}, got {requested}"
        )
    return requested or config.max_position_embeddings


def check_tp(config: ModelConfig, tp: int) -> None:
    """Check that the model can be split over `tp` ranks.

    Heads and the intermediate size must divide; KV heads must divide, or, when there are fewer
    than ranks, `tp` must be a multiple of them (each is then replicated). The vocabulary is
    padded and need not divide.

    Raises:
        ModelLoadError: a size does not divide; names both numbers.
    """
    sizes = [("num_attention_heads", config.num_heads)]
    if config.has_blocks:
        sizes.append(("intermediate_size", config.intermediate_size))
    if (moe := config.moe) is not None:
        sizes.append((moe.size_key, moe.intermediate_size))
        sizes.append(("shared_expert_intermediate_size", moe.shared_size))
    if config.recurrent is not None:
        sizes += config.recurrent.divided_sizes().items()
    for key, size in sizes:
        if size % tp:
            raise ModelLoadError(
                f"{CONFIG_FILE}: key {key!r} is {size}, not divisible by --tp {tp}"
            )
    heads = {"num_key_value_heads": config.num_kv_heads}
    if config.gemma4 is not None:
        heads["num_global_key_value_heads"] = config.gemma4.num_global_kv_heads
    for key, num_kv_heads in heads.items():
        if num_kv_heads % tp and tp % num_kv_heads:
            raise ModelLoadError(
                f"{CONFIG_FILE}: key {key!r} is {num_kv_heads}, which neither divides nor is"
                f" divisible by --tp {tp}"
            )


def _architecture(fields: JsonFields) -> Architecture:
    names = fields.array("architectures")
    others = HEADLESS | CROSS_ENCODERS
    known = ", ".join([*Architecture, *others])
    if len(names) != 1 or not isinstance(names[0], str):
        raise fields.error("architectures", f"must name one architecture, got {names!r}")
    try:
        return others.get(names[0]) or Architecture(names[0])
    except ValueError:
        raise fields.error("architectures", f"names {names[0]!r}; supported are {known}") from None


def _dtype(fields: JsonFields) -> str | None:
    key = "dtype" if fields.has("dtype") else "torch_dtype"
    if not fields.has(key):
        return None
    name = fields.string(key).removeprefix("torch.")
    if name not in DTYPE_NAMES:
        raise fields.error(key, f"must be one of {', '.join(DTYPE_NAMES)}, got {name!r}")
    return name
