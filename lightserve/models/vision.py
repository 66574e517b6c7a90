"""Encoders of images: pixels to embeddings that stand for an image's tokens.

Patches are embedded, and all see each other (Dosovitskiy et al., 2021, section 3.1), in CLIP
(Radford et al., 2021, section 2.4) with learned positions. Qwen's encoders rotate queries and keys
by row and column (Wang et al., 2024, section 2.1), some within windows (Bai et al., 2025, section
2.1). Two products make embeddings of the language model's size, each of one or several patches.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from lightserve.models.base import Part
from lightserve.models.config import ModelConfig
from lightserve.models.encoder import EncoderAttention, Group
from lightserve.models.layers.feed_forward import activation_of, gated_mlp, plain_mlp
from lightserve.models.layers.linear import (
    Linear,
    ModelContext,
    ModuleShard,
    Norm,
    UnquantizedMethod,
    read_vector,
)
from lightserve.models.vision_config import VisionConfig
from lightserve.models.weight_files import (
    VISION_CLASS,
    VISION_LAYERS,
    VISION_NORM,
    VISION_PATCHES,
    VISION_POSITIONS,
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


class _Layer:
    """x = x + attention(norm(x)); x = x + mlp(norm(x))."""

    def __init__(self, context: ModelContext, vision: VisionConfig, layer: int) -> None:
        prefix = f"{VISION_LAYERS}.{layer}"
        self._attention = EncoderAttention(context, f"{prefix}.self_attn", layer=layer)
        if vision.layers.activation is None:
            self._mlp = gated_mlp(context, f"{prefix}.mlp", vision.layers.intermediate_size)
        else:
            self._mlp = plain_mlp(context, f"{prefix}.mlp", vision.layers.activation)
        self._attention_norm, self._mlp_norm = (
            context.norm(f"{prefix}.norm{n}", size=vision.hidden_size) for n in (1, 2)
        )
        self._sees_all = vision.layers.window is None or layer in vision.layers.full

    def __call__(self, x: Tensor, grid: _Grid) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        groups = grid.whole if self._sees_all else grid.windows
        heads = self._attention.attend(self._attention_norm(x), groups, grid.tables)
        x = x + self._attention.project(heads)
        return x + self._mlp(self._mlp_norm(x))


class _Projector:
    """outer(activate(inner(patches side by side))), of patches or of all of them normalised."""

    def __init__(self, context: ModelContext, vision: VisionConfig, name: str, norm: int) -> None:
        """`context` is that of the encoder; `norm`: numbers that are normalised together."""
        self._group = vision.hidden_size * vision.merge**2
        self._norm: Norm | None = None
        if vision.projector.has_norm:
            self._norm = context.norm(f"{name}.norm", size=norm)
        self._norm_size = norm
        size = context.config.embedding_size
        inner = vision.projector.inner_size or size
        self._inner, self._outer = (
            context.method.create(
                context.reader,
                [
                    ModuleShard(
                        name=f"{name}.{part}",
                        rows=Part(0, num_outputs),
                        columns=Part(0, num_inputs),
                        has_bias=vision.projector.has_bias,
                    )
                ],
            )
            for part, num_outputs, num_inputs in (
                ("inner", inner, self._group),
                ("outer", size, inner),
            )
        )
        self._activate = activation_of(context.kernels, vision.projector.activation)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T / merge ** 2, size of an embedding]."""
        if self._norm is not None:
            x = self._norm(x.reshape(-1, self._norm_size))
        x = x.reshape(-1, self._group)
        return self._outer.apply(self._activate(self._inner.apply(x)))


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
        x = self._x[1:] if encoder.config.drops_class else self._x
        deep = (self._deep[number] for number in encoder.config.projector.deep_layers)
        return torch.cat([encoder.projector(x), *deep], dim=1)


class VisionEncoder:
    """A rank's part of the encoder; what comes out is the same on all ranks.

    Weights stay numbers of the model's type, however those of the language model are kept: they are
    a small part of all.
    """

    def __init__(self, context: ModelContext, vision: VisionConfig) -> None:
        """`context` is that of the language model."""
        method = UnquantizedMethod(context.kernels)
        self.config = vision
        own = replace(context, method=method, config=_layer_config(context, vision))
        reader, hidden = context.reader, vision.hidden_size
        self._device = reader.device
        self._class = read_vector(reader, VISION_CLASS, hidden) if vision.has_class else None
        self._positions: Tensor | None = None
        if vision.num_positions:
            shape = (vision.num_positions, hidden)
            self._positions = torch.empty(shape, dtype=reader.dtype, device=reader.device)
            reader.read_into(self._positions, VISION_POSITIONS)
        self._patches = _patch_embedding(context, vision, method)
        self._first_norm: Norm | None = None
        if vision.has_first_norm:
            self._first_norm = own.norm(VISION_NORM, size=hidden)
        self.layers = [_Layer(own, vision, layer) for layer in range(vision.layers.count)]
        self.projector, *deep = (
            _Projector(own, vision, name, size) for name, size in projectors(vision)
        )
        self.deep = dict(zip(vision.projector.deep_layers, deep, strict=True))
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
        if self._class is not None:
            x = torch.cat([self._class[None], x])
        if self._positions is not None:
            x = x + self._positions_of(rows, columns)
        if self._first_norm is not None:
            x = self._first_norm(x)
        return _Encoding(self, x, self._grid(rows, columns, len(x)))

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
        """Return learned positions [T, hidden], stretched where images have any size."""
        assert self._positions is not None
        if self.config.processor.any_size is None:
            return self._positions
        side = math.isqrt(len(self._positions))
        square = self._positions.float().T.reshape(1, -1, side, side)
        stretched = functional.interpolate(
            square, size=(rows, columns), mode="bilinear", align_corners=True
        )
        return self._merged(stretched[0].permute(1, 2, 0), rows, columns).to(self._dtype)

    def _grid(self, rows: int, columns: int, num_tokens: int) -> _Grid:
        config, device = self.config, self._device
        tokens = torch.arange(num_tokens, device=device)
        tables = None
        if config.rope_theta is not None:
            size = config.hidden_size // config.layers.num_heads // 2
            powers = torch.arange(0, size, 2, dtype=torch.float32) / size
            inverse = 1.0 / config.rope_theta**powers
            places = torch.stack(
                torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"), dim=-1
            )
            angles = (self._merged(places, rows, columns)[:, :, None] * inverse).flatten(1)
            tables = angles.cos().to(device), angles.sin().to(device)
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
        return _Grid([Group(tokens[None], tokens[None], None)], windows, tables)


def _parts(length: int, size: int) -> list[int]:
    """Return the lengths of parts of `size`, of which the last may be shorter."""
    return [min(size, length - start) for start in range(0, length, size)]


def _patch_embedding(
    context: ModelContext, vision: VisionConfig, method: UnquantizedMethod
) -> Linear:
    """Load the product of a patch; weights for several frames are added: all are the image."""
    reader, patch = context.reader, vision.patch_size
    frames = () if vision.num_frames is None else (vision.num_frames,)
    shape = (vision.hidden_size, 3, *frames, patch, patch)
    weight = torch.empty(shape, dtype=reader.dtype, device=reader.device)
    reader.read_into(weight, f"{VISION_PATCHES}.weight")
    if frames:
        weight = weight.float().sum(dim=2).to(reader.dtype)
    bias = None
    if vision.has_patch_bias:
        bias = read_vector(reader, f"{VISION_PATCHES}.bias", vision.hidden_size)
    return method.make(weight.flatten(1), bias)


def _layer_config(context: ModelContext, vision: VisionConfig) -> ModelConfig:
    """Return the sizes and switches by which layers of the encoder are built."""
    return replace(
        context.config,
        vision=None,
        word_size=context.config.embedding_size,
        hidden_size=vision.hidden_size,
        intermediate_size=vision.layers.intermediate_size,
        num_layers=vision.layers.count,
        num_heads=vision.layers.num_heads,
        num_kv_heads=vision.layers.num_heads,
        head_dim=vision.hidden_size // vision.layers.num_heads,
        attention_scale=None,
        rms_norm_eps=vision.layers.norm_eps,
        layer_norm_bias=None if vision.layers.is_rms else True,
        attention_chunk=None,
        norm_offset=0.0,
        activation=vision.layers.activation,
        has_gelu=False,
        qkv_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        merged=frozenset({"qkv"}) if vision.layers.has_merged_qkv else frozenset(),
        rotates_neighbours=False,
        has_output_gate=False,
        recurrent=None,
        moe=None,
        sliding_windows=(None,) * vision.layers.count,
    )
