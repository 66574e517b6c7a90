"""Random models of families that transformers has not, and their authors' formulas in plain torch.

Names and layouts of tensors are those of the published files; everything is computed for one whole
sequence at once, in float32.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

Tensors = dict[str, Tensor]
Shapes = dict[str, tuple[int, ...]]

ARCHITECTURES = {
    "QWen": "QWenLMHeadModel",
    "Baichuan": "BaichuanForCausalLM",
    "InternLM": "InternLMForCausalLM",
    "InternLM2": "InternLM2ForCausalLM",
    "ChatGLM": "ChatGLMModel",
}
"""By what tests call a family."""
COMMON = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 200,
    "tie_word_embeddings": False,
    "auto_map": {"AutoModelForCausalLM": "modeling.Never"},
}
LLAMA = {
    **COMMON,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "QWen": {
        **COMMON,
        "num_hidden_layers": 2,
        "intermediate_size": 192,
        "layer_norm_epsilon": 1e-6,
        "max_position_embeddings": 512,
        "seq_length": 256,
        "rotary_emb_base": 10000,
        "kv_channels": 16,
        "no_bias": True,
        "use_logn_attn": True,
        "use_dynamic_ntk": True,
    },
    "Baichuan": LLAMA,
    "InternLM": {**LLAMA, "bias": True, "rotary": {"base": 10000, "type": "origin"}},
    "InternLM2": {**LLAMA, "bias": False, "num_key_value_heads": 2, "rope_theta": 1000.0},
    "ChatGLM": {
        **COMMON,
        "num_layers": 2,
        "ffn_hidden_size": 96,
        "kv_channels": 16,
        "multi_query_attention": True,
        "multi_query_group_num": 2,
        "padded_vocab_size": 200,
        "seq_length": 256,
        "layernorm_epsilon": 1e-5,
        "add_qkv_bias": True,
        "add_bias_linear": False,
        "rope_ratio": 2.0,
    },
}


def write_own_code_model(
    family: str, changes: Mapping[str, Any], path: Path, dtype: torch.dtype, seed: int
) -> None:
    config = {**DEFAULTS[family], **changes, "architectures": [ARCHITECTURES[family]]}
    config = {key: value for key, value in config.items() if value is not None}
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    shapes = _shapes(family, config)
    if "visual" in config:
        shapes |= _visual_shapes(config["visual"])
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("bias"):
            noise *= 0.3
        elif len(shape) == 1:
            noise = 1.0 + 0.2 * noise
        elif "embed" not in name and "wte" not in name:
            noise /= math.sqrt(shape[1])
        tensors[name] = noise.to(dtype)
    save_file(tensors, path / "model.safetensors")


def own_code_reference(path: Path) -> OwnCodeModel | None:
    """Return the formula for a directory, None if transformers has the family."""
    config = json.loads((path / "config.json").read_text())
    name = config["architectures"][0]
    families = {architecture: family for family, architecture in ARCHITECTURES.items()}
    return OwnCodeModel(families[name], config, path) if name in families else None


class OwnCodeModel:
    """Called as a model of transformers is."""

    def __init__(self, family: str, values: dict[str, Any], path: Path) -> None:
        self.config = SimpleNamespace(vocab_size=values["vocab_size"])
        self._values = values
        self._logits = FORMULAS[family]
        tensors = load_file(path / "model.safetensors")
        self._tensors = {name: tensor.float() for name, tensor in tensors.items()}

    def __call__(
        self,
        ids: Tensor,
        *,
        past_key_values: Tensor | None = None,
        use_cache: bool = False,
        pixel_values: Tensor | None = None,
    ) -> SimpleNamespace:
        tokens = ids if past_key_values is None else torch.cat([past_key_values, ids], dim=1)
        images = () if pixel_values is None else (pixel_values,)
        logits = self._logits(self._values, self._tensors, tokens[0], *images)
        return SimpleNamespace(logits=logits[None], past_key_values=tokens)


def _shapes(family: str, config: dict[str, Any]) -> Shapes:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    layers = config.get("num_hidden_layers") or config["num_layers"]
    shapes: Shapes = {}
    for layer in range(layers):
        for name, shape in _layer_shapes(family, config, hidden).items():
            shapes[name.replace("*", str(layer))] = shape
    ends = {
        "QWen": ("transformer.wte", "transformer.ln_f", "lm_head"),
        "InternLM2": ("model.tok_embeddings", "model.norm", "output"),
        "ChatGLM": (
            "transformer.embedding.word_embeddings",
            "transformer.encoder.final_layernorm",
            "transformer.output_layer",
        ),
    }.get(family, ("model.embed_tokens", "model.norm", "lm_head"))
    embedding, norm, head = (f"{name}.weight" for name in ends)
    return {**shapes, embedding: (vocab, hidden), norm: (hidden,), head: (vocab, hidden)}


def _layer_shapes(family: str, config: dict[str, Any], hidden: int) -> Shapes:
    if family == "QWen":
        at, inner = "transformer.h.*.", config["intermediate_size"] // 2
        return {
            f"{at}ln_1.weight": (hidden,),
            f"{at}attn.c_attn.weight": (3 * hidden, hidden),
            f"{at}attn.c_attn.bias": (3 * hidden,),
            f"{at}attn.c_proj.weight": (hidden, hidden),
            f"{at}ln_2.weight": (hidden,),
            f"{at}mlp.w1.weight": (inner, hidden),
            f"{at}mlp.w2.weight": (inner, hidden),
            f"{at}mlp.c_proj.weight": (hidden, inner),
        }
    if family == "ChatGLM":
        at, inner = "transformer.encoder.layers.*.", config["ffn_hidden_size"]
        groups = config["multi_query_group_num"]
        size = (config["num_attention_heads"] + 2 * groups) * config["kv_channels"]
        return {
            f"{at}input_layernorm.weight": (hidden,),
            f"{at}self_attention.query_key_value.weight": (size, hidden),
            f"{at}self_attention.query_key_value.bias": (size,),
            f"{at}self_attention.dense.weight": (hidden, hidden),
            f"{at}post_attention_layernorm.weight": (hidden,),
            f"{at}mlp.dense_h_to_4h.weight": (2 * inner, hidden),
            f"{at}mlp.dense_4h_to_h.weight": (hidden, inner),
        }
    at, inner = "model.layers.*.", config["intermediate_size"]
    if family == "InternLM2":
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        return {
            f"{at}attention_norm.weight": (hidden,),
            f"{at}attention.wqkv.weight": ((heads + 2 * kv_heads) * hidden // heads, hidden),
            f"{at}attention.wo.weight": (hidden, hidden),
            f"{at}ffn_norm.weight": (hidden,),
            f"{at}feed_forward.w1.weight": (inner, hidden),
            f"{at}feed_forward.w3.weight": (inner, hidden),
            f"{at}feed_forward.w2.weight": (hidden, inner),
        }
    shapes = {
        f"{at}input_layernorm.weight": (hidden,),
        f"{at}post_attention_layernorm.weight": (hidden,),
        f"{at}mlp.gate_proj.weight": (inner, hidden),
        f"{at}mlp.up_proj.weight": (inner, hidden),
        f"{at}mlp.down_proj.weight": (hidden, inner),
        f"{at}self_attn.o_proj.weight": (hidden, hidden),
    }
    if family == "Baichuan":
        return {**shapes, f"{at}self_attn.W_pack.weight": (3 * hidden, hidden)}
    for name in "qkvo":
        shapes[f"{at}self_attn.{name}_proj.weight"] = (hidden, hidden)
        shapes[f"{at}self_attn.{name}_proj.bias"] = (hidden,)
    return shapes


def _visual_shapes(own: dict[str, Any]) -> Shapes:
    """Return the tensors of Qwen-VL's encoder; of positions it always has 256."""
    width, size, number = own["width"], own["output_dim"], own["n_queries"]
    inner, patch = int(width * own["mlp_ratio"]), own["patch_size"]
    at, pool = "transformer.visual.", "transformer.visual.attn_pool."
    shapes: Shapes = {
        f"{at}conv1.weight": (width, 3, patch, patch),
        f"{at}positional_embedding": (256, width),
        f"{at}proj": (size, size),
        f"{pool}query": (number, size),
        f"{pool}pos_embed": (number, size),
        f"{pool}kv_proj.weight": (size, width),
        f"{pool}attn.in_proj_weight": (3 * size, size),
        f"{pool}attn.in_proj_bias": (3 * size,),
    }
    linears = {f"{pool}attn.out_proj": (size, size)}
    norms = {f"{at}ln_pre": width, f"{at}ln_post": size, f"{pool}ln_q": size, f"{pool}ln_kv": size}
    for layer in range(own["layers"]):
        block = f"{at}transformer.resblocks.{layer}."
        linears[f"{block}attn.in_proj"] = (3 * width, width)
        linears[f"{block}attn.out_proj"] = (width, width)
        linears[f"{block}mlp.c_fc"] = (inner, width)
        linears[f"{block}mlp.c_proj"] = (width, inner)
        norms |= {f"{block}ln_1": width, f"{block}ln_2": width}
    for name, outputs in [*linears.items(), *((name, (n,)) for name, n in norms.items())]:
        shapes |= {f"{name}.weight": outputs, f"{name}.bias": outputs[:1]}
    return shapes


# The formulas.


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _halves(x: Tensor, base: float) -> Tensor:
    """Rotate dimensions half a head apart; x [N, H, D]."""
    size = x.shape[-1]
    angles = torch.arange(len(x))[:, None] * base ** (-torch.arange(0, size, 2) / size)
    pairs = torch.complex(x[..., : size // 2], x[..., size // 2 :])
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([turned.real, turned.imag], dim=-1)


def _neighbours(x: Tensor, base: float) -> Tensor:
    """Rotate neighbouring dimensions of the first half of a head; x [N, H, D]."""
    size = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] * base ** (-torch.arange(0, size, 2) / size)
    pairs = torch.view_as_complex(x[..., :size].reshape(*x.shape[:2], -1, 2).contiguous())
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([torch.view_as_real(turned).flatten(2), x[..., size:]], dim=-1)


def _attend(q: Tensor, k: Tensor, v: Tensor, slopes: list[float] | None = None) -> Tensor:
    """q [N, H, D], k and v [N, Hkv, D] -> [N, H * D]."""
    out = []
    group = q.shape[1] // k.shape[1]
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // group].T / math.sqrt(q.shape[2])
        if slopes is not None:
            scores = scores + slopes[head] * torch.arange(len(q))
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out.append(weights @ v[:, head // group])
    return torch.cat(out, dim=-1)


def _linear(x: Tensor, tensors: Tensors, name: str) -> Tensor:
    return functional.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))


def _stretched(square: Tensor, number: int) -> Tensor:
    """Return vectors [n, size] of a square grid for one of `number` cells."""
    old, new = math.isqrt(len(square)), math.isqrt(number)
    channels = square.T.view(1, -1, old, old)
    return functional.interpolate(channels, (new, new), mode="bicubic").flatten(2)[0].T


def _qwen_visual(own: dict[str, Any], t: Tensors, pixels: Tensor) -> Tensor:
    """Return the embeddings of an image [3, side, side], [n_queries, output_dim]."""
    t = {name.removeprefix("transformer.visual."): tensor for name, tensor in t.items()}

    def norm(x: Tensor, name: str) -> Tensor:
        weight = t[f"{name}.weight"]
        return functional.layer_norm(x, weight.shape, weight, t[f"{name}.bias"], 1e-6)

    patches = functional.conv2d(pixels[None], t["conv1.weight"], stride=own["patch_size"])
    x = patches.flatten(2)[0].T
    x = norm(x + _stretched(t["positional_embedding"], len(x)), "ln_pre")
    for layer in range(own["layers"]):
        at = f"transformer.resblocks.{layer}."
        qkv = _linear(norm(x, f"{at}ln_1"), t, f"{at}attn.in_proj")
        q, k, v = qkv.view(len(x), own["heads"], 3, -1).permute(2, 1, 0, 3)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        heads = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        x = x + _linear(heads, t, f"{at}attn.out_proj")
        inner = functional.gelu(_linear(norm(x, f"{at}ln_2"), t, f"{at}mlp.c_fc"))
        x = x + _linear(inner, t, f"{at}mlp.c_proj")
    x = norm(_linear(x, t, "attn_pool.kv_proj"), "attn_pool.ln_kv")
    places = t["attn_pool.pos_embed"]
    attention = torch.nn.MultiheadAttention(own["output_dim"], own["output_dim"] // 128)
    prefix = "attn_pool.attn."
    attention.load_state_dict(
        {name.removeprefix(prefix): one for name, one in t.items() if name.startswith(prefix)}
    )
    query = norm(t["attn_pool.query"], "attn_pool.ln_q") + places
    x, _ = attention(query, x + _stretched(places, len(x)), x)
    return norm(x, "ln_post") @ t["proj"]


def _qwen(
    config: dict[str, Any], t: Tensors, tokens: Tensor, images: Tensor | None = None
) -> Tensor:
    x, eps = t["transformer.wte.weight"][tokens], config["layer_norm_epsilon"]
    if images is not None:
        own = config["visual"]
        seen = [_qwen_visual(own, t, image) for image in images]
        x[tokens == own["image_start_id"] + 2] = torch.cat(seen)
    heads, base = config["num_attention_heads"], config["rotary_emb_base"]
    for layer in range(config["num_hidden_layers"]):
        at = f"transformer.h.{layer}."
        qkv = _linear(_norm(x, t[f"{at}ln_1.weight"], eps), t, f"{at}attn.c_attn")
        q, k, v = (part.view(len(x), heads, -1) for part in qkv.chunk(3, dim=-1))
        x = x + _linear(_attend(_halves(q, base), _halves(k, base), v), t, f"{at}attn.c_proj")
        y = _norm(x, t[f"{at}ln_2.weight"], eps)
        gated = _linear(y, t, f"{at}mlp.w1") * functional.silu(_linear(y, t, f"{at}mlp.w2"))
        x = x + _linear(gated, t, f"{at}mlp.c_proj")
    return _linear(_norm(x, t["transformer.ln_f.weight"], eps), t, "lm_head")


def _alibi(heads: int) -> list[float]:
    """Of 4 heads; of 6 those of 4, then the first and third of 8."""
    own = [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]
    return own if heads == 4 else [*own, 2.0**-1, 2.0**-3]


def _baichuan(config: dict[str, Any], t: Tensors, tokens: Tensor) -> Tensor:
    x, eps = t["model.embed_tokens.weight"][tokens], config["rms_norm_eps"]
    heads = config["num_attention_heads"]
    slopes = None if "max_position_embeddings" in config else _alibi(heads)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        packed = _linear(
            _norm(x, t[f"{at}input_layernorm.weight"], eps), t, f"{at}self_attn.W_pack"
        )
        q, k, v = packed.unflatten(-1, (3, heads, -1)).unbind(1)
        if slopes is None:
            q, k = _halves(q, 10000.0), _halves(k, 10000.0)
        x = x + _linear(_attend(q, k, v, slopes), t, f"{at}self_attn.o_proj")
        x = x + _llama_mlp(_norm(x, t[f"{at}post_attention_layernorm.weight"], eps), t, at)
    if "z_loss_weight" in config:
        t = {**t, "lm_head.weight": functional.normalize(t["lm_head.weight"])}
    return _linear(_norm(x, t["model.norm.weight"], eps), t, "lm_head")


def _llama_mlp(x: Tensor, t: Tensors, at: str) -> Tensor:
    gate, up = (_linear(x, t, f"{at}mlp.{name}_proj") for name in ("gate", "up"))
    return _linear(functional.silu(gate) * up, t, f"{at}mlp.down_proj")


def _internlm(config: dict[str, Any], t: Tensors, tokens: Tensor) -> Tensor:
    x, eps = t["model.embed_tokens.weight"][tokens], config["rms_norm_eps"]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        y = _norm(x, t[f"{at}input_layernorm.weight"], eps)
        q, k, v = (
            _linear(y, t, f"{at}self_attn.{n}_proj").view(len(x), config["num_attention_heads"], -1)
            for n in "qkv"
        )
        heads = _attend(_halves(q, 10000.0), _halves(k, 10000.0), v)
        x = x + _linear(heads, t, f"{at}self_attn.o_proj")
        x = x + _llama_mlp(_norm(x, t[f"{at}post_attention_layernorm.weight"], eps), t, at)
    return _linear(_norm(x, t["model.norm.weight"], eps), t, "lm_head")


def _internlm2(config: dict[str, Any], t: Tensors, tokens: Tensor) -> Tensor:
    x, eps = t["model.tok_embeddings.weight"][tokens], config["rms_norm_eps"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    base = config["rope_theta"]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        qkv = _linear(_norm(x, t[f"{at}attention_norm.weight"], eps), t, f"{at}attention.wqkv")
        groups = qkv.view(len(x), kv_heads, heads // kv_heads + 2, -1)
        q = groups[:, :, :-2].flatten(1, 2)
        k, v = groups[:, :, -2], groups[:, :, -1]
        x = x + _linear(_attend(_halves(q, base), _halves(k, base), v), t, f"{at}attention.wo")
        y = _norm(x, t[f"{at}ffn_norm.weight"], eps)
        w1, w3 = (_linear(y, t, f"{at}feed_forward.{name}") for name in ("w1", "w3"))
        x = x + _linear(functional.silu(w1) * w3, t, f"{at}feed_forward.w2")
    return _linear(_norm(x, t["model.norm.weight"], eps), t, "output")


def _chatglm(config: dict[str, Any], t: Tensors, tokens: Tensor) -> Tensor:
    x = t["transformer.embedding.word_embeddings.weight"][tokens]
    eps, base = config["layernorm_epsilon"], 10000.0 * config["rope_ratio"]
    heads, groups = config["num_attention_heads"], config["multi_query_group_num"]
    for layer in range(config["num_layers"]):
        at = f"transformer.encoder.layers.{layer}."
        y = _norm(x, t[f"{at}input_layernorm.weight"], eps)
        qkv = _linear(y, t, f"{at}self_attention.query_key_value")
        q, k, v = qkv.view(len(x), -1, config["kv_channels"]).split((heads, groups, groups), dim=1)
        mixed = _attend(_neighbours(q, base), _neighbours(k, base), v)
        x = x + _linear(mixed, t, f"{at}self_attention.dense")
        y = _norm(x, t[f"{at}post_attention_layernorm.weight"], eps)
        first, second = _linear(y, t, f"{at}mlp.dense_h_to_4h").chunk(2, dim=-1)
        x = x + _linear(functional.silu(first) * second, t, f"{at}mlp.dense_4h_to_h")
    last = _norm(x, t["transformer.encoder.final_layernorm.weight"], eps)
    return _linear(last, t, "transformer.output_layer")


FORMULAS = {
    "QWen": _qwen,
    "Baichuan": _baichuan,
    "InternLM": _internlm,
    "InternLM2": _internlm2,
    "ChatGLM": _chatglm,
}
