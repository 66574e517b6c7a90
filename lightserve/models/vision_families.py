"""Encoders of images by family, as `config.json` says. Torch-free.

LLaVA-1.5 (Liu et al., "Improved Baselines with Visual Instruction Tuning", 2023) has the encoder of
CLIP, and two products behind it; behind Qwen-VL's (Bai et al., 2023) are queries that attend to all
of an image. Qwen2-VL (Wang et al., 2024), Qwen2.5-VL and Qwen3-VL take images of any size, rotate
by a patch's row and column, and make one embedding of four patches.
"""

from __future__ import annotations

import math
from typing import Any

from lightserve.models.architectures import Architecture
from lightserve.models.image_processor import (
    CLIP,
    GEMMA3,
    GEMMA4,
    LLAVA,
    PIXTRAL,
    QWEN,
    TILES,
    clip_processor,
    has_image_processor,
    load_image_processor,
)
from lightserve.models.json_fields import JsonFields
from lightserve.models.plain_config import MAX_LAYERS
from lightserve.models.rope import parse_axes
from lightserve.models.vision_config import (
    EncoderLayers,
    ImageInPrompt,
    MeanProjector,
    Normed,
    PairProjector,
    PatchRope,
    PatchWeights,
    QueryProjector,
    ScaledMeanProjector,
    VisionConfig,
    text_fields,
    text_part,
)
from lightserve.types import Activation

VISION_KEY = "visual"
"""Key of `config.json` under which the first Qwen-VL has its encoder."""
_PAIR = (
    ("vision.projector.inner", "vision.projector.linear_1"),
    ("vision.projector.outer", "vision.projector.linear_2"),
)
_BLOCK = (("up_proj", "fc1"), ("down_proj", "fc2"))
_ACTIVATIONS = {
    "quick_gelu": Activation.QUICK_GELU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}


def parse_vision(fields: JsonFields, architecture: Architecture) -> VisionConfig | None:
    """Return the encoder of a model; None: it sees no images, or its text part alone is served.

    `fields` are those of the whole file. Raises ModelLoadError naming the key.
    """
    match architecture:
        case Architecture.LLAVA:
            own = fields.child("vision_config") if fields.has("vision_config") else fields
            is_pixtral = own.string("model_type", default="") == "pixtral"
            if is_pixtral:
                return _parse_pixtral(fields, is_merged=False)
            return _parse_llava(fields)
        case Architecture.MISTRAL3_WHOLE:
            return _parse_pixtral(fields, is_merged=True) if _sees(fields) else None
        case Architecture.INTERNVL:
            return _parse_internvl(fields)
        case Architecture.GEMMA3_WHOLE:
            return _parse_gemma3(fields) if _sees(fields) else None
        case Architecture.QWEN:
            return _parse_qwen_vl(fields) if fields.has(VISION_KEY) else None
        case Architecture.GEMMA4_WHOLE:
            return _parse_gemma4(fields) if _sees(fields) else None
        case Architecture.QWEN2_VL | Architecture.QWEN2_5_VL | Architecture.QWEN3_VL:
            return _parse_qwen(fields, architecture)
        case Architecture.QWEN3_5_WHOLE | Architecture.QWEN3_5_MOE_WHOLE:
            return _parse_qwen(fields, architecture) if _sees(fields) else None
        case _:
            return None


def _sees(fields: JsonFields) -> bool:
    """Whether a model has all that images need, and not its text part alone."""
    return fields.has("vision_config") and has_image_processor(fields.path.parent)


_STRATEGY = "vision_feature_select_strategy"


def _parse_llava(fields: JsonFields) -> VisionConfig:
    own = _vision_fields(fields, "clip_vision_model")
    hidden, heads = _heads(own, "hidden_size", 1024, "num_attention_heads")
    num_layers = own.integer("num_hidden_layers", default=24, high=MAX_LAYERS)
    strategy = fields.only(_STRATEGY, "default", "full")
    image_size = own.integer("image_size", default=336, high=4096)
    patch_size = own.integer("patch_size", default=14, high=4096)
    if not (num_patches := (image_size // patch_size) ** 2):
        raise own.error("image_size", f"must be at least patch_size {patch_size}, got {image_size}")
    return VisionConfig(
        placeholder=_placeholder(fields, 32_000),
        processor=load_image_processor(fields.path.parent, CLIP, LLAVA, image_size=image_size),
        names=_LLAVA_NAMES,
        prefixes=_tower_prefixes("vision_model.", ""),
        hidden_size=hidden,
        layers=EncoderLayers(
            count=_num_used_layers(fields, num_layers),
            num_heads=heads,
            intermediate_size=own.integer("intermediate_size", default=4096),
            norm_eps=own.number("layer_norm_eps", default=1e-5),
            activation=own.choice("hidden_act", _ACTIVATIONS, "quick_gelu"),
        ),
        projector=PairProjector(
            activation=fields.choice("projector_hidden_act", _ACTIVATIONS, "gelu"),
            has_bias=fields.boolean("multimodal_projector_bias", default=True),
        ),
        patch_size=patch_size,
        has_class=True,
        drops_class=strategy == "default",
        num_positions=1 + num_patches,
        has_first_norm=True,
    )


_LLAVA_NAMES = (
    *_PAIR,
    ("vision.class", "vision.embeddings.class_embedding"),
    ("vision.patches", "vision.embeddings.patch_embedding"),
    ("vision.positions", "vision.embeddings.position_embedding"),
    ("vision.first_norm", "vision.pre_layrnorm"),
    ("vision.layers", "vision.encoder.layers"),
    (".norm", ".layer_norm"),
    ("self_attn.o_", "self_attn.out_"),
    *_BLOCK,
)


def _tower_prefixes(*inner: str) -> tuple[tuple[tuple[str, str], ...], ...]:
    """Return `VisionConfig.prefixes`; `inner`: each what may stand within the tower's names."""
    return tuple(
        (
            ("vision.projector.", f"{whole}multi_modal_projector."),
            ("vision.", f"{whole}vision_tower.{own}"),
        )
        for whole in ("", "model.")
        for own in inner
    )


def _parse_pixtral(fields: JsonFields, *, is_merged: bool) -> VisionConfig:
    """Return the encoder of Pixtral (Agrawal et al., 2024, section 2.2).

    `is_merged`: whether several patches make an embedding, as in Mistral 3.
    """
    if not is_merged and (strategy := fields.string(_STRATEGY, default="default")) != "full":
        raise fields.error(_STRATEGY, f"must be 'full' with Pixtral's encoder, got {strategy!r}")
    _, text = text_part(
        fields, Architecture.MISTRAL3_WHOLE if is_merged else Architecture.LLAVA, None
    )
    own = _vision_fields(fields, "pixtral")
    hidden, heads = _heads(own, "hidden_size", 1024, "num_attention_heads")
    _check_axes(own, "num_attention_heads", hidden, heads)
    num_layers = own.integer("num_hidden_layers", default=24, high=MAX_LAYERS)
    merge = fields.integer("spatial_merge_size", default=2, high=16) if is_merged else 1
    patch_size = own.integer("patch_size", default=16, high=4096)
    rope = own.child("rope_parameters") if own.has("rope_parameters") else own
    return VisionConfig(
        placeholder=_placeholder(fields, 10),
        processor=load_image_processor(fields.path.parent, PIXTRAL, factor=patch_size * merge),
        names=_PIXTRAL_NAMES,
        prefixes=_tower_prefixes(""),
        hidden_size=hidden,
        layers=EncoderLayers(
            count=_num_used_layers(fields, num_layers, default=-1 if is_merged else -2),
            num_heads=heads,
            intermediate_size=own.integer("intermediate_size", default=4096),
            norm_eps=1e-5,
            activation=_gate(own, "hidden_act", "gelu"),
            is_rms=True,
            is_rms_around=True,
            is_gated=True,
            qkv_bias=False,
            has_bias=False,
        ),
        projector=PairProjector(
            normed=Normed.PATCH if is_merged else Normed.NOTHING,
            norm_eps=text.number("rms_norm_eps") if is_merged else None,
            has_merger=is_merged,
            activation=fields.choice("projector_hidden_act", _ACTIVATIONS, "gelu"),
            has_bias=fields.boolean("multimodal_projector_bias", default=not is_merged),
        ),
        patch_size=patch_size,
        merge=merge,
        has_first_norm=True,
        rope=PatchRope(rope.number("rope_theta", default=10_000.0), alternates=True),
        prompt=ImageInPrompt("[IMG]", "[IMG][IMG_END]", row_break="[IMG_BREAK]"),
    )


_PIXTRAL_NAMES = (
    ("vision.projector.merger", "vision.projector.patch_merger.merging_layer"),
    *_PAIR,
    ("vision.patches", "vision.patch_conv"),
    ("vision.first_norm", "vision.ln_pre"),
    ("vision.layers", "vision.transformer.layers"),
    (".norm1", ".attention_norm"),
    (".norm2", ".ffn_norm"),
    ("self_attn", "attention"),
    (".mlp.", ".feed_forward."),
)


def _parse_internvl(fields: JsonFields) -> VisionConfig:
    """Return the encoder of InternVL (Chen et al., 2024), which sees a picture in tiles."""
    own = _vision_fields(fields, "internvl_vision")
    norm = own.only("norm_type", "layer_norm", "rms_norm")
    fields.only(_STRATEGY, "default")
    fields.only("downsample_ratio", 0.5)
    hidden, heads = _heads(own, "hidden_size", 1024, "num_attention_heads")
    num_layers = own.integer("num_hidden_layers", default=24, high=MAX_LAYERS)
    count = _num_used_layers(fields, num_layers, default=-1)
    is_last = fields.integer("vision_feature_layer", default=-1, low=-num_layers - 1) == -1
    patch_size, image_size = _side(own, "patch_size", 14), _side(own, "image_size", 448)
    if image_size % (2 * patch_size):
        raise own.error("image_size", f"must be a multiple of {2 * patch_size}, got {image_size}")
    return VisionConfig(
        placeholder=_placeholder(fields, 151_667),
        processor=load_image_processor(fields.path.parent, TILES, image_size=image_size),
        names=_INTERNVL_NAMES,
        prefixes=_tower_prefixes(""),
        hidden_size=hidden,
        layers=EncoderLayers(
            count=count,
            num_heads=heads,
            intermediate_size=own.integer("intermediate_size", default=4096),
            norm_eps=own.number("layer_norm_eps", default=1e-6),
            activation=own.choice("hidden_act", _ACTIVATIONS, "gelu"),
            qkv_bias=own.boolean("attention_bias", default=False),
            has_scales=True,
            is_rms=norm == "rms_norm",
            qk_norm_eps=1e-6 if own.boolean("use_qk_norm", default=False) else None,
        ),
        projector=PairProjector(
            normed=Normed.SQUARE,
            norm_eps=1e-5,
            activation=fields.choice("projector_hidden_act", _ACTIVATIONS, "gelu"),
            has_bias=True,
        ),
        patch_size=patch_size,
        merge=2,
        patches=PatchWeights(has_bias=True),
        has_class=True,
        drops_class=True,
        num_positions=1 + (image_size // patch_size) ** 2,
        is_batched=True,
        has_last_norm=is_last and not own.boolean("use_mean_pooling", default=True),
        prompt=ImageInPrompt("<IMG_CONTEXT>", "<img><IMG_CONTEXT></img>"),
    )


_INTERNVL_NAMES = (
    ("vision.projector.norm", "vision.projector.layer_norm"),
    *_PAIR,
    ("vision.class", "vision.embeddings.cls_token"),
    ("vision.patches", "vision.embeddings.patch_embeddings.projection"),
    ("vision.positions.weight", "vision.embeddings.position_embeddings"),
    ("vision.last_norm", "vision.layernorm"),
    ("vision.layers", "vision.encoder.layer"),
    (".norm1", ".layernorm_before"),
    (".norm2", ".layernorm_after"),
    (".scale1", ".lambda_1"),
    (".scale2", ".lambda_2"),
    ("self_attn.o_proj", "self_attn.projection_layer"),
    ("self_attn", "attention"),
    *_BLOCK,
)


def _parse_gemma3(fields: JsonFields) -> VisionConfig:
    """Return the encoder of Gemma 3, SigLIP (Gemma Team, 2025, section 2.1)."""
    own = _vision_fields(fields, "siglip_vision_model")
    hidden, heads = _heads(own, "hidden_size", 768, "num_attention_heads", num_heads=12)
    image_size = own.integer("image_size", default=224, high=4096)
    patch_size = own.integer("patch_size", default=16, high=4096)
    num_tokens, side = fields.integer("mm_tokens_per_image", default=256), image_size // patch_size
    merge = side // math.isqrt(num_tokens)
    if side * patch_size != image_size or merge**2 * num_tokens != side**2:
        complaint = f"must be that of a grid of {side} x {side} patches pooled by squares"
        raise fields.error("mm_tokens_per_image", f"{complaint}, got {num_tokens}")
    return VisionConfig(
        placeholder=_placeholder(fields, 262_144),
        processor=load_image_processor(fields.path.parent, GEMMA3, image_size=image_size),
        names=_GEMMA3_NAMES,
        prefixes=_tower_prefixes("vision_model.", ""),
        hidden_size=hidden,
        layers=EncoderLayers(
            count=own.integer("num_hidden_layers", default=12, high=MAX_LAYERS),
            num_heads=heads,
            intermediate_size=own.integer("intermediate_size", default=3072),
            norm_eps=own.number("layer_norm_eps", default=1e-6),
            activation=own.choice("hidden_act", _ACTIVATIONS, "gelu_pytorch_tanh"),
        ),
        projector=MeanProjector(),
        patch_size=patch_size,
        merge=merge,
        patches=PatchWeights(has_bias=True),
        num_positions=side**2,
        has_last_norm=True,
        prompt=ImageInPrompt("<start_of_image>", f"\n\n{_GEMMA3_IMAGE}\n\n", sees_itself=True),
    )


_GEMMA3_IMAGE = "<start_of_image><image_soft_token><end_of_image>"
_GEMMA3_NAMES = (
    ("vision.projector.norm", "vision.projector.mm_soft_emb_norm"),
    ("vision.projector.outer.weight", "vision.projector.mm_input_projection_weight"),
    ("vision.patches", "vision.embeddings.patch_embedding"),
    ("vision.positions", "vision.embeddings.position_embedding"),
    ("vision.last_norm", "vision.post_layernorm"),
    ("vision.layers", "vision.encoder.layers"),
    (".norm1", ".layer_norm1"),
    (".norm2", ".layer_norm2"),
    ("self_attn.o_", "self_attn.out_"),
    *_BLOCK,
)


def _parse_qwen_vl(fields: JsonFields) -> VisionConfig:
    """Return the encoder of Qwen-VL (Bai et al., 2023), the first, whose images have one size."""
    own, size = fields.child(VISION_KEY), fields.integer("hidden_size")
    head_dim = 128  # of the queries, in the authors' program
    if (found := own.integer("output_dim", default=512)) != size or size % head_dim:
        complaint = f"must be hidden_size {size} and a multiple of {head_dim}, got {found}"
        raise own.error("output_dim", complaint)
    hidden, heads = _heads(own, "width", None, "heads")
    num_queries = own.integer("n_queries", default=256)
    if math.isqrt(num_queries) ** 2 != num_queries:
        raise own.error("n_queries", f"must be a square number, got {num_queries}")
    patch_size, image_size = _side(own, "patch_size", None), _side(own, "image_size", None)
    if image_size < patch_size:
        raise own.error("image_size", f"must be at least patch_size {patch_size}, got {image_size}")
    return VisionConfig(
        placeholder=own.integer("image_start_id", default=151_857, low=0) + 2,
        processor=clip_processor(image_size),
        names=_QWEN_VL_NAMES,
        prefixes=((("vision.", "transformer.visual."),),),
        hidden_size=hidden,
        layers=EncoderLayers(
            count=own.integer("layers", high=MAX_LAYERS),
            num_heads=heads,
            intermediate_size=int(hidden * own.number("mlp_ratio")),
            norm_eps=1e-6,
            activation=Activation.GELU,
            merged="grouped_qkv",
        ),
        projector=QueryProjector(num_queries=num_queries, num_heads=size // head_dim),
        patch_size=patch_size,
        num_positions=256,
        has_first_norm=True,
        prompt=ImageInPrompt(_QWEN_VL_IMAGE, _QWEN_VL_IMAGE),
    )


_QWEN_VL_IMAGE = "<img><imgpad></img>"
_QWEN_VL_NAMES = (
    ("vision.projector.queries", "vision.attn_pool.query"),
    ("vision.projector.positions", "vision.attn_pool.pos_embed"),
    ("vision.projector.inner", "vision.attn_pool.kv_proj"),
    ("vision.projector.query_norm", "vision.attn_pool.ln_q"),
    ("vision.projector.patch_norm", "vision.attn_pool.ln_kv"),
    ("vision.projector.qkv_", "vision.attn_pool.attn.in_proj_"),
    ("vision.projector.o_proj", "vision.attn_pool.attn.out_proj"),
    ("vision.projector.last_norm", "vision.ln_post"),
    ("vision.projector.outer", "vision.proj"),
    ("vision.patches", "vision.conv1"),
    ("vision.positions.weight", "vision.positional_embedding"),
    ("vision.first_norm", "vision.ln_pre"),
    ("vision.layers", "vision.transformer.resblocks"),
    (".norm1", ".ln_1"),
    (".norm2", ".ln_2"),
    ("self_attn.qkv_proj", "attn.in_proj"),
    ("self_attn.o_proj", "attn.out_proj"),
    ("mlp.up_proj", "mlp.c_fc"),
    ("mlp.down_proj", "mlp.c_proj"),
)


def _parse_gemma4(fields: JsonFields) -> VisionConfig:
    """Return the encoder of Gemma 4, as transformers has it (`Gemma4VisionModel`)."""
    own, text = _vision_fields(fields, "gemma4_vision"), text_fields(fields)
    hidden, heads = _heads(own, "hidden_size", 768, "num_attention_heads", num_heads=12)
    _check_axes(own, "num_attention_heads", hidden, heads)
    own.only("hidden_activation", "gelu_pytorch_tanh")
    for key, wanted, default in (
        ("head_dim", hidden // heads, 64),
        ("num_key_value_heads", heads, 12),
    ):
        if (found := own.integer(key, default=default)) != wanted:
            raise own.error(key, f"must be {wanted}, got {found}")
    rope = own.child("rope_parameters") if own.has("rope_parameters") else JsonFields(own.path, {})
    rope.only("rope_type", "axial", "default")  # the authors' files have the second name
    merge = own.integer("pooling_kernel_size", default=3, high=16)
    patch_size = own.integer("patch_size", default=16, high=4096)
    processor = load_image_processor(fields.path.parent, GEMMA4, factor=patch_size * merge)
    sizes, num_positions = processor.any_size, own.integer("position_embedding_size", default=10240)
    assert sizes is not None
    if num_positions < (most := sizes.max_pixels // sizes.factor**2 * merge):
        raise own.error("position_embedding_size", f"must be at least {most}, got {num_positions}")
    return VisionConfig(
        placeholder=_placeholder(fields, 258_880),
        processor=processor,
        names=_GEMMA4_NAMES,
        prefixes=(
            (("vision.", "model.vision_tower."), ("vision_tower.projector.", "embed_vision.")),
        ),
        hidden_size=hidden,
        layers=EncoderLayers(
            count=own.integer("num_hidden_layers", default=16, high=MAX_LAYERS),
            num_heads=heads,
            intermediate_size=own.integer("intermediate_size", default=3072),
            norm_eps=own.number("rms_norm_eps", default=1e-6),
            activation=Activation.GELU_TANH,
            is_gated=True,
            qkv_bias=False,
            has_bias=False,
            is_rms=True,
            has_head_norms=True,
            has_output_norms=True,
            clips=own.boolean("use_clipped_linears", default=False),
        ),
        projector=ScaledMeanProjector(standardizes=own.boolean("standardize", default=False)),
        patch_size=patch_size,
        merge=merge,
        patches=PatchWeights(is_flat=True),
        num_positions=num_positions,
        has_axes=True,
        rope=PatchRope(rope.number("rope_theta", default=100.0)),
        prompt=ImageInPrompt(
            "<|image|>",
            "<|image><|image|><image|>",
            sees_itself=text.string("use_bidirectional_attention", default="") == "vision",
        ),
    )


_GEMMA4_NAMES = (
    ("_proj.weight", "_proj.linear.weight"),
    ("vision.projector.outer", "vision.projector.embedding_projection"),
    ("vision.patches", "vision.patch_embedder.input_proj"),
    ("vision.positions.weight", "vision.patch_embedder.position_embedding_table"),
    ("vision.layers", "vision.encoder.layers"),
    (".norm1", ".input_layernorm"),
    (".norm2", ".pre_feedforward_layernorm"),
    (".output_norm1", ".post_attention_layernorm"),
    (".output_norm2", ".post_feedforward_layernorm"),
)


def _parse_qwen(fields: JsonFields, architecture: Architecture) -> VisionConfig:
    """Return the encoder of a Qwen-VL, which takes images of any size; its sizes are the file's."""
    kind = _QWEN_KINDS[architecture]
    own = _vision_fields(fields, kind, kind.removesuffix("_vision"))
    text = text_fields(fields)
    is_first = architecture is Architecture.QWEN2_VL
    is_third = not is_first and architecture is not Architecture.QWEN2_5_VL
    is_deep = architecture is Architecture.QWEN3_VL
    has_states = is_third and not is_deep
    size_key, size = ("embed_dim", 1280) if is_first else ("hidden_size", None)
    hidden, heads = _heads(own, size_key, size, "num_heads")
    _check_axes(own, "num_heads", hidden, heads)
    num_layers = own.integer("depth", default=27 if is_third else 32, high=MAX_LAYERS)
    merge = own.integer("spatial_merge_size", default=2, high=16)
    patch_size = own.integer("patch_size", default=16 if is_third else 14, high=4096)
    factor = patch_size * merge
    activation: Activation | None = None
    inner, windows = 0, {}
    if architecture is Architecture.QWEN2_5_VL:
        windows = _windows(own, num_layers, factor)
    else:
        name = "gelu_pytorch_tanh" if is_third else "quick_gelu"
        activation = own.choice("hidden_act", _ACTIVATIONS, name)
    if is_first:
        inner = int(hidden * own.number("mlp_ratio", default=4))
    return VisionConfig(
        placeholder=_placeholder(fields, 248_056 if has_states else 151_655),
        processor=load_image_processor(fields.path.parent, QWEN, factor=factor),
        names=_QWEN2_NAMES if is_first else _QWEN3_NAMES if is_third else _QWEN_NAMES,
        prefixes=((("vision.", "visual."),), (("vision.", "model.visual."),)),
        hidden_size=hidden,
        layers=EncoderLayers(
            count=num_layers,
            num_heads=heads,
            intermediate_size=inner or own.integer("intermediate_size"),
            norm_eps=1e-6,
            activation=activation,
            is_gated=activation is None,
            merged="qkv",
            **windows,
        ),
        projector=PairProjector(
            normed=Normed.PATCH,
            inner_size=hidden * merge**2,
            activation=Activation.GELU,
            has_bias=True,
            deep_layers=_deep_layers(own, num_layers, text) if is_deep else (),
        ),
        patch_size=patch_size,
        merge=merge,
        patches=PatchWeights(is_third, own.integer("temporal_patch_size", default=2, high=16)),
        num_positions=_num_positions(own) if is_third else 0,
        rope=PatchRope(10_000.0),
        axes=parse_axes(text, is_interleaved=is_third, has_states=has_states),
    )


def _windows(own: JsonFields, num_layers: int, factor: int) -> dict[str, Any]:
    """Return fields of Qwen2.5-VL's layers, most of which see windows."""
    own.only("hidden_act", "silu")
    key, window = "fullatt_block_indexes", own.integer("window_size", default=112)
    if window < factor:
        raise own.error("window_size", f"must be at least {factor}, got {window}")
    layers = _layers(own, key, num_layers) if own.has(key) else (7, 15, 23, 31)
    norms = {"is_rms": True, "is_rms_around": True}
    return {**norms, "window": window // factor, "full": frozenset(layers)}


def _deep_layers(own: JsonFields, num_layers: int, text: JsonFields) -> tuple[int, ...]:
    key = "deepstack_visual_indexes"
    layers = _layers(own, key, num_layers) if own.has(key) else (8, 16, 24)
    if len(layers) >= (most := text.integer("num_hidden_layers")):
        raise own.error(key, f"must be fewer than the {most} layers of the language model")
    return layers


def _num_positions(own: JsonFields) -> int:
    num_positions = own.integer("num_position_embeddings", default=2304)
    if math.isqrt(num_positions) ** 2 != num_positions:
        raise own.error("num_position_embeddings", f"must be a square number, got {num_positions}")
    return num_positions


_QWEN_KINDS = {
    Architecture.QWEN2_VL: "qwen2_vl_vision",
    Architecture.QWEN2_5_VL: "qwen2_5_vl_vision",
    Architecture.QWEN3_VL: "qwen3_vl_vision",
    Architecture.QWEN3_5_WHOLE: "qwen3_5_vision",
    Architecture.QWEN3_5_MOE_WHOLE: "qwen3_5_moe_vision",
}
_QWEN_NAMES = (
    ("vision.projector.norm", "vision.merger.ln_q"),
    ("vision.projector.inner", "vision.merger.mlp.0"),
    ("vision.projector.outer", "vision.merger.mlp.2"),
    ("vision.patches", "vision.patch_embed.proj"),
    ("vision.layers", "vision.blocks"),
    ("self_attn.qkv_proj", "attn.qkv"),
    ("self_attn.o_proj", "attn.proj"),
)
_QWEN2_NAMES = (*_QWEN_NAMES, *_BLOCK)
_QWEN3_NAMES = (
    ("vision.projector.deep", "vision.deepstack_merger_list"),
    ("vision.projector.", "vision.merger."),
    (".inner", ".linear_fc1"),
    (".outer", ".linear_fc2"),
    ("vision.positions", "vision.pos_embed"),
    *_QWEN_NAMES[3:],
    ("up_proj", "linear_fc1"),
    ("down_proj", "linear_fc2"),
)


def _vision_fields(fields: JsonFields, *kinds: str) -> JsonFields:
    own = fields.child("vision_config")
    own.only("model_type", *kinds)
    for key in ("num_channels", "in_channels", "in_chans"):
        own.only(key, 3)
    return own


def _placeholder(fields: JsonFields, default: int) -> int:
    key = "image_token_id" if fields.has("image_token_id") else "image_token_index"
    return fields.integer(key, default=default, low=0)


def _heads(
    own: JsonFields, size_key: str, default: int | None, heads_key: str, *, num_heads: int = 16
) -> tuple[int, int]:
    """Return the numbers of a patch and the heads."""
    hidden = own.integer(size_key, default=default)
    heads = own.integer(heads_key, default=num_heads)
    if hidden % heads:
        raise own.error(size_key, f"must divide by {heads_key} {heads}, got {hidden}")
    return hidden, heads


def _check_axes(own: JsonFields, key: str, hidden: int, heads: int) -> None:
    """Refuse heads that cannot be rotated by row and column."""
    if hidden // heads % 4:
        raise own.error(key, f"must make heads of a multiple of 4, got {heads} of {hidden}")


def _side(own: JsonFields, key: str, default: int | None) -> int:
    """Return the side of a square in pixels, which a file may have twice."""
    value = dict(own.items()).get(key, default)
    sides = value if isinstance(value, list) else [value]
    if len(set(map(str, sides))) != 1 or type(sides[0]) is not int or not 0 < sides[0] <= 4096:
        raise own.error(key, f"must be a square of 1 to 4096, got {value!r}"[:200])
    return sides[0]


def _layers(own: JsonFields, key: str, num_layers: int) -> tuple[int, ...]:
    layers = own.array(key)
    if not all(isinstance(n, int) and 0 <= n < num_layers for n in layers):
        raise own.error(
            key, f"must hold numbers of layers below {num_layers}, got {layers!r}"[:200]
        )
    return tuple(layers)


def _num_used_layers(fields: JsonFields, num_layers: int, *, default: int = -2) -> int:
    """Return how many layers stand before the result that is taken: 0 is that before all."""
    key = "vision_feature_layer"
    layer = fields.integer(key, default=default, low=-num_layers - 1, high=num_layers)
    return layer if layer >= 0 else num_layers + 1 + layer


def _gate(fields: JsonFields, key: str, default: str) -> Activation | None:
    """Return the activation of gates; None: SiLU."""
    if fields.string(key, default=default) == "silu":
        return None
    if (activation := fields.choice(key, _ACTIVATIONS, default)) is Activation.QUICK_GELU:
        raise fields.error(key, "must be 'silu', 'gelu' or 'gelu_pytorch_tanh'")
    return activation
