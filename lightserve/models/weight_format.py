"""Checkpoints whose weights are quantised already: what `quantization_config` says. Torch-free.

Four ways of writing come down to one: a weight [outputs M, inputs K] is values of 4 or 8 bits, and
factors (perhaps zeros) that some outputs and some inputs share, (value - zero) * factor.

    layout   values                              factors                   zeros
    gptq     qweight int32 [K / 8, M]            scales [groups, M]        qzeros [groups, M / 8]
    awq      qweight int32 [K, M / 8]            scales [groups, M]        qzeros [groups, M / 8]
    packed   weight_packed int32 [M, K / 8]      weight_scale [M, groups]  weight_zero_point
    int8     weight int8 [M, K]                  weight_scale [M, groups]  weight_zero_point
    fp8      weight float8_e4m3fn [M, K]         weight_scale[_inv]        none

(of 4 bits; of 8 bits an int32 has four). Which modules are stored this way is seen from the files:
those that have a tensor of factors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from lightserve.models.json_fields import JsonFields

KEY = "quantization_config"
FLOATS = ("F32", "F16", "BF16")
_INT32 = ("I32",)
GROUP_SIZES = (-1, 16, 32, 64, 96, 128, 256)
_FP8_BLOCKS = (1, 1024)
WORD_BITS = 32


class Layout(StrEnum):
    """The layout of values in a file."""

    GPTQ = "gptq"
    AWQ = "awq"
    PACKED = "packed"
    INT8 = "int8"
    FP8 = "fp8"


@dataclass(frozen=True)
class StoredTensor:
    """The form that one tensor of a weight must have."""

    shapes: tuple[tuple[int, ...], ...]
    """Any of these."""
    dtypes: tuple[str, ...]
    """Any of these, in safetensors' words."""
    is_optional: bool = False


@dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """The format of a checkpoint's quantised weights."""

    method: str
    """Its name in config.json."""
    layout: Layout
    bits: int
    """4 or 8, of a value."""
    block_outputs: int | None = 1
    """Outputs that share a factor; None: all."""
    block_inputs: int | None = None
    """Inputs that share a factor; None: all."""
    has_zeros: bool = False
    zero_offset: int = 0
    """Number that is added to the zeros in the file."""
    has_order: bool = False
    """Whether each input names its group."""
    rounds_tokens: bool = False
    """Whether the inputs of products are made for 8 bits too, with a factor for each token."""
    factors: str = "weight_scale"
    """Name of the tensor of factors in a module."""

    @property
    def values(self) -> str:
        """Name of the tensor of values in a module."""
        if self.layout in (Layout.GPTQ, Layout.AWQ):
            return "qweight"
        return "weight_packed" if self.layout is Layout.PACKED else "weight"

    @property
    def zeros(self) -> str:
        """Name of the tensor of zeros in a module."""
        return "qzeros" if self.layout in (Layout.GPTQ, Layout.AWQ) else "weight_zero_point"

    @property
    def order(self) -> str:
        """Name of the tensor of each input's group in a module."""
        return "g_idx" if self.layout is Layout.GPTQ else "weight_g_idx"

    @property
    def per_word(self) -> int:
        """Values of an int32."""
        return WORD_BITS // self.bits

    @property
    def name(self) -> str:
        """Its common name."""
        return f"{self.method}, {self.bits} bits"

    def num_groups(self, num_inputs: int) -> int:
        """Return how many groups of inputs a weight has."""
        return 1 if self.block_inputs is None else -(-num_inputs // self.block_inputs)

    def tensors(self, shape: tuple[int, int]) -> dict[str, StoredTensor]:
        """Return the tensors that a module of a weight [M, K] has in place of `weight`, by name."""
        outputs, inputs = shape
        groups = self.num_groups(inputs)
        words = -(-outputs // self.per_word)
        found: dict[str, StoredTensor]
        match self.layout:
            case Layout.GPTQ | Layout.AWQ:
                of_values = (inputs, words)
                if self.layout is Layout.GPTQ:
                    of_values = (-(-inputs // self.per_word), outputs)
                found = {
                    "qweight": StoredTensor((of_values,), _INT32),
                    "scales": StoredTensor(((groups, outputs),), FLOATS),
                }
                zeros = StoredTensor(((groups, words),), _INT32)
            case Layout.PACKED:
                of_values = (outputs, -(-inputs // self.per_word))
                found = {
                    "weight_packed": StoredTensor((of_values,), _INT32),
                    "weight_scale": StoredTensor(((outputs, groups),), FLOATS),
                }
                zeros = StoredTensor(((words, groups),), _INT32)
            case Layout.INT8 | Layout.FP8:
                dtypes = ("I8",) if self.layout is Layout.INT8 else ("F8_E4M3",)
                factors = self._factor_shapes(outputs, groups)
                found = {
                    "weight": StoredTensor((shape,), dtypes),
                    self.factors: StoredTensor(factors, FLOATS),
                }
                zeros = StoredTensor(factors, ("I8",))
        if self.has_zeros:
            found[self.zeros] = zeros
        if self.has_order or self.layout is Layout.GPTQ:
            order = StoredTensor(((inputs,),), _INT32, is_optional=not self.has_order)
            found[self.order] = order
        return found

    def _factor_shapes(self, outputs: int, groups: int) -> tuple[tuple[int, ...], ...]:
        if self.block_outputs is None:
            return ((), (1,), (1, 1))
        rows = -(-outputs // self.block_outputs)
        return ((rows, groups), (rows,)) if groups == 1 else ((rows, groups),)


def parse_weight_format(fields: JsonFields) -> WeightFormat | None:
    """Return the format of weights that config.json names, None: they are plain numbers.

    Raises:
        ModelLoadError: a method, layout or number that cannot be served; names file and key.
    """
    if not fields.has(KEY):
        return None
    own = fields.child(KEY)
    method = own.string("quant_method")
    if method not in _METHODS:
        known = ", ".join(_METHODS)
        raise own.error("quant_method", f"names {method!r}; supported are {known}")
    return _METHODS[method](own)


def is_mxfp4(fields: JsonFields) -> bool:
    """Whether config.json says that experts are of 4 bits as gpt-oss has them."""
    return fields.has(KEY) and fields.child(KEY).string("quant_method") == "mxfp4"


def _one_of(fields: JsonFields, key: str, known: tuple[str, ...], default: str | None) -> str:
    return fields.choice(key, {name: name for name in known}, default)


def _bits(fields: JsonFields, key: str, known: tuple[int, ...]) -> int:
    bits = fields.integer(key)
    if bits not in known:
        raise fields.error(key, f"must be {' or '.join(map(str, known))}, got {bits}")
    return bits


def _group_size(fields: JsonFields, key: str, default: int | None) -> int | None:
    size = fields.integer(key, default=default, low=-1)
    if size not in GROUP_SIZES:
        known = ", ".join(map(str, GROUP_SIZES))
        raise fields.error(key, f"must be one of {known}, got {size}")
    return None if size == -1 else size


def _refuse(fields: JsonFields, key: str, known: str) -> None:
    """Refuse an object or list that says anything."""
    value = dict(fields.items()).get(key)
    if value:
        raise fields.error(key, f"must be {known}")


def _gptq(fields: JsonFields) -> WeightFormat:
    _refuse(fields, "dynamic", "empty: modules with numbers of their own are not supported")
    written = fields.only("checkpoint_format", "gptq", "gptq_v2")
    return WeightFormat(
        method="gptq",
        layout=Layout.GPTQ,
        bits=_bits(fields, "bits", (4, 8)),
        block_inputs=_group_size(fields, "group_size", None),
        has_zeros=True,
        zero_offset=1 if written == "gptq" else 0,
        has_order=fields.boolean("desc_act", default=False),
        factors="scales",
    )


def _awq(fields: JsonFields) -> WeightFormat:
    fields.only("version", "gemm", "GEMM")
    fields.only("zero_point", True)
    return WeightFormat(
        method="awq",
        layout=Layout.AWQ,
        bits=_bits(fields, "w_bit" if fields.has("w_bit") else "bits", (4,)),
        block_inputs=_group_size(
            fields, "q_group_size" if fields.has("q_group_size") else "group_size", 128
        ),
        has_zeros=True,
        factors="scales",
    )


def _fp8(fields: JsonFields) -> WeightFormat:
    fields.only("fmt", "e4m3", "float8_e4m3fn")
    if not fields.has("weight_block_size"):
        return WeightFormat(method="fp8", layout=Layout.FP8, bits=8, block_outputs=None)
    outputs, inputs = _block(fields, "weight_block_size")
    return WeightFormat(
        method="fp8",
        layout=Layout.FP8,
        bits=8,
        block_outputs=outputs,
        block_inputs=inputs,
        factors="weight_scale_inv",
    )


def _block(fields: JsonFields, key: str) -> tuple[int, int]:
    sizes = fields.array(key)
    low, high = _FP8_BLOCKS
    if len(sizes) != 2 or any(type(size) is not int or not low <= size <= high for size in sizes):
        raise fields.error(key, f"must be two sizes from {low} to {high}, got {sizes!r}")
    return sizes[0], sizes[1]


_COMPRESSED = {
    "pack-quantized": (Layout.PACKED, "int", (4, 8), ("group", "channel")),
    "int-quantized": (Layout.INT8, "int", (8,), ("tensor", "channel", "group")),
    "float-quantized": (Layout.FP8, "float", (8,), ("tensor", "channel", "block")),
}
"""Formats of compressed-tensors: their layout, kind of weights, bits and ways to share factors."""


def _compressed_tensors(fields: JsonFields) -> WeightFormat:
    fields.only("quantization_status", "compressed")
    _refuse(fields, "transform_config", "empty: weights that are rotated are not supported")
    if fields.has("sparsity_config"):
        fields.child("sparsity_config").only("format", "dense")
    groups = fields.child("config_groups")
    if len(groups.items()) != 1:
        raise fields.error("config_groups", f"must have one entry, got {len(groups.items())}")
    group = groups.child(groups.items()[0][0])
    # The older files have one format, at the top.
    format_fields = group if group.has("format") else fields
    written = format_fields.string("format")
    layout, kind, widths, strategies = format_fields.choice("format", _COMPRESSED)
    weights = group.child("weights")
    _one_of(weights, "type", (kind,), "int")
    bits = _bits(weights, "num_bits", widths)
    strategy = _one_of(weights, "strategy", strategies, None)
    is_symmetric = weights.boolean("symmetric", default=True)
    if kind == "float" and not is_symmetric:
        raise weights.error("symmetric", "must be true for weights of floating point")
    block_outputs: int | None = 1
    block_inputs: int | None = None
    match strategy:
        case "tensor":
            block_outputs = None
        case "group":
            block_inputs = _group_size(weights, "group_size", None)
        case "block":
            block_outputs, block_inputs = _block(weights, "block_structure")
    order = ""
    if weights.has("actorder") and dict(weights.items())["actorder"] is not False:
        known = ("group", "dynamic", "weight", "static")
        order = _one_of(weights, "actorder", known, None)
    return WeightFormat(
        method=f"compressed-tensors {written}",
        layout=layout,
        bits=bits,
        block_outputs=block_outputs,
        block_inputs=block_inputs,
        has_zeros=not is_symmetric,
        has_order=order in ("group", "dynamic"),
        rounds_tokens=written == "int-quantized" and _rounds_tokens(group),
    )


def _rounds_tokens(group: JsonFields) -> bool:
    """Whether inputs become symmetric integers of 8 bits, by the largest of each token."""
    if not group.has("input_activations"):
        return False
    inputs = group.child("input_activations")
    return (
        inputs.integer("num_bits") == 8
        and inputs.string("type", default="int") == "int"
        and inputs.string("strategy", default="tensor") == "token"
        and inputs.boolean("dynamic", default=False)
        and inputs.boolean("symmetric", default=True)
    )


_METHODS: dict[str, Callable[[JsonFields], WeightFormat]] = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
}
