"""Encoders of images: pixels to embeddings that stand for an image's tokens.

CLIP's (Radford et al., 2021, section 2.4, with the vision transformer of Dosovitskiy et al., 2021,
section 3.1): patches are embedded, and all see each other. LLaVA-1.5 takes the result of a layer
before the last one, and two products make embeddings of the language model's size of it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lightserve.models.base import Part
from lightserve.models.config import ModelConfig
from lightserve.models.encoder import EncoderAttention, Group
from lightserve.models.layers.feed_forward import activation_of, plain_mlp
from lightserve.models.layers.linear import (
    Linear,
    ModelContext,
    ModuleShard,
    UnquantizedMethod,
    read_vector,
)
from lightserve.models.vision_config import VisionConfig
from lightserve.models.weight_files import (
    VISION,
    VISION_CLASS,
    VISION_PATCHES,
    VISION_POSITIONS,
    VISION_PROJECTOR,
)


class _Layer:
    """x = x + attention(norm(x)); x = x + mlp(norm(x))."""

    def __init__(self, context: ModelContext, vision: VisionConfig, layer: int) -> None:
        prefix = f"{VISION}encoder.layers.{layer}"
        self._attention = EncoderAttention(context, f"{prefix}.self_attn", layer=layer)
        self._mlp = plain_mlp(context, f"{prefix}.mlp", vision.activation)
        self._attention_norm, self._mlp_norm = (
            context.norm(f"{prefix}.layer_norm{n}", size=vision.hidden_size) for n in (1, 2)
        )

    def __call__(self, x: Tensor, groups: list[Group]) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        heads = self._attention.attend(self._attention_norm(x), groups, None)
        x = x + self._attention.project(heads)
        return x + self._mlp(self._mlp_norm(x))


class VisionEncoder:
    """A rank's part of the encoder; what comes out is the same on all ranks.

    Weights stay numbers of the model's type, however those of the language model are kept: they are
    a small part of all.
    """

    def __init__(self, context: ModelContext, vision: VisionConfig) -> None:
        """`context` is that of the language model."""
        method = UnquantizedMethod(context.kernels)
        self.config = vision
        self._context = own = replace(context, method=method, config=_layer_config(context, vision))
        reader, hidden, patch = context.reader, vision.hidden_size, vision.patch_size
        self._class = read_vector(reader, VISION_CLASS, hidden)
        shape = (1 + vision.num_patches, hidden)
        self._positions = torch.empty(shape, dtype=reader.dtype, device=reader.device)
        reader.read_into(self._positions, VISION_POSITIONS)
        shape4 = (hidden, 3, patch, patch)
        weight = torch.empty(shape4, dtype=reader.dtype, device=reader.device)
        reader.read_into(weight, VISION_PATCHES)
        self._patches = method.make(weight.flatten(1), None)
        self._norm = own.norm(f"{VISION}pre_layrnorm", size=hidden)
        self._layers = [_Layer(own, vision, layer) for layer in range(vision.num_used_layers)]
        size = context.config.embedding_size
        self._inner = self._product(f"{VISION_PROJECTOR}linear_1", size, hidden)
        self._outer = self._product(f"{VISION_PROJECTOR}linear_2", size, size)
        self._activate = activation_of(context.kernels, vision.projector_activation)
        processor = vision.processor
        self._scale = processor.scale
        self._mean, self._std = (
            torch.tensor(values, dtype=torch.float32, device=reader.device)
            for values in (processor.mean, processor.std)
        )

    def _product(self, name: str, num_outputs: int, num_inputs: int) -> Linear:
        """Load a product of the projector, whole on every rank."""
        shard = ModuleShard(
            name=name,
            rows=Part(0, num_outputs),
            columns=Part(0, num_inputs),
            has_bias=self.config.has_projector_bias,
        )
        return self._context.method.create(self._context.reader, [shard])

    def encode(self, pixels: Tensor) -> Tensor:
        """Return the embeddings of an image's tokens, [num_tokens, hidden of the language model].

        `pixels`: uint8 [image_size, image_size, 3] on the model's device. An image is encoded
        alone: nothing of it depends on others in the step.
        """
        config, patch = self.config, self.config.patch_size
        grid = config.image_size // patch
        side = grid * patch  # pixels behind the last whole patch are not read
        values = (pixels[:side, :side].float() * self._scale - self._mean) / self._std
        by_patch = values.view(grid, patch, grid, patch, 3).permute(0, 2, 4, 1, 3)
        patches = by_patch.reshape(config.num_patches, -1).to(self._positions.dtype)
        x = torch.cat([self._class[None], self._patches.apply(patches)]) + self._positions
        x = self._norm(x)
        tokens = torch.arange(len(x), device=x.device)[None]
        for layer in self._layers:
            x = layer(x, [Group(tokens, tokens, None)])
        if config.drops_class:
            x = x[1:]
        return self._outer.apply(self._activate(self._inner.apply(x)))


def _layer_config(context: ModelContext, vision: VisionConfig) -> ModelConfig:
    """Return the sizes and switches by which layers of the encoder are built."""
    return replace(
        context.config,
        vision=None,
        hidden_size=vision.hidden_size,
        intermediate_size=vision.intermediate_size,
        num_layers=vision.num_used_layers,
        num_heads=vision.num_heads,
        num_kv_heads=vision.num_heads,
        head_dim=vision.hidden_size // vision.num_heads,
        attention_scale=None,
        rms_norm_eps=vision.norm_eps,
        layer_norm_bias=True,
        attention_chunk=None,
        norm_offset=0.0,
        activation=vision.activation,
        qkv_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        merged=frozenset(),
        rotates_neighbours=False,
        sliding_windows=(None,) * vision.num_layers,
    )
