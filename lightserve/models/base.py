"""A model as the engine sees it, and the ranks that share it.

Every rank calls the same collectives in the same order with the same shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightserve.kernels.interface import FACTOR_BYTES, WORD_BYTES, AttentionBatch, SeenWhole
from lightserve.kernels.weights import (
    SILU_GATES,
    BlockActivation,
    ConvolutionSizes,
    ExpertChoice,
    KeptInputs,
    KernelShapes,
    StateBank,
    StateSizes,
)
from lightserve.models.config import ModelConfig
from lightserve.models.moe_config import MoeConfig, Scoring
from lightserve.models.plain_config import NormWeights
from lightserve.models.recurrent_config import ConvolutionConfig, DeltaConfig, MambaConfig
from lightserve.types import Activation

# The sizes of a model's parts as the kernels of one rank see them.


def kernel_shapes(
    config: ModelConfig,
    tp: TensorParallel,
    layout: KVLayout,
    *,
    dtype: torch.dtype,
    context_len: int,
) -> list[KernelShapes]:
    """Return the sizes of this rank's part of a model, for each group of its KV."""
    moe, model_dtype = config.moe, str(dtype).removeprefix("torch.")
    inner = config.intermediate_size
    if moe is not None and not config.has_blocks:
        inner = moe.shared_size or moe.intermediate_size
    shapes = KernelShapes(
        dtype=dtype,
        hidden_size=config.hidden_size,
        intermediate_size=even_part(inner, tp).size,
        num_heads=even_part(config.num_heads, tp).size,
        num_kv_heads=kv_head_part(config.num_kv_heads, tp).size,
        head_dim=config.head_dim,
        value_dim=None if config.latent is None else config.latent.rank,
        rotary_dim=config.rotary_share or config.head_dim,
        sliding_windows=tuple(dict.fromkeys(config.sliding_windows)),
        rms_norm_eps=config.rms_norm_eps,
        has_wide_norms=config.norm_weights is not NormWeights.PLAIN,
        qk_norm=config.qk_norm,
        qkv_bias=config.qkv_bias,
        has_alibi=config.alibi_slopes is not None,
        soft_cap=config.attention_soft_cap,
        context_len=context_len,
        num_experts=0 if moe is None else moe.num_experts,
        num_chosen_experts=0 if moe is None else moe.num_chosen,
        expert_choice=None if moe is None or moe.scoring is Scoring.CHOSEN else choice_of(moe),
        has_choice_bias=moe is not None and moe.has_choice_bias,
        expert_activation=expert_activation(config),
        has_expert_biases=moe is not None and moe.has_biases,
        has_sinks=config.has_sinks,
        delta=_state_sizes(config, tp),
        convolution=_convolution_sizes(config, tp),
        expert_inputs=None if moe is None else moe.latent_size,
        expert_size=0 if moe is None else even_part(moe.intermediate_size, tp).size,
    )
    return [
        replace(
            shapes,
            num_kv_heads=group.num_kv_heads,
            head_dim=group.head_dim,
            rotary_dim=config.rotary_share or group.head_dim,
            pool_dtype=None if group.dtype == model_dtype else group.pool_dtype,
        )
        for group in layout.groups
    ]


def _convolution_sizes(config: ModelConfig, tp: TensorParallel) -> ConvolutionSizes | None:
    own = config.recurrent
    if not isinstance(own, ConvolutionConfig):
        return None
    return ConvolutionSizes(even_part(own.channels, tp).size, own.width)


def _state_sizes(config: ModelConfig, tp: TensorParallel) -> StateSizes | None:
    delta = config.recurrent
    if isinstance(delta, MambaConfig):
        groups, heads = kv_head_part(delta.num_groups, tp), even_part(delta.num_heads, tp)
        own = groups.size, heads.size, delta.state_size, delta.head_dim, delta.width
        return StateSizes(*own, is_mamba=True)
    if not isinstance(delta, DeltaConfig):
        return None
    keys, values = even_part(delta.num_key_heads, tp), even_part(delta.num_value_heads, tp)
    sizes = keys.size, values.size, delta.key_dim, delta.value_dim, delta.width
    return StateSizes(*sizes, delta.beta_scale, decays_channels=delta.rank > 0)


def expert_activation(config: ModelConfig) -> BlockActivation:
    """Return what a model's experts have between their products."""
    if config.moe is not None and config.moe.clamp is not None:
        alpha, limit = config.moe.clamp
        return BlockActivation(Activation.CLAMPED_SILU, alpha=alpha, limit=limit)
    if config.activation is not None:
        return BlockActivation(config.activation, is_gated=False)
    return BlockActivation(Activation.GELU_TANH) if config.has_gelu else SILU_GATES


def choice_of(moe: MoeConfig) -> ExpertChoice:
    """Return how experts are chosen, for kernels; `Scoring.CHOSEN` they do not know."""
    return ExpertChoice(
        moe.num_chosen,
        moe.scoring is Scoring.SIGMOID,
        moe.normalises,
        moe.scale,
        moe.num_groups,
        moe.num_chosen_groups,
        moe.group_best,
        moe.added,
    )


# How much memory a token's keys and values take: the only module that knows. Torch-free.

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1}


@dataclass(frozen=True, kw_only=True)
class KVGroup:
    """Layers whose KV has one shape and one lifetime."""

    num_layers: int
    num_kv_heads: int
    """KV heads of one rank."""
    head_dim: int
    dtype: str
    """Key of DTYPE_BYTES."""
    value_dim: int | None = None
    """Values are so many of a key's first numbers; None: they are numbers of their own."""
    word: int = 1
    """Bytes of which a head of 8 bits takes a multiple."""

    @property
    def num_parts(self) -> int:
        """Return 2 for keys and values, 1 where they are one."""
        return 2 if self.value_dim is None else 1

    @property
    def head_size(self) -> int:
        """Numbers that a pool holds for a token's head."""
        if DTYPE_BYTES[self.dtype] > 1:
            return self.head_dim
        return -(-(self.head_dim + FACTOR_BYTES) // self.word) * self.word

    @property
    def pool_dtype(self) -> torch.dtype:
        """Type of a pool's numbers; of fp8, and of the factors behind, their bytes."""
        found: torch.dtype = getattr(torch, "uint8" if self.dtype == "fp8" else self.dtype)
        return found

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token in all layers of the group, on one rank."""
        per_layer = self.num_parts * self.num_kv_heads * self.head_size * DTYPE_BYTES[self.dtype]
        return self.num_layers * per_layer


@dataclass(frozen=True)
class StateLayout:
    """The states of one rank's recurrent layers."""

    num_layers: int
    tensor_bytes: tuple[int, ...]
    """Bytes of each state tensor of a layer."""


class StatePlace(NamedTuple):
    """Where a state tensor is: slots of one attention layer's keys and values."""

    kv_layer: int
    first: int
    num_slots: int


@dataclass(frozen=True)
class KVLayout:
    """The KV of one rank: a group for each size of heads that a model has, mostly one.

    A slot holds a token's keys and values in the layers of all groups.
    States are slots of the same memory. Recurrent layer number l, of those alone, has slots of
    attention layer l % A, where there are A; the next A layers have other slots of them.
    """

    groups: tuple[KVGroup, ...]
    states: StateLayout | None = None
    """States in slots of the first group; None: the model has none."""

    @property
    def num_state_slots(self) -> int:
        """Slots that hold the states of one sequence."""
        places = self.state_places()
        return max(
            (place.first + place.num_slots for layer in places for place in layer), default=0
        )

    def state_places(self) -> list[tuple[StatePlace, ...]]:
        """Return the places of each recurrent layer's state tensors."""
        if self.states is None:
            return []
        group = self.groups[0]
        own_bytes = group.bytes_per_token // group.num_layers
        sizes = [-(-size // own_bytes) for size in self.states.tensor_bytes]
        places = []
        for layer in range(self.states.num_layers):
            turn, kv_layer = divmod(layer, group.num_layers)
            starts = [turn * sum(sizes) + sum(sizes[:number]) for number in range(len(sizes))]
            places.append(
                tuple(StatePlace(kv_layer, *own) for own in zip(starts, sizes, strict=True))
            )
        return places

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one slot takes on one rank."""
        return sum(group.bytes_per_token for group in self.groups)


def kv_layout(
    config: ModelConfig,
    *,
    tp_size: int,
    dtype: str,
    model_dtype: str | None = None,
    is_on_gpu: bool = False,
) -> KVLayout:
    """Return the layout of each rank's KV pool.

    An encoder keeps none: its tokens take no memory of the pool. `dtype` and `model_dtype` (None:
    the same) are keys of DTYPE_BYTES.
    """
    groups = []
    for layers in config.kv_groups:
        shape = config.shape_of(layers[0])
        group = KVGroup(
            num_layers=len(layers) if config.encoder is None else 0,
            num_kv_heads=max(1, shape.num_kv_heads // tp_size),
            head_dim=shape.head_dim,
            dtype=dtype,
            value_dim=None if config.latent is None else config.latent.rank,
            word=WORD_BYTES if is_on_gpu else 1,
        )
        groups.append(group)
    states = None
    if config.recurrent is not None:
        own = config.recurrent.state_bytes(DTYPE_BYTES[model_dtype or dtype], tp_size)
        states = StateLayout(len(config.recurrent.layers), own)
    return KVLayout(groups=tuple(groups), states=states)


class KVTensors(Protocol):
    """The KV of all layers, addressed by slots."""

    @property
    def k(self) -> Sequence[Tensor]:
        """Keys, one tensor [num_slots, num_kv_heads, head_size] per layer."""

    @property
    def v(self) -> Sequence[Tensor]:
        """Values, as `k`, or the first numbers of those: [num_slots, num_kv_heads, value_dim]."""

    @property
    def states(self) -> Sequence[tuple[StateBank, ...]]:
        """The state tensors of each recurrent layer."""


def logits_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the type of the logits of a model of type `dtype`.

    The CPU's sampler computes with them as they are; a GPU's kernels read the model's own type: a
    copy in float32 would take twice the memory and say no more.
    """
    return torch.float32 if device.type == "cpu" else dtype


class Replaced(NamedTuple):
    """Embeddings that stand in place of those of some tokens of a pass."""

    places: Tensor
    """int64 [n], which of the T tokens, each once."""
    values: Tensor
    """[n, (1 + deep) * embedding_size]: embeddings, then what is added behind each of the first
    layers, see `PairProjector.deep_layers`."""
    seen: Sequence[SeenWhole] = ()
    """Images whose tokens see each other."""


class KeepsStates(Protocol):
    """A recurrent layer; of tensor parallelism as the model is."""

    dtype: torch.dtype
    num_channels: int
    """Inputs of a token, …"""
    num_rates: int
    """… and rates of it, that the layer keeps where `AttentionBatch.kept` says so."""

    def replay(
        self, kept: KeptInputs, places: Tensor, batch: AttentionBatch, kv: KVTensors
    ) -> None:
        """Update the states of rows by inputs that a pass before has kept.

        Args:
            kept: what the pass has kept.
            places: int64 [T], the inputs of the batch's tokens among those.
            batch: rows and their lengths; slots of keys and values mean nothing.
            kv: this rank's pool.
        """


class DraftHead(Protocol):
    """Guesses the token behind the next one; of tensor parallelism as the model is."""

    dtype: torch.dtype

    def states(
        self,
        input_ids: Tensor,
        before: Tensor,
        batch: AttentionBatch,
        kv: KVTensors,
        *,
        writes_only: bool = False,
    ) -> Tensor:
        """Write the new tokens' KV, and return states whose `Model.logits` are of the next tokens.

        Args:
            input_ids: int64 [T].
            before: [T, hidden_size], the state of the token before each: `Model.hidden`, or, for
                a token that is itself a guess, what this returned for that one.
            batch: of rows without their first token, before which there is none.
            kv: this rank's pool.
            writes_only: whether nothing else is wanted.

        Returns:
            [T, hidden_size]; with `writes_only` [0, hidden_size].
        """


class ImageEncoding(Protocol):
    """An image on its way through the encoder's layers."""

    def advance(self, num_layers: int) -> None:
        """Compute its next layers, as many as there are; every rank takes part."""

    def embeddings(self) -> Tensor:
        """Compute the rest, and return the embeddings of its tokens, see `Replaced.values`."""


class Model(Protocol):
    """A loaded model, or one rank's part of it."""

    config: ModelConfig
    context_len: int
    """Longest sequence it was loaded for: positions must be below."""
    draft_head: DraftHead | None
    """Guesses tokens, see `ModelConfig.has_draft_head`; None: the model has no such part."""
    recurrent: Sequence[KeepsStates]
    """Its recurrent layers, in order."""

    def forward(
        self, input_ids: Tensor, batch: AttentionBatch, kv: KVTensors, logit_rows: Tensor
    ) -> Tensor | None:
        """Run one mixed pass of prefill chunks and decodes under `torch.inference_mode`.

        Args:
            input_ids: int64 [T], every id below vocab_size.
            batch: where each token stands and where its KV goes.
            kv: this rank's pool; the new tokens' slots are written.
            logit_rows: int64 [L], indices into the T tokens, L >= 0.

        Returns:
            logits [L, vocab_size] of `logits_dtype` on rank 0, None on the others. With L = 0 the
            LM head and the last layer's feed-forward are not computed.
        """

    def hidden(
        self,
        input_ids: Tensor,
        batch: AttentionBatch,
        kv: KVTensors,
        logit_rows: Tensor | None,
        replaced: Replaced | None = None,
    ) -> Tensor:
        """Run the same pass up to the LM head; return its input [L, hidden_size].

        `logit_rows` None stands for all T tokens, in order. `replaced`: embeddings of images.
        """

    def encode(self, pixels: Tensor) -> ImageEncoding:
        """Begin with an image; every rank takes part.

        `pixels` is uint8 [height, width, 3] on the model's device, as `VisionConfig.takes` them.
        """

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor | None:
        """Return the logits of any rows of `hidden`, as `forward`; every rank must take part.

        They are put into `out`, [L, vocab_size] with L > 0, if rank 0 gives one.
        """


# Tensor parallelism as the layers see it: a rank, and three collectives.


class TensorParallel(Protocol):
    """A group of ranks, each with its part of every weight."""

    rank: int
    """0 … size-1; rank 0 has the logits and samples."""
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over the ranks, same shape and dtype; may overwrite `x`."""

    def gather(self, x: Tensor) -> Tensor | None:
        """Return the ranks' `x` [N, K] side by side, [N, size*K], on rank 0 and None elsewhere."""

    def broadcast(self, x: Tensor) -> Tensor:
        """Return rank 0's `x`; every rank passes a tensor of its shape and dtype, overwritten."""

    def recording(self) -> AbstractContextManager[None]:
        """Return a context in which collectives become part of CUDA graphs."""

    def close(self) -> None:
        """Leave the group."""


class SingleRank:
    """The group of one: nothing to exchange."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return `x`."""
        return x

    def gather(self, x: Tensor) -> Tensor | None:
        """Return `x`."""
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """Return `x`."""
        return x

    def recording(self) -> AbstractContextManager[None]:
        """Return nothing to do."""
        return nullcontext()

    def close(self) -> None:
        """Nothing to leave."""


class Part(NamedTuple):
    """A rank's half-open range of a dimension."""

    start: int
    size: int


def even_part(total: int, tp: TensorParallel) -> Part:
    """Return this rank's equal part of a dimension that divides."""
    assert total % tp.size == 0, (total, tp.size)
    size = total // tp.size
    return Part(tp.rank * size, size)


def kv_head_part(num_kv_heads: int, tp: TensorParallel) -> Part:
    """Return this rank's KV heads: an equal part, or one head shared with its neighbours.

    With 2 KV heads on 4 ranks: ranks 0 and 1 hold head 0, ranks 2 and 3 head 1, as do the
    query heads that read them.
    """
    if num_kv_heads >= tp.size:
        return even_part(num_kv_heads, tp)
    assert tp.size % num_kv_heads == 0, (num_kv_heads, tp.size)
    return Part(tp.rank * num_kv_heads // tp.size, 1)
