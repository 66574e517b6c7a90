"""Encoders of images: pixels to embeddings that stand for an image's tokens.

Patches are embedded, and all see each other (Dosovitskiy et al., 2021, section 3.1), in CLIP
(Radford et al., 2021, section 2.4) with learned positions. Qwen's encoders rotate queries and keys
by row and column (Wang et al., 2024, section 2.1), some within windows (Bai et al., 2025, section
2.1), as does Pixtral's (Agrawal et al., 2024, section 2.2). InternVL's sees the tiles of a picture
one by one (Chen et al., 2024, section 3.3). Two products make embeddings of the language model's
size, each of one or several patches; Gemmas 3 and 4 have one, of means of patches. Qwen-VL's
are of all patches, by queries that attend to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from lightserve.kernels.interface import activate
from lightserve.models.base import Part, SingleRank
from lightserve.models.config import ModelConfig
from lightserve.models.encoder import EncoderAttention, Group
from lightserve.models.layers.feed_forward import block, gated_mlp
from lightserve.models.layers.linear import (
    Linear,
    ModelContext,
    ModuleShard,
    Norm,
    RMSNorm,
    UnquantizedMethod,
    WeightReader,
    read_tensor,
)
from lightserve.models.plain_config import NormWeights
from lightserve.models.vision_config import (
    QUERY_NORMS,
    RANGES,
    VISION_CLASS,
    VISION_LAST_NORM,
    VISION_LAYERS,
    VISION_MOVE,
    VISION_NORM,
    VISION_PATCHES,
    VISION_POSITIONS,
    VISION_PROJECTOR,
    VISION_SCALE,
    MeanProjector,
    Normed,
    PairProjector,
    QueryProjector,
    ScaledMeanProjector,
    VisionConfig,
    projectors,
)


class _Grid(NamedTuple):
    """The layers' inputs that all images of one size share."""

    whole: list[Group]
    """All tokens, for layers that see all."""
    windows: list[Group]
    """Tokens of each window, for the others."""
    tables: tuple[Tensor, Tensor] | None
    """float32 cos and sin [T, head_dim / 2] of each token's row and column; None: not rotated."""


class _Clipped:
    """Products of one input, each of which clips it, and its results, to ranges of its own.

    As in transformers' `Gemma4ClippableLinear`.
    """

    def __init__(self, parts: list[tuple[Linear, list[tuple[Tensor, Tensor]]]]) -> None:
        """`parts`: each a product with its ranges, of inputs and perhaps of results."""
        self._parts = parts

    def apply(self, x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """See `Linear.apply`."""
        results = []
        for linear, (inputs, *outputs) in self._parts:
            result = linear.apply(x.clamp(*inputs), dtype=dtype)
            results.append(result.clamp(*outputs[0]) if outputs else result)
        return torch.cat(results, dim=-1)

    def rows(self, in_size: int, dtype: torch.dtype) -> None:
        """See `Linear.rows`."""
        return


class _ClippingMethod(UnquantizedMethod):
    """Plain weights whose products clip. Results that ranks have yet to add are left as they are:
    their layer clips the sums."""

    sums = ("self_attn.o_proj", "mlp.down_proj")

    def create(
        self, reader: WeightReader, shards: Sequence[ModuleShard], *, is_gated: bool = False
    ) -> Linear:
        """See `LinearMethod.create`."""
        parts = []
        for shard in shards:
            own = RANGES[:1] if shard.name.endswith(self.sums) else RANGES
            ranges = [self.range_of(reader, f"{shard.name}.{name}") for name in own]
            parts.append((super().create(reader, [shard], is_gated=is_gated), ranges))
        return _Clipped(parts)

    @staticmethod
    def range_of(reader: WeightReader, name: str) -> tuple[Tensor, Tensor]:
        """Read the least and the largest number of a range."""
        low, high = (torch.empty((), dtype=reader.dtype, device=reader.device) for _ in range(2))
        reader.read_into(low, f"{name}_min")
        reader.read_into(high, f"{name}_max")
        return low, high


class _NormedHeads(EncoderAttention):
    """Attention of Gemma 4's encoder: each head is normalised, and its halves turn by themselves.

    Turned pairs are half a head apart for kernels: of a head with the quarters c C r R, whose
    columns turn pairs of c and C and rows those of r and R, this makes r c R C.
    """

    def __init__(self, context: ModelContext, prefix: str, *, layer: int) -> None:
        super().__init__(context, prefix, layer=layer)
        reader, size, self._eps = context.reader, self._head_dim, context.config.rms_norm_eps
        quarters = torch.arange(size, device=reader.device).view(2, 2, size // 4)
        self._order = quarters.flip(0).transpose(0, 1).flatten()
        self._weights = [
            context.norm_weight(f"{prefix}.{name}_norm", Part(0, size))[self._order]
            for name in "qk"
        ]
        self._ones = torch.ones(size, device=reader.device)

    def prepared(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `EncoderAttention.prepared`."""
        norm, order, eps = self._kernels.rms_norm, self._order, self._eps
        q, k = (
            norm(heads.index_select(2, order), weight, eps)
            for heads, weight in zip((q, k), self._weights, strict=True)
        )
        return q, k, norm(v, self._ones, eps)


class _Layer:
    """x = x + attention(norm(x)); x = x + mlp(norm(x)); both perhaps clipped, normalised or scaled
    (LayerScale, Touvron et al., 2021, section 2)."""

    def __init__(self, context: ModelContext, vision: VisionConfig, layer: int) -> None:
        prefix, own = f"{VISION_LAYERS}.{layer}", context
        if (eps := vision.layers.qk_norm_eps) is not None:
            own = replace(context, config=replace(context.config, rms_norm_eps=eps))
        attention = _NormedHeads if vision.layers.has_head_norms else EncoderAttention
        self._attention = attention(own, f"{prefix}.self_attn", layer=layer)
        activation, size = vision.layers.activation, vision.layers.intermediate_size
        if vision.layers.is_gated or activation is None:
            self._mlp = gated_mlp(context, f"{prefix}.mlp", size, activation)
        else:
            self._mlp = block(context, f"{prefix}.mlp", size)
        self._attention_norm, self._mlp_norm = (
            context.norm(f"{prefix}.norm{n}", size=vision.hidden_size) for n in (1, 2)
        )
        self._ranges: list[tuple[Tensor, Tensor]] = []
        if vision.layers.clips:
            self._ranges = [
                _ClippingMethod.range_of(context.reader, f"{prefix}.{name}.{RANGES[1]}")
                for name in _ClippingMethod.sums
            ]
        self._output_norms: list[Norm] = []
        if vision.layers.has_output_norms:
            self._output_norms = [
                context.norm(f"{prefix}.output_norm{n}", size=vision.hidden_size) for n in (1, 2)
            ]
        self._scales: list[Tensor] = []
        if vision.layers.has_scales:
            self._scales = [
                read_tensor(context.reader, f"{prefix}.scale{n}", vision.hidden_size)
                for n in (1, 2)
            ]
        self._sees_all = vision.layers.window is None or layer in vision.layers.full

    def __call__(self, x: Tensor, grid: _Grid) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        groups = grid.whole if self._sees_all else grid.windows
        heads = self._attention.attend(self._attention_norm(x), groups, grid.tables)
        x = x + self._added(self._attention.project(heads), 0)
        return x + self._added(self._mlp(self._mlp_norm(x)), 1)

    def _added(self, x: Tensor, block: int) -> Tensor:
        if self._ranges:
            x = x.clamp(*self._ranges[block])
        if self._output_norms:
            x = self._output_norms[block](x)
        return x * self._scales[block] if self._scales else x


class _Projector:
    """outer(activate(inner(patches side by side))), of patches or of all of them normalised."""

    def __init__(
        self, context: ModelContext, vision: VisionConfig, own: PairProjector, name: str, norm: int
    ) -> None:
        """`context` is that of the encoder; `norm`: numbers that are normalised together."""
        hidden = vision.hidden_size
        self._hidden, self._group = hidden, hidden * vision.merge**2
        self._norm: Norm | None = None
        if own.normed is not Normed.NOTHING:
            eps = own.norm_eps or vision.layers.norm_eps
            with_eps = replace(context, config=replace(context.config, rms_norm_eps=eps))
            self._norm = with_eps.norm(f"{name}.norm", size=norm)
        self._norm_size = norm
        size = context.config.embedding_size
        inner = own.inner_size or size

        self._merger: Linear | None = None
        if own.has_merger:
            self._merger = context.whole(f"{name}.merger", hidden, self._group)
        num_inputs = hidden if own.has_merger else self._group
        self._inner = context.whole(f"{name}.inner", inner, num_inputs, has_bias=own.has_bias)
        self._outer = context.whole(f"{name}.outer", size, inner, has_bias=own.has_bias)
        self._activate = partial(activate, context.kernels, kind=own.activation)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T / merge ** 2, size of an embedding]."""
        if self._norm is not None:
            x = self._norm(x.reshape(-1, self._norm_size))
        x = x.reshape(-1, self._group)
        if self._merger is not None:  # its weights are of one number of all patches, then the next
            by_number = x.view(len(x), -1, self._hidden).transpose(1, 2)
            x = self._merger.apply(by_number.flatten(1))
        return self._outer.apply(self._activate(self._inner.apply(x)))


class _PoolingProjector:
    """outer(norm(mean of an embedding's patches)), as Gemma 3 has it."""

    def __init__(self, context: ModelContext, vision: VisionConfig) -> None:
        """`context` is that of the encoder."""
        self._shape = vision.merge**2, vision.hidden_size
        config = replace(context.config, layer_norm_bias=None, norm_weights=NormWeights.ABOVE_ONE)
        own = replace(context, config=config)
        self._norm = own.norm(f"{VISION_PROJECTOR}.norm", size=vision.hidden_size)
        shape = vision.hidden_size, context.config.embedding_size
        weight = read_tensor(context.reader, f"{VISION_PROJECTOR}.outer.weight", *shape)
        self._outer = context.method.make(weight.T.contiguous(), None)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T / merge ** 2, size of an embedding]."""
        return self._outer.apply(self._norm(x.view(-1, *self._shape).mean(dim=1)))


class _QueryProjector:
    """outer(norm(learned queries that attend to patches)), as Qwen-VL has it: every embedding is of
    all patches.
    """

    def __init__(self, context: ModelContext, vision: VisionConfig, own: QueryProjector) -> None:
        """`context` is that of the encoder."""
        make, size = context.method.make, context.config.embedding_size
        number, self._num_heads = own.num_queries, own.num_heads

        def read(name: str, *shape: int) -> Tensor:
            return read_tensor(context.reader, f"{VISION_PROJECTOR}.{name}", *shape)

        norm_queries, self._norm_patches, self._norm = (
            context.norm(f"{VISION_PROJECTOR}.{name}", size=size) for name in QUERY_NORMS
        )
        self._inner = make(read("inner.weight", size, vision.hidden_size), None)
        to_queries, self._to_keys, self._to_values = (
            make(weight.clone(), bias.clone())
            for weight, bias in zip(
                read("qkv_weight", 3 * size, size).chunk(3),
                read("qkv_bias", 3 * size).chunk(3),
                strict=True,
            )
        )
        self._mixed = make(read("o_proj.weight", size, size), read("o_proj.bias", size))
        self._outer = make(read("outer", size, size).T.contiguous(), None)
        places = read("positions", number, size)
        queries = norm_queries(read("queries", number, size)) + places
        self._queries = self._by_head(to_queries.apply(queries))
        square = places.view(math.isqrt(number), -1, size)
        side = vision.processor.side // vision.patch_size
        self._places = _stretched(square, side, side, is_cubic=True).flatten(0, 1)

    def _by_head(self, x: Tensor) -> Tensor:
        """x [n, size] -> [1, heads, n, numbers of a head]."""
        return x.view(1, len(x), self._num_heads, -1).transpose(1, 2)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [number of queries, size of an embedding]."""
        x = self._norm_patches(self._inner.apply(x))
        mixed = functional.scaled_dot_product_attention(
            self._queries,
            self._by_head(self._to_keys.apply(x + self._places)),
            self._by_head(self._to_values.apply(x)),
        )
        x = self._mixed.apply(mixed[0].transpose(0, 1).flatten(1))
        return self._outer.apply(self._norm(x))


class _ScalingProjector:
    """outer(norm(mean of an embedding's patches, moved and scaled)), as Gemma 4 has it."""

    def __init__(
        self, context: ModelContext, vision: VisionConfig, own: ScaledMeanProjector
    ) -> None:
        """`context` is that of the encoder."""
        reader, hidden = context.reader, vision.hidden_size
        self._shape, self._root = (vision.merge**2, hidden), math.sqrt(hidden)
        self._move_and_scale: list[Tensor] = []
        if own.standardizes:
            self._move_and_scale = [
                read_tensor(reader, name, hidden, dtype=torch.float32)
                for name in (VISION_MOVE, VISION_SCALE)
            ]
        ones = torch.ones(hidden, device=reader.device)
        self._norm = RMSNorm(context.kernels, ones, vision.layers.norm_eps)
        shape = context.config.embedding_size, hidden
        weight = read_tensor(context.reader, f"{VISION_PROJECTOR}.outer.weight", *shape)
        self._outer = context.method.make(weight, None)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T / merge ** 2, size of an embedding]."""
        means = x.view(-1, *self._shape).float().mean(dim=1).to(x.dtype)
        wide = means.float() * self._root  # beyond float16
        if self._move_and_scale:
            move, scale = self._move_and_scale
            wide = (wide - move) * scale
        return self._outer.apply(self._norm(wide.to(x.dtype)))


def _projectors(
    context: ModelContext, vision: VisionConfig
) -> tuple[Callable[[Tensor], Tensor], dict[int, Callable[[Tensor], Tensor]]]:
    """Load what makes embeddings of the last layer's results, and of others by their number;
    `context` is that of the encoder."""
    match vision.projector:
        case MeanProjector():
            return _PoolingProjector(context, vision), {}
        case ScaledMeanProjector() as own:
            return _ScalingProjector(context, vision, own), {}
        case QueryProjector() as own:
            return _QueryProjector(context, vision, own), {}
        case PairProjector() as own:
            first, *deep = (_Projector(context, vision, own, *pair) for pair in projectors(vision))
            return first, dict(zip(own.deep_layers, deep, strict=True))


class _Encoding:
    """See `ImageEncoding`."""

    def __init__(self, encoder: VisionEncoder, x: Tensor, grid: _Grid) -> None:
        self._encoder, self._x, self._grid = encoder, x, grid
        self._num_done = 0
        self._deep: dict[int, Tensor] = {}

    def advance(self, num_layers: int) -> None:
        """See `ImageEncoding`."""
        encoder = self._encoder
        for layer in encoder.layers[self._num_done : self._num_done + num_layers]:
            self._x = layer(self._x, self._grid)
            if (deep := encoder.deep.get(self._num_done)) is not None:
                self._deep[self._num_done] = deep(self._x)
            self._num_done += 1

    def embeddings(self) -> Tensor:
        """See `ImageEncoding`."""
        encoder = self._encoder
        self.advance(len(encoder.layers))
        x = self._x
        if encoder.config.drops_class:
            (whole,) = self._grid.whole
            x = x.view(*whole.tokens.shape, -1)[:, 1:].flatten(0, 1)
        if encoder.last_norm is not None:
            x = encoder.last_norm(x)
        deep = (self._deep[number] for number in encoder.deep)
        return torch.cat([encoder.projector(x), *deep], dim=1)


class VisionEncoder:
    """A rank's part of the encoder; what comes out is the same on all ranks.

    Weights stay numbers of the model's type, however those of the language model are kept: they are
    a small part of all. Each rank has all of them where heads do not divide.
    """

    def __init__(self, context: ModelContext, vision: VisionConfig) -> None:
        """`context` is that of the language model."""
        method = UnquantizedMethod(context.kernels)
        self.config = vision
        sizes = vision.layers.num_heads, vision.layers.intermediate_size
        tp = SingleRank() if any(size % context.tp.size for size in sizes) else context.tp
        own = replace(context, method=method, tp=tp, config=_layer_config(context, vision))
        reader, hidden = context.reader, vision.hidden_size
        self._device = reader.device
        lead = (1,) * vision.is_batched
        self._class: Tensor | None = None
        if vision.has_class:
            self._class = read_tensor(reader, VISION_CLASS, *lead, *lead, hidden).view(1, 1, hidden)
        self._positions: Tensor | None = None
        if vision.num_positions:
            shape = (*lead, *(2,) * vision.has_axes, vision.num_positions, hidden)
            positions = read_tensor(reader, VISION_POSITIONS, *shape)
            self._positions = self._in_order(positions.view(shape[len(lead) :]))
        self._patches = _patch_embedding(context, vision, method)
        of_layers = own
        if vision.layers.clips:
            of_layers = replace(own, method=_ClippingMethod(context.kernels))
        self.layers = [_Layer(of_layers, vision, layer) for layer in range(vision.layers.count)]
        has_bias = None if vision.layers.is_rms_around else True
        own = replace(own, config=replace(own.config, layer_norm_bias=has_bias))
        self._first_norm, self.last_norm = (
            own.norm(name, size=hidden) if is_there else None
            for name, is_there in (
                (VISION_NORM, vision.has_first_norm),
                (VISION_LAST_NORM, vision.has_last_norm),
            )
        )
        self.projector, self.deep = _projectors(own, vision)
        self._dtype = reader.dtype
        processor = vision.processor
        self._scale = processor.scale
        self._mean, self._std = (
            torch.tensor(values, dtype=torch.float32, device=reader.device)
            for values in (processor.mean, processor.std)
        )

    def encode(self, pixels: Tensor) -> _Encoding:
        """Begin with an image, see `Model.encode`.

        An image is encoded alone: nothing of it depends on others in the step.
        """
        rows, columns = (side // self.config.patch_size for side in pixels.shape[:2])
        x = self._patches.apply(self._by_patch(pixels, rows, columns))
        num_tiles = 1 if self.config.processor.tiles is None else rows // columns
        x = x.view(num_tiles, -1, x.shape[1])
        if self._class is not None:
            x = torch.cat([self._class.expand(num_tiles, -1, -1), x], dim=1)
        if self._positions is not None:
            x = x + self._positions_of(rows, columns)
        x = x.flatten(0, 1)
        if self._first_norm is not None:
            x = self._first_norm(x)
        return _Encoding(self, x, self._grid(rows, columns, len(x) // num_tiles, num_tiles))

    def _in_order(self, positions: Tensor) -> Tensor:
        """Return learned positions in the order of patches, where all images have one size."""
        if self.config.processor.any_size is not None:
            return positions
        own, others = positions.tensor_split([int(self.config.has_class)])
        side = self.config.processor.side // self.config.patch_size
        square = others.view(math.isqrt(len(others)), -1, others.shape[1])
        square = _stretched(square, side, side, is_cubic=True)
        return torch.cat([own, self._merged(square, side, side)])

    def _by_patch(self, pixels: Tensor, rows: int, columns: int) -> Tensor:
        """Return the numbers of each patch, [T, 3 * patch_size ** 2], of one embedding together."""
        patch, merge = self.config.patch_size, self.config.merge
        # Pixels behind the last whole patch are not read.
        whole = pixels[: rows * patch, : columns * patch]
        values = (whole.float() * self._scale - self._mean) / self._std
        shape = (rows // merge, merge, patch, columns // merge, merge, patch, 3)
        by_patch = values.view(shape).permute(0, 3, 1, 4, 6, 2, 5)
        return by_patch.reshape(rows * columns, -1).to(self._dtype)

    def _merged(self, by_place: Tensor, rows: int, columns: int) -> Tensor:
        """Return values [rows, columns, ...] of patches in their order, [T, ...]."""
        merge, rest = self.config.merge, by_place.shape[2:]
        shape = (rows // merge, merge, columns // merge, merge, *rest)
        return by_place.reshape(shape).transpose(1, 2).reshape(rows * columns, *rest)

    def _positions_of(self, rows: int, columns: int) -> Tensor:
        """Return learned positions [T, hidden], stretched where images have any size, or by row
        and column."""
        assert self._positions is not None
        if self.config.processor.any_size is None:
            return self._positions
        if self.config.has_axes:
            of_columns, of_rows = self._positions
            return self._merged(of_columns[:columns] + of_rows[:rows, None], rows, columns)
        side, size = math.isqrt(len(self._positions)), self._positions.shape[1]
        square = self._positions.view(side, side, size)
        return self._merged(_stretched(square, rows, columns, is_cubic=False), rows, columns)

    def _grid(self, rows: int, columns: int, num_tokens: int, num_tiles: int) -> _Grid:
        """`num_tokens`: of each tile, with its class."""
        config, device = self.config, self._device
        tokens = torch.arange(num_tiles * num_tokens, device=device)
        tables = None
        if (rope := config.rope) is not None:
            size = config.hidden_size // config.layers.num_heads // 2
            steps = torch.arange(0, size, 2, dtype=torch.float32, device=device)
            powers = torch.stack([steps, steps + rope.alternates]) / size
            inverse = 1.0 / rope.theta**powers
            sides = (torch.arange(side, device=device) for side in (rows, columns))
            places = torch.stack(torch.meshgrid(*sides, indexing="ij"), dim=-1)
            angles = (self._merged(places, rows, columns)[:, :, None] * inverse).flatten(1)
            tables = angles.cos(), angles.sin()
        windows: list[Group] = []
        if (side := config.layers.window) is not None:
            merge = config.merge
            by_place = tokens.view(rows // merge, columns // merge, merge**2)
            by_size: dict[int, list[Tensor]] = {}
            for band in by_place.split_with_sizes(_parts(rows // merge, side)):
                for part in band.split_with_sizes(_parts(columns // merge, side), dim=1):
                    by_size.setdefault(part.numel(), []).append(part.flatten())
            stacked = [torch.stack(parts) for parts in by_size.values()]
            windows = [Group(part, part, None) for part in stacked]
        by_tile = tokens.view(num_tiles, num_tokens)
        return _Grid([Group(by_tile, by_tile, None)], windows, tables)


def _stretched(square: Tensor, rows: int, columns: int, *, is_cubic: bool) -> Tensor:
    """Return values [side, side, n] of a grid stretched to [rows, columns, n].

    `is_cubic`: by cubic polynomials between the middles of cells; else linearly between corners.
    """
    if square.shape[:2] == (rows, columns):
        return square
    stretched = functional.interpolate(
        square.float().permute(2, 0, 1)[None],
        size=(rows, columns),
        mode="bicubic" if is_cubic else "bilinear",
        align_corners=not is_cubic,
    )
    return stretched[0].permute(1, 2, 0).to(square.dtype)


def _parts(length: int, size: int) -> list[int]:
    """Return the lengths of parts of `size`, of which the last may be shorter."""
    return [min(size, length - start) for start in range(0, length, size)]


def _patch_embedding(
    context: ModelContext, vision: VisionConfig, method: UnquantizedMethod
) -> Linear:
    """Load the product of a patch; weights for several frames are added: all are the image."""
    reader, patch = context.reader, vision.patch_size
    frames = () if vision.patches.num_frames is None else (vision.patches.num_frames,)
    shape = (vision.hidden_size, 3, *frames, patch, patch)
    if vision.patches.is_flat:
        flat = read_tensor(reader, f"{VISION_PATCHES}.weight", vision.hidden_size, 3 * patch**2)
        by_pixel = flat.view(-1, patch, patch, 3)
        return method.make(by_pixel.permute(0, 3, 1, 2).flatten(1), None)
    weight = read_tensor(context.reader, f"{VISION_PATCHES}.weight", *shape)
    if frames:
        weight = weight.float().sum(dim=2).to(reader.dtype)
    bias = None
    if vision.patches.has_bias:
        bias = read_tensor(reader, f"{VISION_PATCHES}.bias", vision.hidden_size)
    return method.make(weight.flatten(1), bias)


def _layer_config(context: ModelContext, vision: VisionConfig) -> ModelConfig:
    """Return the sizes and switches by which layers of the encoder are built."""
    return replace(
        context.config,
        vision=None,
        gemma4=None,
        word_size=context.config.embedding_size,
        hidden_size=vision.hidden_size,
        intermediate_size=vision.layers.intermediate_size,
        num_layers=vision.layers.count,
        num_heads=vision.layers.num_heads,
        num_kv_heads=vision.layers.num_heads,
        head_dim=vision.hidden_size // vision.layers.num_heads,
        attention_scale=1.0 if vision.layers.has_head_norms else None,
        rms_norm_eps=vision.layers.norm_eps,
        layer_norm_bias=None if vision.layers.is_rms else True,
        has_whole_qk_norm=vision.layers.qk_norm_eps is not None,
        attention_chunk=None,
        norm_weights=NormWeights.WIDE if vision.layers.has_head_norms else NormWeights.PLAIN,
        activation=vision.layers.activation,
        has_gelu=False,
        qkv_bias=vision.layers.qkv_bias,
        attention_output_bias=vision.layers.has_bias,
        mlp_bias=vision.layers.has_bias,
        merged=frozenset({vision.layers.merged} - {""}),
        rotates_neighbours=False,
        has_output_gate=False,
        recurrent=None,
        moe=None,
        sliding_windows=(None,) * vision.layers.count,
    )
