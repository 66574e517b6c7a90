"""The operations of a forward pass: one signature per operation, several implementations.

`T` is the number of new tokens of the step over all rows, `R` the number of rows, `S` the number
of KV slots, `Hq`/`Hkv` the query/KV heads of this rank, `D` the head size. A request's KV is a
vector of slot indices in any order; kernels read it through `req_to_slot` and nothing else, so
who owns a slot and in which direction it grows is invisible to them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, Protocol, runtime_checkable

import torch
from torch import Tensor

FEW_TOKENS = 9
"""Most new tokens of a row that is attended as a decode is: one, and eight drafts behind it."""
MAX_FEW_TOKENS = 512
"""Most new tokens of such rows in a pass, unless there are more rows: each token has room for all
parts of its context, which is kept free."""


class MostTokens(NamedTuple):
    """Upper bounds of a pass that is recorded for any rows."""

    num_tokens: int
    """New tokens of all rows."""
    few_tokens: int
    """New tokens of rows that are attended as decodes are: where rows of at most `FEW_TOKENS` have
    more, those of one new token alone are. At least as many as rows."""


@dataclass(frozen=True, eq=False)
class AttentionBatch:
    """Index tensors of one mixed pass of prefill chunks and decodes.

    Row i owns query tokens cu_seqlens_q[i] … cu_seqlens_q[i+1]-1, the *last* ones of its
    context_lens[i] positions; their own KV is written before attention reads it.

        positions of row i:  0 ........ context_lens[i]-q_len ......... context_lens[i]-1
                             └── KV in the pool already ──┘└─ q_len new tokens ─┘
    """

    positions: Tensor
    """int64 [T], position of each new token in its sequence."""
    slot_mapping: Tensor
    """int64 [T], slot that gets each new token's KV."""
    req_to_slot: Tensor
    """int32 [max_num_seqs, max_model_len], slot of each position of each row."""
    rows: Tensor
    """int64 [R], index of each row into req_to_slot."""
    cu_seqlens_q: Tensor
    """int32 [R+1], query offsets."""
    context_lens: Tensor
    """int32 [R], KV length of each row including its new tokens."""
    host_rows: Sequence[int]
    """`rows` on the host, so that no kernel has to read the device to plan its work. A pass that
    is recorded (`worker.graphs`) has unknown values here, which raise when they are read."""
    host_q_lens: Sequence[int]
    """Number of new tokens of each row, on the host; a row with 0 takes no part. Known but where
    `most` stands for it."""
    host_context_lens: Sequence[int]
    """`context_lens` on the host; unknown as `host_rows`."""
    most: MostTokens | None = None
    """Of a recorded pass with chunks: `host_q_lens` is unknown, too, and rows that are not there
    have no new tokens."""
    prepared: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    """What kernels work out from the fields above in the first layer and reuse in the others."""


class QKNorm(NamedTuple):
    """RMS normalisation of every query and key head before the rotary embedding."""

    q_weight: Tensor
    """[D]."""
    k_weight: Tensor
    """[D]."""
    eps: float


class ScoreMod(NamedTuple):
    """What some models do to the scores of queries and keys, beside the scale: in this order."""

    soft_cap: float | None = None
    """A score s becomes cap * tanh(s / cap) (Gemma 2, section 2)."""
    slopes: Tensor | None = None
    """float32 [Hq], ALiBi (Press et al. 2022, section 3): a key that stands n positions before the
    query has n times its head's slope less."""
    sinks: Tensor | None = None
    """float32 [Hq]: a head's softmax has one score more, this one, which has no value (gpt-oss)."""


class Kernels(Protocol):
    """What a model needs. Implementations hold no state of a request."""

    name: str
    takes_latents: bool
    """Whether values may have fewer numbers than keys, see `attention`."""
    is_capturable: bool
    """Whether passes can be recorded as CUDA graphs: of a batch of decodes alone, and of one with
    `AttentionBatch.most`, they read nothing on the host but the number of rows, and they copy
    nothing from the host."""

    def pack_weight(self, weight: Tensor, *, is_gated: bool = False) -> Tensor:
        """Return `weight` [M, K] in the form that `linear` is fastest with, or `gated_linear`.

        Called once per weight. The result may be opaque: it has shape [M, K] and serves `linear`
        alone, with `is_gated` `gated_linear` alone. It may also be `weight` itself; the caller
        keeps nothing but the result.

        Raises:
            StartupError: these kernels cannot keep their promise on this machine.
        """

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return x @ weight.T + bias; x [N, K], weight [M, K], bias [M] -> [N, M].

        `weight` is what `pack_weight` returned; `dtype` is x's own, the default, or float32.
        """

    def gated_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return `silu_and_mul` of `linear`; x [N, K], weight [2*I, K] (gates first) -> [N, I].

        `weight` is what `pack_weight` returned with `is_gated`.
        """

    def packed_rows(self, weight: Tensor, dtype: torch.dtype) -> Callable[[Tensor], Tensor] | None:
        """Return what looks up rows int64 [N] of `weight`, which `pack_weight` made of `dtype`.

        None: a packed weight cannot be read, or is as large as a plain one that is shared.
        """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise the last dimension in float32; x [..., K], weight [K] -> as x."""

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return (rms_norm(x + residual), x + residual); all [T, K]. May overwrite `residual`."""

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate halves; q [T, Hq, D], k [T, Hkv, D], cos and sin float32 [T, D/2].

        May overwrite q and k. Partial rotary: when cos has fewer than D/2 columns the trailing
        dimensions pass through.
        """

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Return (x - mean) / deviation * weight + bias, in float32 inside; as `rms_norm`."""

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up; gate_up [T, 2*I] (gate first) -> [T, I]."""

    def gelu(self, x: Tensor, up: Tensor | None = None, *, is_exact: bool = False) -> Tensor:
        """Return GELU of x [T, I], or its approximation with tanh, times `up` if there is one."""

    def write_kv(
        self, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slot_mapping: Tensor
    ) -> None:
        """Store k, v [T, Hkv, D] at slot_mapping int64 [T] of the pools [S, Hkv, D]."""

    def rotate_and_write(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cos: Tensor,
        sin: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        slot_mapping: Tensor,
        qk_norm: QKNorm | None,
    ) -> Tensor:
        """Normalise q and k over D if asked to, rotate them, and store k and v; return q.

        As `rms_norm`, `rotary` and `write_kv`, whose arguments these are, one after the other.
        May overwrite q and k. The CPU's native kernels also take pools of int8 [S, Hkv, D + 4]:
        a head's numbers are then rounded to 8 bits by the largest of them, and their factor
        stands behind them, a float32.
        """

    def attention(
        self,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        sliding_window: int | None,
        score_mod: ScoreMod | None = None,
    ) -> Tensor:
        """Causal attention of every row over its own KV; q [T, Hq, D] -> [T, Hq, D].

        A query at position p sees positions max(0, p - sliding_window + 1) … p. Hq is a multiple
        of Hkv; query head h reads KV head h // (Hq / Hkv). Pools are as in `rotate_and_write`;
        kernels with `takes_latents` also take values of fewer numbers than keys, V of D, and
        return [T, Hq, V].
        """


@runtime_checkable
class NormProductKernels(Kernels, Protocol):
    """Kernels that add, normalise and multiply at once."""

    def add_norm_linear(
        self,
        x: Tensor,
        residual: Tensor,
        norm: tuple[Tensor, float],
        weight: Tensor,
        bias: Tensor | None,
        *,
        is_gated: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return (`linear` or `gated_linear` of `add_rms_norm`, x + residual); norm: weight, eps.

        May overwrite `residual`.
        """


class ClampedGate(NamedTuple):
    """A gate of gpt-oss: gate * sigmoid(alpha * gate) * (up + 1), both clamped before."""

    alpha: float
    limit: float
    """Most that a gate may be, and an up on either side of zero."""


class ExpertBiases(NamedTuple):
    """What is added to the products of experts."""

    gate_up: Tensor
    """[E, 2*I], gates first."""
    down: Tensor
    """[E, K]."""


class ExpertChoice(NamedTuple):
    """How a token's experts and their weights follow from its products with the router's weight."""

    num_chosen: int
    is_sigmoid: bool
    """Whether scores are sigmoids of products; else their softmax."""
    normalises: bool
    """Whether the weights of a token's experts are divided by their sum."""
    scale: float = 1.0
    """Of the weights."""
    num_groups: int = 1
    """Equal groups of experts, …"""
    num_chosen_groups: int = 1
    """… so many of which a token's are in: those with the largest sums of their …"""
    group_best: int = 1
    """… so many best."""


@runtime_checkable
class ExpertKernels(Kernels, Protocol):
    """Kernels that multiply by the weights of several experts at once."""

    def mix_experts(
        self,
        x: Tensor,
        chosen: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        *,
        biases: ExpertBiases | None = None,
        gate: ClampedGate | None = None,
    ) -> Tensor:
        """Return the sum of what each token's experts give, times their weights.

        An expert gives down @ `silu_and_mul`(gate_up @ x), or with another `gate` in its place. x
        [T, K], chosen int64 [T, C] (experts below E, different ones for a token), weights float32
        [T, C], gate_up [E, 2*I, K] (gates first), down [E, K, I], both contiguous -> [T, K].
        """


@runtime_checkable
class ExpertMixingKernels(Kernels, Protocol):
    """Kernels that go through experts in turn, whose weights are packed as other weights are."""

    def choose_experts(
        self, products: Tensor, bias: Tensor | None, choice: ExpertChoice
    ) -> tuple[Tensor, Tensor]:
        """Return experts int64 [T, num_chosen] and their weights, float32.

        products float32 [T, E]; bias float32 [E] is added to scores where experts are chosen, and
        nowhere else. Of equal ones the first are chosen.
        """

    def expert_mixer(
        self, experts: Sequence[tuple[object, object]], dtype: torch.dtype
    ) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
        """Return what gives `ExpertKernels.mix_experts` of x of `dtype`, chosen and weights.

        `experts`: what these kernels made of each one's gates and ups, `is_gated`, and of its down.
        None: they mix no such weights.
        """


class PassInputs(NamedTuple):
    """What the layers of one pass read beside weights and KV."""

    x: Tensor
    """[T, hidden], contiguous; may be overwritten."""
    batch: AttentionBatch
    tables: tuple[Tensor, ...]
    """float32 [T, n] each, such as cos and sin of the tokens' positions."""
    logit_rows: Tensor | None
    """int64 [L], L > 0: the tokens that go on behind the last layer's attention; None: all."""


class Summing(Protocol):
    """What adds the results of ranks, each of which has a part of every weight."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over the ranks, same shape and dtype; may overwrite `x`."""


class NotRecordableError(Exception):
    """Some layers cannot be recorded; says what of them."""


@runtime_checkable
class RecordingKernels(Kernels, Protocol):
    """Kernels that can note what layers ask of them, and do it again in one call."""

    def record(
        self,
        layers: Callable[[PassInputs], Tensor],
        like: PassInputs,
        ranks: Summing | None = None,
    ) -> Callable[[PassInputs], Tensor]:
        """Return what does as `layers`, to the bit, for any numbers of rows.

        All else is as in `like`: sizes, types, the stride of `req_to_slot`, and whether there are
        `logit_rows`. Nothing is computed meanwhile, no KV is written. What `layers` add over
        `ranks` is added between two calls.

        Raises:
            NotRecordableError: `layers` do what is no operation of these kernels, or another one
                for another number of rows.
        """


class Int8Weight(NamedTuple):
    """A weight [M, K] of 8-bit integers, each output's times a factor of its own."""

    packed: Tensor
    """int8, in the kernels' own layout."""
    factors: Tensor
    """float32 [at least M]."""
    num_outputs: int
    """M."""
    is_gated: bool = False
    """Whether products with it are as those of `gated_linear`."""


class GroupedWeight(NamedTuple):
    """A weight [M, K] of integers without a sign; groups of inputs have a factor and a zero each.

    A number is (integer - zero) * factor, with those of its output's group.
    """

    packed: Tensor
    """uint8, in the kernels' own layout."""
    factors: Tensor
    """float16 [panels, groups, outputs of a panel]."""
    zeros: Tensor
    """uint8, as `factors`."""
    num_outputs: int
    """M."""
    num_inputs: int
    """K."""
    bits: int
    """4 or 8, of an integer."""
    group_size: int
    """32, 64, 96 or 128 inputs; the last group may have fewer."""
    is_gated: bool = False
    """See `Int8Weight`."""


class Fp8Weight(NamedTuple):
    """A weight [M, K] of float8_e4m3fn; groups of inputs of an output have a factor each."""

    packed: Tensor
    """float8_e4m3fn [M, K]."""
    factors: Tensor
    """float32, in the kernels' own layout."""
    group_size: int
    """Inputs that share a factor; all, if it is not below K."""
    is_gated: bool = False
    """See `Int8Weight`."""


class Fp4Weight(NamedTuple):
    """A weight [M, K] of numbers of 4 bits; groups of inputs of an output have a factor each.

    A number has a sign, two bits of exponent and one behind them (MXFP4).
    """

    packed: Tensor
    """uint8, in the kernels' own layout."""
    factors: Tensor
    """float32, as `packed`."""
    group_size: int


class PackedExperts(NamedTuple):
    """Weights of experts that are packed in one way, those of all outputs in one tensor."""

    kind: str
    values: Tensor
    factors: Tensor | None
    zeros: Tensor | None
    num_experts: int
    group: int
    """Inputs that share a factor; 0: all."""
    block_k: int


@runtime_checkable
class QuantizingKernels(Kernels, Protocol):
    """Kernels that also multiply by weights of 8 and of 4 bits."""

    def quantize(self, weight: Tensor, *, is_gated: bool = False) -> Int8Weight:
        """Round `weight` [M, K] to 8 bits: ties to even, by each output's largest number."""

    def linear_int8(
        self,
        x: Tensor,
        weight: Int8Weight,
        bias: Tensor | None,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """See `Kernels.linear`, for a weight from `quantize`; x and bias stay as exact as there."""

    def int8_rows(
        self, weight: Int8Weight, num_inputs: int, dtype: torch.dtype
    ) -> Callable[[Tensor], Tensor]:
        """Return what looks up rows of a weight from `quantize`, as numbers of `dtype`."""

    def quantize_groups(
        self, weight: Tensor, group_size: int, *, is_gated: bool = False
    ) -> GroupedWeight:
        """Round `weight` [M, K] to 4 bits in groups, with the least squared error of some widths.

        A factor that float16 cannot hold is infinite.
        """

    def pack_int8(self, integers: Tensor, factors: Tensor, *, is_gated: bool = False) -> Int8Weight:
        """Return the weight of integers int8 [M, K] and factors float32 [M], as others have them.

        Its largest integers need not be 127.
        """

    def pack_groups(
        self,
        integers: Tensor,
        factors: Tensor,
        zeros: Tensor,
        *,
        bits: int,
        group_size: int,
        is_gated: bool = False,
    ) -> GroupedWeight:
        """Return the weight of integers uint8 [M, K] below 2 ** bits, as others have rounded them.

        factors float16 and zeros uint8 [M, number of groups].
        """

    def linear_groups(self, x: Tensor, weight: GroupedWeight, bias: Tensor | None) -> Tensor:
        """See `linear_int8`, for a weight from `quantize_groups` or `pack_groups`."""


@runtime_checkable
class Fp8Kernels(QuantizingKernels, Protocol):
    """Kernels that also multiply by numbers of floating point of 8 bits."""

    def pack_fp8(
        self, values: Tensor, factors: Tensor, *, group_size: int, is_gated: bool = False
    ) -> Fp8Weight:
        """Return the weight of values float8_e4m3fn [M, K], as others have rounded them.

        factors float32 [M, number of groups]; group_size is a multiple of 64, or not below K.
        """

    def linear_fp8(self, x: Tensor, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
        """See `linear_int8`, for a weight from `pack_fp8`."""

    def linear_rounded(self, x: Tensor, weight: Int8Weight, bias: Tensor | None) -> Tensor:
        """See `linear_int8`; many rows are rounded to 8 bits, each by its largest number.

        Products are then of integers, as of a model whose files say so (W8A8, a factor a token).
        """


@runtime_checkable
class PackedExpertKernels(ExpertKernels, Fp8Kernels, Protocol):
    """Kernels that also multiply by packed weights of several experts at once."""

    def pack_fp4(self, codes: Tensor, factors: Tensor, *, group_size: int) -> Fp4Weight:
        """Return the weight of codes uint8 [M, K] below 16 and factors float32 [M, groups]."""

    def stack_experts(
        self, weights: Sequence[Int8Weight | GroupedWeight | Fp8Weight | Fp4Weight]
    ) -> PackedExperts:
        """Return the weights of all experts, which are packed in the same way, without gates."""

    def mix_packed_experts(
        self,
        x: Tensor,
        chosen: Tensor,
        weights: Tensor,
        gate_up: PackedExperts,
        down: PackedExperts,
        *,
        biases: ExpertBiases | None = None,
        gate: ClampedGate | None = None,
    ) -> Tensor:
        """See `mix_experts`."""


class UnknownValues(Sequence[int]):
    """Values of the host that change from replay to replay: only their number can be read."""

    def __init__(self, name: str, length: int) -> None:
        self._name = name
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: object) -> NoReturn:
        """Refuse: a graph would keep the values of its capture for ever."""
        raise RuntimeError(f"{self._name} of a recorded pass was read: every replay has others")


# What of a model the kernels see, on one rank: sizes, type and windows.


@dataclass(frozen=True, kw_only=True)
class KernelShapes:
    """Sizes of one rank's part of a model."""

    dtype: torch.dtype
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    """A divisor of `num_heads`."""
    head_dim: int
    value_dim: int | None = None
    """Of a value head, which is so many of a key's first numbers; None: it is one of its own."""
    rotary_dim: int
    """How many of a head's dimensions are rotated."""
    sliding_windows: tuple[int | None, ...]
    """The different ones of all layers."""
    rms_norm_eps: float
    qk_norm: bool
    """Whether heads are normalised one by one."""
    qkv_bias: bool
    context_len: int
    """Longest sequence that is served."""
    has_alibi: bool = False
    soft_cap: float | None = None
    """Of scores, see `ScoreMod`."""
    num_experts: int = 0
    """Of a layer that has any."""
    num_chosen_experts: int = 0
    expert_size: int = 0
    """Intermediate features of each."""
    expert_choice: ExpertChoice | None = None
    has_choice_bias: bool = False
    expert_gate: ClampedGate | None = None
    has_expert_biases: bool = False
    has_sinks: bool = False
    """Whether the softmax of attention has a score more."""

    def linears(self) -> dict[str, tuple[int, int]]:
        """Return (outputs, inputs) of a layer's products, by name."""
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "qkv": (q_size + 2 * kv_size, self.hidden_size),
            "out": (self.hidden_size, q_size),
            "gate_up": (2 * self.intermediate_size, self.hidden_size),
            "down": (self.hidden_size, self.intermediate_size),
        }
