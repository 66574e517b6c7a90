"""The safetensors files of a model directory: found, confined to it, and checked. Torch-free.

The supervisor calls `check_weights` before it starts anything; the loader finds each tensor's
file by the same `find_weights`. Only `*.safetensors` and their index are ever opened.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from safetensors import SafetensorError, safe_open

from lightserve.errors import ModelLoadError
from lightserve.models.architectures import WITHOUT_NORM_WEIGHTS, LayerShape
from lightserve.models.config import ModelConfig
from lightserve.models.gguf import BLOCK_TYPES, GgufFile, read_gguf
from lightserve.models.gguf_config import as_stored, family_of, name_in_file, one_by_one
from lightserve.models.gguf_model import WEIGHTS_FILE, stands_for_file
from lightserve.models.json_fields import JsonFields, read_json_object
from lightserve.models.latent_config import LatentConfig
from lightserve.models.moe_config import MXFP4_GROUP, MoeConfig, Stacked
from lightserve.models.recurrent_config import DeltaConfig, Joined
from lightserve.models.vision_config import VISION, VISION_PATCHES, VisionConfig, vision_tensors
from lightserve.models.weight_format import FLOATS, StoredTensor, WeightFormat

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOAT_DTYPES = FLOATS
"""Types of plain weights that can be served, in safetensors' words."""

_DIGEST = re.compile(r"[0-9a-f]{64}")
EMBEDDING = "model.embed_tokens.weight"
LM_HEAD, LM_HEAD_BIAS = "lm_head.weight", "lm_head.bias"
EMBEDDING_NORM = "model.embed_norm"
DRAFT_NORMS, DRAFT_JOIN = ("enorm", "hnorm", "shared_head.norm"), "eh_proj"
"""Norms of a draft head's token, of the state before it and of its result, and the product of token
and state, by their names in the layer."""
POSITIONS = "model.embed_positions.weight"
PROJECT_IN, PROJECT_OUT = "model.project_in.weight", "model.project_out.weight"
LAYER_EMBEDDING = "model.embed_tokens_per_layer.weight"
LAYER_PROJECTION, LAYER_NORM = "model.per_layer_model_projection", "model.per_layer_projection_norm"
"""Embeddings that layers have for themselves: looked up, and made of the common one."""
TOKEN_TYPES = "model.embed_types.weight"
SCORE_DENSE, SCORE_OUT = "score.dense", "score.out"
LATENT_INPUTS, LATENT_RESULTS = "fc1_latent_proj", "fc2_latent_proj"
"""Products before and behind experts, see `MoeConfig.latent_size`."""
CHOICE_BIAS = "e_score_correction_bias"
SHARED_GATE = "shared_expert_gate"
BLOCKS, SCALES = "_blocks", "_scales"
"""Endings of the tensors of experts in MXFP4: two numbers in a byte, and the factors of groups."""


@dataclass(frozen=True)
class WeightFiles:
    """Which file holds which tensor."""

    index: Path
    """The file that says so: the shard index, or the only shard."""
    file_of: Mapping[str, Path]
    """By the names in the files."""
    stored_names: tuple[tuple[str, ...], ...] = ()
    """See `ModelConfig.stored_names`."""
    gguf: GgufFile | None = None
    """The one file, if it is of that kind."""
    form: WeightFormat | None = None
    """See `ModelConfig.weight_format`."""
    vision_names: tuple[tuple[str, ...], ...] = ()
    """Parts of names as in `stored_names`, of the encoder of images and the products behind it."""
    quantised: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Sizes of the weights that are stored in that format, by the names of plain ones."""

    def stored(self, name: str) -> str:
        """Return the files' name of a tensor; the first of several where they have none."""
        found = [name]
        for ours, *theirs in self.vision_names if name.startswith(VISION) else self.stored_names:
            found = [one.replace(ours, part) for one in found for part in theirs]
        return next((one for one in found if self._has_stored(one)), found[0])

    def has(self, name: str) -> bool:
        """Whether there is a tensor, or a quantised weight, by the name that layers know."""
        return self._has_stored(self.stored(name))

    def _has_stored(self, stored: str) -> bool:
        return stored in self.file_of or self._module(stored) is not None

    def tensors_of(self, stored: str, shape: tuple[int, ...]) -> dict[str, StoredTensor]:
        """Return the tensors that must be there for one of this name and shape, by name.

        A plain weight, or the tensors that stand for it in the files' format.
        """
        if stored.endswith((BLOCKS, SCALES)):
            return {stored: StoredTensor((shape,), ("U8",))}
        module = self._module(stored)
        if module is None or self.form is None or len(shape) != 2:
            return {stored: StoredTensor((shape,), FLOAT_DTYPES)}
        tensors = self.form.tensors((shape[0], shape[1]))
        return {f"{module}.{name}": tensor for name, tensor in tensors.items()}

    def _module(self, stored: str) -> str | None:
        """Return the module of a weight that is quantised, None if it is plain."""
        module, _, last = stored.rpartition(".")
        if self.form is None or last != "weight":
            return None
        return module if f"{module}.{self.form.factors}" in self.file_of else None


def find_weights(path: Path) -> WeightFiles:
    """Map every tensor of the model in directory `path` to its file.

    As in transformers, a single `model.safetensors` is preferred to a shard index.

    Raises:
        ModelLoadError: no weights, a malformed index, or a shard that is missing or lies
            outside the directory.
    """
    if (packed := path / WEIGHTS_FILE).exists():
        if stands_for_file(path):
            packed = packed.resolve()  # what errors name
        else:
            check_confined(path, packed)
        gguf = one_by_one(read_gguf(packed))
        file_of = dict.fromkeys(gguf.tensors, packed)
        return WeightFiles(packed, file_of, family_of(gguf).stored_names, gguf)
    single, index = path / SINGLE_FILE, path / INDEX_FILE
    if single.exists():
        check_confined(path, single)
        with _open(single) as shard:
            return WeightFiles(single, dict.fromkeys(shard.keys(), single))
    if not index.exists():
        raise ModelLoadError(
            f"{path}: has neither {SINGLE_FILE} nor {INDEX_FILE}; pytorch_model*.bin are never"
            f" opened by a server: lightserve convert {shlex.quote(str(path))} OUT makes"
            " safetensors of them"
        )
    weight_map = JsonFields(index, read_json_object(index)).child("weight_map")
    names = {name: weight_map.string(name) for name, _ in weight_map.items()}
    shards = {}
    for name, shard_name in names.items():
        if shard_name not in shards:
            shards[shard_name] = _shard_path(path, weight_map, name, shard_name)
    return WeightFiles(index, {name: shards[shard_name] for name, shard_name in names.items()})


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor that the model is made of.

    The tied LM head is left out. Tensors beyond these (an old `rotary_emb.inv_freq`, say) are
    ignored wherever they occur.
    """
    shapes = _shared_tensors(config)
    for layer in range(config.num_layers):
        own = _layer_tensors(config, layer)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    if config.vision is not None:
        shapes |= vision_tensors(config.vision, config.embedding_size)
    return shapes


def _layer_tensors(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a layer, by their names in it."""
    hidden, moe, shape = config.hidden_size, config.moe, config.shape_of(layer)
    shapes: dict[str, tuple[int, ...]] = {}
    linears = _attention_linears(config, shape) if shape.has_attention else {}
    if shape.states is not None:
        shapes |= shape.states.tensors(hidden)
    if config.gemma4 is not None:
        shapes |= config.gemma4.tensors(hidden, moe)
    if moe is not None and layer in moe.layers:
        own = _moe_tensors(config, moe)
        shapes |= {f"{moe.module}.{name}": shape for name, shape in own.items()}
    elif layer in config.feed_forward_layers or not config.feed_forward_layers:
        linears |= _block_linears(config, shape.inner_size)
    if moe is not None and moe.is_beside and layer in moe.layers:
        linears |= _block_linears(config, shape.inner_size)
    shapes |= _linear_tensors(linears)
    if config.has_sinks:
        shapes["self_attn.sinks"] = (config.num_heads,)
    for name, size in _norms(config, shape).items():
        shapes[f"{name}.weight"] = (size,)
        if config.layer_norm_bias:
            shapes[f"{name}.bias"] = (size,)
    return shapes


def _norms(config: ModelConfig, shape: LayerShape) -> dict[str, int]:
    """Return the sizes of a layer's norms."""
    norms = dict.fromkeys(shape.norms, config.hidden_size)
    if not shape.has_attention:
        return norms
    if config.has_whole_qk_norm:
        norms["self_attn.q_norm"] = config.num_heads * config.head_dim
        norms["self_attn.k_norm"] = config.num_kv_heads * config.head_dim
    if config.qk_norm and config.architecture not in WITHOUT_NORM_WEIGHTS:
        own = [name for name in "qk" if name in shape.products]
        norms |= {f"self_attn.{name}_norm": shape.head_dim for name in own}
    if (latent := config.latent) is not None:
        norms["self_attn.kv_a_layernorm"] = latent.rank
        if latent.query_rank is not None:
            norms["self_attn.q_a_layernorm"] = latent.query_rank
    return norms


def _shared_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the tensors before and behind the layers."""
    hidden, size = config.hidden_size, config.embedding_size
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocab_size, size),
        "model.norm.weight": (hidden,),
    }
    if config.has_embedding_norm:
        shapes[f"{EMBEDDING_NORM}.weight"] = shapes[f"{EMBEDDING_NORM}.bias"] = (hidden,)
    if config.layer_norm_bias:
        shapes["model.norm.bias"] = (hidden,)
    if config.position_offset is not None:
        num_positions = config.max_position_embeddings + config.position_offset
        shapes[POSITIONS] = (num_positions, hidden)
    if (encoder := config.encoder) is not None:
        shapes[TOKEN_TYPES] = (encoder.num_token_types, hidden)
        if encoder.has_score_head:
            shapes |= {f"{SCORE_DENSE}.weight": (hidden, hidden), f"{SCORE_DENSE}.bias": (hidden,)}
            shapes |= {f"{SCORE_OUT}.weight": (1, hidden), f"{SCORE_OUT}.bias": (1,)}
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, size)
    if size != hidden:
        shapes |= {PROJECT_IN: (hidden, size), PROJECT_OUT: (size, hidden)}
    if config.gemma4 is not None and (own := config.gemma4.input_size):
        inputs = config.num_layers * own
        shapes[LAYER_EMBEDDING] = (config.gemma4.input_vocab, inputs)
        shapes[f"{LAYER_PROJECTION}.weight"] = (inputs, hidden)
        shapes[f"{LAYER_NORM}.weight"] = (own,)
    if config.lm_head_bias:
        shapes[LM_HEAD_BIAS] = (config.vocab_size,)
    if config.has_draft_head:
        prefix = f"model.layers.{config.num_layers - 1}"
        shapes |= {f"{prefix}.{name}.weight": (hidden,) for name in DRAFT_NORMS}
        shapes[f"{prefix}.{DRAFT_JOIN}.weight"] = (hidden, 2 * hidden)
    return shapes


def _attention_linears(config: ModelConfig, shape: LayerShape) -> dict[str, tuple[int, int, bool]]:
    """Return outputs, inputs and whether there is a bias of an attention's parts."""
    hidden = config.hidden_size
    if config.latent is not None:
        return _latent_linears(config, config.latent)
    q_size, kv_size = config.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    linears = {"self_attn.o_proj": (hidden, q_size, config.attention_output_bias)}
    if config.merged & {"qkv", "grouped_qkv"}:
        linears["self_attn.qkv_proj"] = (q_size + 2 * kv_size, hidden, config.qkv_bias)
    else:
        q_outputs = q_size * (2 if config.has_output_gate else 1)
        for name in shape.products:
            size = q_outputs if name == "q" else kv_size
            linears[f"self_attn.{name}_proj"] = (size, hidden, config.qkv_bias)
    return linears


def _latent_linears(config: ModelConfig, latent: LatentConfig) -> dict[str, tuple[int, int, bool]]:
    """Return the same of an attention over latent vectors."""
    hidden, heads, has_bias = config.hidden_size, config.num_heads, config.qkv_bias
    query, linears = heads * latent.query_dim, {}
    if latent.query_rank is None:
        linears["self_attn.q_proj"] = (query, hidden, False)
    else:
        linears["self_attn.q_a_proj"] = (latent.query_rank, hidden, has_bias)
        linears["self_attn.q_b_proj"] = (query, latent.query_rank, False)
    values = heads * latent.value_dim
    if latent.is_split:
        linears["self_attn.k_b_proj"] = (heads * latent.rank, latent.plain_dim, False)
        linears["self_attn.v_b_proj"] = (values, latent.rank, False)
    else:
        linears["self_attn.kv_b_proj"] = (heads * latent.plain_dim + values, latent.rank, False)
    return linears | {
        "self_attn.kv_a_proj_with_mqa": (latent.rank + latent.rope_dim, hidden, has_bias),
        "self_attn.o_proj": (hidden, values, config.attention_output_bias),
    }


def _block_linears(
    config: ModelConfig, inner: int, module: str = "mlp"
) -> dict[str, tuple[int, int, bool]]:
    """Return outputs, inputs and whether there is a bias of a block's parts."""
    hidden, sizes = config.hidden_size, {"gate": inner, "up": inner}
    if config.activation is not None:
        sizes = {"up": inner}
    elif "gate_up" in config.merged:
        sizes = {"gate_up": 2 * inner}
    shapes = {name: (size, hidden) for name, size in sizes.items()} | {"down": (hidden, inner)}
    return {f"{module}.{name}_proj": (*own, config.mlp_bias) for name, own in shapes.items()}


def _linear_tensors(linears: Mapping[str, tuple[int, int, bool]]) -> dict[str, tuple[int, ...]]:
    """Return the tensors of products by their outputs, inputs and whether there is a bias."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (out_size, in_size, has_bias) in linears.items():
        shapes[f"{name}.weight"] = (out_size, in_size)
        if has_bias:
            shapes[f"{name}.bias"] = (out_size,)
    return shapes


def _moe_tensors(config: ModelConfig, moe: MoeConfig) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a block of experts."""
    hidden, (*firsts, down) = config.hidden_size, moe.projections
    inner, size = moe.intermediate_size, moe.latent_size or config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {f"{moe.router}.weight": (moe.num_experts, hidden)}
    if moe.has_choice_bias:
        shapes[f"{moe.router}.{CHOICE_BIAS}"] = (moe.num_experts,)
    if moe.has_biases:
        shapes[f"{moe.router}.bias"] = (moe.num_experts,)
    if moe.stacked is not None:
        shapes |= _stacked_tensors(moe, hidden)
    for expert in range(0 if moe.stacked else moe.num_experts):
        own = {f"experts.{expert}.{name}": (inner, size, moe.has_biases) for name in firsts}
        own[f"experts.{expert}.{down}"] = (size, inner, moe.has_biases)
        shapes |= _linear_tensors(own)
    if moe.latent_size is not None:
        narrow, wide = LATENT_INPUTS, LATENT_RESULTS
        own = {narrow: (size, hidden, config.mlp_bias), wide: (hidden, size, config.mlp_bias)}
        shapes |= _linear_tensors(own)
    if moe.shared_size:
        shapes |= _linear_tensors(_block_linears(config, moe.shared_size, moe.shared_module))
    if moe.has_shared_gate:
        shapes[f"{SHARED_GATE}.weight"] = (1, hidden)
    return shapes


def _stacked_tensors(moe: MoeConfig, hidden: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors that hold all experts of a layer, with their biases."""
    num_experts = moe.num_experts
    shapes: dict[str, tuple[int, ...]] = {}
    sizes = {"gate_up_proj": (hidden, 2 * moe.intermediate_size)}
    sizes["down_proj"] = (moe.intermediate_size, hidden)
    for name, (num_inputs, num_outputs) in sizes.items():
        if moe.stacked is Stacked.MXFP4:
            groups = (num_experts, num_outputs, num_inputs // MXFP4_GROUP)
            shapes[f"experts.{name}{BLOCKS}"] = (*groups, MXFP4_GROUP // 2)
            shapes[f"experts.{name}{SCALES}"] = groups
        elif moe.stacked is Stacked.HALVES:
            shapes[f"experts.{name}"] = (num_experts, num_outputs, num_inputs)
        else:
            shapes[f"experts.{name}"] = (num_experts, num_inputs, num_outputs)
        if moe.has_biases:
            shapes[f"experts.{name}_bias"] = (num_experts, num_outputs)
    return shapes


def needed_tensors(config: ModelConfig, files: WeightFiles) -> dict[str, tuple[int, ...]]:
    """Return name and shape of the tensors that are read from these files, by the names that layers
    know.

    A tied model may have stored the embedding, the LM head, or both; of the tensors expected
    otherwise, none may be missing.
    """
    shapes = expected_tensors(config)
    if config.tie_word_embeddings and files.has(LM_HEAD):
        shapes[LM_HEAD] = shapes[EMBEDDING]
        if not files.has(EMBEDDING):
            del shapes[EMBEDDING]
    return shapes


def check_weights(path: Path, config: ModelConfig) -> WeightFiles:
    """Check that every tensor of the model is there, with its shape and a float type.

    Reads headers only (which also shows truncated files), so it takes milliseconds. Returns
    where the tensors are.

    Raises:
        ModelLoadError: names the file and, where there is one, the tensor.
    """
    files = find_weights(path)
    if files.gguf is None:
        own = replace(files, stored_names=config.stored_names, form=config.weight_format)
        files = _with_prefix(own, config.vision)
    config = as_in_files(config, files)
    in_file: dict[Path, dict[str, StoredTensor]] = {}
    quantised: dict[str, tuple[int, int]] = {}
    for ours, shape in needed_tensors(config, files).items():
        stored = files.stored(ours)
        tensors = files.tensors_of(stored, shape)
        for name, tensor in tensors.items():
            if name in files.file_of:
                in_file.setdefault(files.file_of[name], {})[name] = tensor
            elif not tensor.is_optional:
                theirs = name_in_file(files.gguf, name) if files.gguf is not None else name
                raise ModelLoadError(f"{files.index}: tensor {theirs!r} is missing")
        if len(tensors) > 1:
            quantised[stored] = (shape[0], shape[1])
    for file, tensors in in_file.items():
        if files.gguf is not None:
            _check_gguf(files.gguf, tensors)
        else:
            _check_shard(file, tensors)
    return replace(files, quantised=quantised)


def as_in_files(config: ModelConfig, files: WeightFiles) -> ModelConfig:
    """Return a model as its files have it: they alone may tell that experts are stacked, and how a
    convolution is cut.
    """
    if files.gguf is not None:
        return as_stored(config, files.gguf)
    if isinstance(delta := config.recurrent, DeltaConfig) and delta.joined is Joined.NONE:
        config = replace(config, recurrent=_as_cut(delta, files))
    moe = config.moe
    if moe is None or moe.stacked is not None:
        return config
    if not files.has(f"model.layers.{min(moe.layers)}.{moe.module}.experts.gate_up_proj"):
        return config
    names = ("gate_proj", "up_proj", "down_proj")  # by which `StackedExperts` knows them
    return replace(config, moe=replace(moe, stacked=Stacked.HALVES, projections=names))


def _as_cut(delta: DeltaConfig, files: WeightFiles) -> DeltaConfig:
    """Return layers with the convolution as it is cut: by transformers 5 into equal parts."""
    third = -(-delta.channels // 3)
    name = files.stored(f"model.layers.{min(delta.layers)}.linear_attn.q_conv1d.weight")
    if name not in files.file_of:
        return delta
    with _open(files.file_of[name]) as shard:
        present = set(shard.keys())
        if name not in present or shard.get_slice(name).get_shape()[:1] != [third]:
            return delta
    return replace(delta, stored_channels=(third, third, delta.channels - 2 * third))


def quantised_as(path: Path, config: ModelConfig) -> str | None:
    """Return the name of the weights' quantisation, for people; None: they are plain."""
    if config.weight_format is not None:
        return config.weight_format.name
    if config.moe is not None and config.moe.stacked is Stacked.MXFP4:
        return "mxfp4"
    if not (path / WEIGHTS_FILE).exists():
        return None
    kinds = {tensor.kind for tensor in read_gguf(path / WEIGHTS_FILE).tensors.values()}
    names = [BLOCK_TYPES[kind].name for kind in sorted(kinds) if kind in BLOCK_TYPES]
    quantised = [name for name in names if name not in ("F32", "F16", "BF16")]
    return f"GGUF, {', '.join(quantised)}" if quantised else None


_PREFIXES = (
    (("transformer.", ""),),
    (("model.", ""),),
    (("model.", "language_model.model."), ("lm_head", "language_model.lm_head")),
    (("model.", "model.language_model."),),
)
"""Other beginnings of names: of files that were saved without the output layer, or that have a text
model beside one for images, by its authors' names and by transformers'."""


def _with_prefix(files: WeightFiles, vision: VisionConfig | None) -> WeightFiles:
    """Return the files with the beginnings of names that they have."""
    names = () if vision is None else [vision.names + own for own in vision.prefixes]
    for own in names:
        found = replace(files, vision_names=own)
        if found.has(f"{VISION_PATCHES}.weight"):
            files = found
            break
    for own in ((), *_PREFIXES):
        found = replace(files, stored_names=files.stored_names + own)
        if found.has(EMBEDDING):
            return found
    return files


def check_digests(path: Path, files: WeightFiles, manifest: Path) -> None:
    """Check the SHA-256 of files of a model, all of its weights among them.

    Args:
        path: the model's directory.
        files: where its tensors are.
        manifest: JSON, names of files in the directory to digests in hexadecimal.

    Raises:
        ModelLoadError: a file has another digest, is missing, or is not in the manifest.
    """
    fields = JsonFields(manifest, read_json_object(manifest))
    digests = {name: fields.string(name).lower() for name, _ in fields.items()}
    for file in sorted(set(files.file_of.values())):
        name = file.relative_to(path).as_posix()
        if name not in digests:
            raise ModelLoadError(f"{manifest}: {name!r} is missing, which holds weights")
    for name, digest in digests.items():
        if _DIGEST.fullmatch(digest) is None:
            raise fields.error(name, "must be a SHA-256 digest, 64 hexadecimal digits")
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise fields.error(name, "must name a file in the model directory")
        file = path / name
        if not file.is_file():
            raise fields.error(name, f"names {file}, which is no file")
        check_confined(path, file)
        with file.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        if found != digest:
            raise ModelLoadError(f"{file}: its SHA-256 is {found}, not {digest} as in {manifest}")


def open_shard(path: Path, *, framework: str) -> safe_open:
    """Open a shard, memory-mapped. Raises ModelLoadError naming the file."""
    try:
        return safe_open(path, framework=framework)
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path}: not a whole safetensors file: {error}") from error


def _open(path: Path) -> safe_open:
    return open_shard(path, framework="np")


def _check_shard(file: Path, tensors: Mapping[str, StoredTensor]) -> None:
    with _open(file) as shard:
        present = set(shard.keys())
        for name, tensor in tensors.items():
            if name not in present:
                raise ModelLoadError(f"{file}: tensor {name!r} is missing")
            header = shard.get_slice(name)
            if header.get_dtype() not in tensor.dtypes:
                raise ModelLoadError(
                    f"{file}: tensor {name!r} has type {header.get_dtype()},"
                    f" not one of {', '.join(tensor.dtypes)}"
                )
            if tuple(header.get_shape()) not in tensor.shapes:
                shapes = " or ".join(str(list(shape)) for shape in tensor.shapes)
                raise ModelLoadError(
                    f"{file}: tensor {name!r} has shape {list(header.get_shape())},"
                    f" config.json implies {shapes}"
                )


def _check_gguf(gguf: GgufFile, tensors: Mapping[str, StoredTensor]) -> None:
    for name, wanted in tensors.items():
        tensor, theirs = gguf.tensors[name], name_in_file(gguf, name)
        if tensor.kind not in BLOCK_TYPES:
            known = ", ".join(block.name for block in BLOCK_TYPES.values())
            raise ModelLoadError(
                f"{gguf.path}: tensor {theirs!r} has GGUF's type {tensor.kind}, not one of {known}"
            )
        if tensor.shape not in wanted.shapes:
            raise ModelLoadError(
                f"{gguf.path}: tensor {theirs!r} has"
                f"{' parts of' if theirs != name else ''} shape {list(tensor.shape)}, its metadata"
                f" imply {list(wanted.shapes[0])}"
            )


def _shard_path(path: Path, weight_map: JsonFields, name: str, shard_name: str) -> Path:
    pure = PurePosixPath(shard_name)
    if pure.is_absolute() or ".." in pure.parts or pure.suffix != ".safetensors":
        raise weight_map.error(
            name, f"must name a .safetensors file in the model directory, got {shard_name!r}"
        )
    shard = path / pure
    if not shard.is_file():
        raise weight_map.error(name, f"names {shard_name!r}, which does not exist")
    check_confined(path, shard)
    return shard


def check_confined(path: Path, file: Path) -> None:
    """Refuse links that lead out of the model directory, by ModelLoadError.

    In a hub cache the files are links from `snapshots/<revision>/` to the `blobs/` beside it,
    which belong to the model.
    """
    root, target = path.resolve(), file.resolve()
    roots = [root]
    if root.parent.name == "snapshots":
        roots.append(root.parent.parent / "blobs")
    if not any(target.is_relative_to(allowed) for allowed in roots):
        raise ModelLoadError(f"{file}: leads out of the model directory, to {target}")
