"""The operations of a forward pass: one signature per operation, several implementations.

An implementation defines the abstract operations, and names its further ones by `Kernels.can`.
Operations that can be made of others, or of torch's, have a body here.

`T` is the number of new tokens of the step over all rows, `R` the number of rows, `S` the number
of KV slots, `Hq`/`Hkv` the query/KV heads of this rank, `D` the head size. A request's KV is a
vector of slot indices in any order; kernels read it through `req_to_slot` and nothing else, so
who owns a slot and in which direction it grows is invisible to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from enum import Flag, auto
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from lightserve.kernels.weights import (
    NO_RUNS,
    SILU_GATES,
    BlockActivation,
    DeltaRule,
    ExpertBiases,
    ExpertChoice,
    Fp4Weight,
    Fp8Weight,
    GroupedWeight,
    Int8Weight,
    KeptInputs,
    MambaRule,
    PackedExperts,
    PromptRuns,
    StateBank,
    Weight,
)
from lightserve.types import Activation

FACTOR_BYTES = 4
"""A float32 factor stands behind the numbers of a head that are kept in 8 bits."""
WORD_BYTES = 8
"""Bytes of which the heads of such pools are multiples on GPUs, whose loads are so wide then."""
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


class SeenWhole(NamedTuple):
    """New tokens of a row that see all of an image, also those behind them."""

    row: int
    first: int
    """The first of them among the new tokens of the pass."""
    start: int
    """Its position; the last is that of the image."""
    end: int
    """First position behind the image."""


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
    is_bounded: bool = False
    """`host_context_lens` may be more than `context_lens`: the device alone knows how many guesses
    were accepted."""
    most: MostTokens | None = None
    """Bounds of a recorded pass with chunks: `host_q_lens` is unknown, too, and absent rows have no
    new tokens."""
    state_slots: Tensor | None = None
    """int32 [max_num_seqs, n], slots of each row's states; None: no layer is recurrent."""
    kept: KeptInputs | None = None
    """Rows whose states the pass does not change, and room for their inputs; None: it changes
    those of all rows."""
    host_prompt_lens: Sequence[int] = ()
    """Number of each row's new tokens that are its prompt's, the first ones, on the host, for
    `Can.ROUNDED_PROMPTS`; empty: of none."""
    turned: Tensor | None = None
    """int64 [T] or [3, T], positions by which queries and keys are turned; None: `positions`."""
    seen: Sequence[SeenWhole] = ()
    """Images whose tokens see each other; kernels do not read this, see `seeing_whole`."""
    prepared: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    """Values that kernels work out from the fields above in the first layer and reuse in the
    others."""

    def prompt_runs(self) -> npt.NDArray[np.int64]:
        """Return the runs of new tokens that are those of prompts.

        int64 [2 + 2 * count]: number of new tokens, number of runs, begin and end of each.
        """
        if not any(self.host_prompt_lens):
            return NO_RUNS
        runs: npt.NDArray[np.int64] | None = self.prepared.get(PromptRuns)
        if runs is None:
            ends = np.cumsum(self.host_q_lens, dtype=np.int64)
            is_prompt = np.zeros(ends[-1] + 2, dtype=np.int8)
            starts = (ends - self.host_q_lens).tolist()
            for start, num_prompt in zip(starts, self.host_prompt_lens, strict=True):
                is_prompt[1 + start : 1 + start + num_prompt] = 1
            edges = np.flatnonzero(np.diff(is_prompt))
            runs = np.array([ends[-1], len(edges) // 2, *edges], dtype=np.int64)
            self.prepared[PromptRuns] = runs
        return runs


class QKNorm(NamedTuple):
    """RMS normalisation of every query and key head before the rotary embedding."""

    q_weight: Tensor
    """[D]."""
    k_weight: Tensor
    """[D]."""
    eps: float


class ScoreMod(NamedTuple):
    """Changes that some models make to the scores of queries and keys after the scale, in this
    order."""

    soft_cap: float | None = None
    """A score s becomes cap * tanh(s / cap) (Gemma 2, section 2)."""
    slopes: Tensor | None = None
    """float32 [Hq], ALiBi (Press et al. 2022, section 3): a key that stands n positions before the
    query has n times its head's slope less."""
    sinks: Tensor | None = None
    """float32 [Hq]: a head's softmax has one score more, this one, which has no value (gpt-oss)."""


class PassInputs(NamedTuple):
    """The inputs of one pass's layers beside weights and KV."""

    x: Tensor
    """[T, hidden], contiguous; may be overwritten."""
    batch: AttentionBatch
    tables: tuple[Tensor, ...]
    """float32 [T, n] each, such as cos and sin of the tokens' positions."""
    logit_rows: Tensor | None
    """int64 [L], L > 0: the tokens that go on behind the last layer's attention; None: all."""


class Summing(Protocol):
    """Adds the results of ranks, each of which has a part of every weight."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over the ranks, same shape and dtype; may overwrite `x`."""


class NotRecordableError(Exception):
    """Some layers cannot be recorded; the message says which operation stands in the way."""


class Can(Flag):
    """Capabilities: operations, and properties of operations, that only some kernels have."""

    LATENTS = auto()
    """`attention` over values that have fewer numbers than keys."""
    INT8_KV = auto()
    """`rotate_and_write` and `attention` with pools of int8."""
    FP8_KV = auto()
    """`rotate_and_write` and `attention` with pools of uint8, whose numbers are float8_e4m3fn."""
    GRAPHS = auto()
    """Passes can be recorded as CUDA graphs. A pass of decodes alone, or with
    `AttentionBatch.most`, reads nothing on the host but the number of rows, and copies nothing
    from the host."""
    RECORD = auto()
    """`record`."""
    NORM_PRODUCTS = auto()
    """`add_norm_linear` in fewer launches than its parts."""
    INTEGERS = auto()
    """Weights of 8- and 4-bit integers: `quantize`, `quantize_groups`, `pack_int8`,
    `pack_groups`, and products by their results."""
    FP8 = auto()
    """Weights of 8-bit floating point (`pack_fp8`), and products of integers by integers
    (`Int8Weight.rounds_rows`)."""
    FP8_PRODUCTS = auto()
    """Products of floating point of 8 bits by the same, see `Fp8Weight.rounds_rows`, `Fp8Block`."""
    ROUNDED_PROMPTS = auto()
    """Products of integers of 8 bits by integers, of prompts' tokens in bfloat16: those by an
    `Int8Weight` with `prompts`."""
    WIDE_SUMS = auto()
    """Fast products whose float32 sums are rounded nowhere, see the `dtype` of `linear`."""
    EXPERTS = auto()
    """`mix_experts` of plain weights."""
    PACKED_EXPERTS = auto()
    """`mix_experts` of packed weights: `pack_fp4` and `stack_experts`."""


class Kernels(Protocol):
    """The operations that a model needs. Implementations hold no state of a request."""

    name: str
    can: Can
    types: frozenset[torch.dtype] = frozenset({torch.float32, torch.bfloat16, torch.float16})
    """Types of numbers for which the kernels have all that `can` says."""

    def pack_weight(self, weight: Tensor, *, is_gated: bool = False) -> Tensor:
        """Return `weight` [M, K] in the form that `linear` is fastest with, or `gated_linear`.

        Called once per weight. The result may be opaque: it has shape [M, K] and serves `linear`
        alone, with `is_gated` `gated_linear` alone. It may also be `weight` itself; the caller
        keeps nothing but the result.

        Raises:
            StartupError: these kernels cannot keep their promise on this machine.
        """

    def linear(
        self, x: Tensor, weight: Weight, bias: Tensor | None, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return x @ weight.T + bias; x [N, K], weight [M, K], bias [M] -> [N, M].

        `weight` is the result of `pack_weight`, or of an operation of `Can.INTEGERS` or `Can.FP8`;
        one that is gated gives `silu_and_mul` of the product. `dtype` is x's own, the default, or
        float32, which products by groups and by floating point of 8 bits do not have.
        """

    def gated_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return `silu_and_mul` of `linear`; x [N, K], weight [2*I, K] (gates first) -> [N, I].

        `weight` is the result of `pack_weight` with `is_gated`.
        """
        return self.silu_and_mul(self.linear(x, weight, bias))

    def rows_of(
        self, weight: Weight, num_inputs: int, dtype: torch.dtype
    ) -> Callable[[Tensor], Tensor] | None:
        """Return a function that looks up rows int64 [N] of a weight, as numbers of `dtype`.

        `weight` is the result of `pack_weight` for a weight of `dtype`, or of `quantize`. None:
        the weight cannot be read so, or a plain one that is shared takes no more memory.
        """
        return None

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise the last dimension in float32; x [..., K], weight [K] -> as x.

        Numbers are rounded to x's type before the weight multiplies them, and after, or with a
        weight of float32 after it alone.
        """

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
        return functional.layer_norm(x, weight.shape, weight, bias, eps)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up; gate_up [T, 2*I] (gate first) -> [T, I]."""

    def gelu(self, x: Tensor, up: Tensor | None = None, *, is_exact: bool = False) -> Tensor:
        """Return GELU of x [T, I], or its approximation with tanh, times `up` if there is one."""
        if is_exact:
            out = functional.gelu(x)
        elif x.dtype is torch.float32:
            # Written out: torch's own depends, in its last bits, on where its vectors end.
            twice = x * (1.0 + 0.044715 * x * x) * (2.0 * math.sqrt(2.0 / math.pi))
            out = x * (1.0 / (1.0 + torch.exp(-twice)))
        else:
            out = functional.gelu(x, approximate="tanh")
        return out if up is None else out.mul_(up)

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
        May overwrite q and k. Kernels of `Can.INT8_KV` also take pools of int8 [S, Hkv, D + 4]:
        each head's numbers are rounded to 8 bits by the largest of them, and their factor, a
        float32, stands behind them. So are those of pools of uint8, with `Can.FP8_KV`. A head may
        have more bytes, which nothing reads.
        """
        if qk_norm is not None:
            q = self.rms_norm(q, qk_norm.q_weight, qk_norm.eps)
            k = self.rms_norm(k, qk_norm.k_weight, qk_norm.eps)
        q, k = self.rotary(q, k, cos, sin)
        self.write_kv(k, v, k_pool, v_pool, slot_mapping)
        return q

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
        kernels of `Can.LATENTS` also take values of fewer numbers than keys, V of D, and return
        [T, Hq, V].
        """

    def gated(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return x times the sigmoid of `gate`, both [T, K]; may overwrite x."""
        return x * sigmoid(gate)

    def convolve(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        bank: StateBank,
        batch: AttentionBatch,
        *,
        is_plain: bool = False,
    ) -> Tensor:
        """Return SiLU of a causal convolution of each row's tokens, each channel by itself.

        x [T, C], weight [W, C] (the last is that of the token itself), bias [C] -> [T, C]. The
        states hold the last W - 1 inputs of each row, [W - 1, C] of x's type, and are updated.
        `is_plain`: the convolution itself.
        """

    def delta_rule(
        self,
        mixed: Tensor,
        z: Tensor,
        gates: Tensor,
        *,
        rule: DeltaRule,
        bank: StateBank,
        batch: AttentionBatch,
    ) -> Tensor:
        """Return what states say to queries, after each token has changed them; [T, Hv * Dv].

        A state S [Hv, Dk, Dv], float32, becomes a * S + k (b * (v - k a * S))^T, and says q S to
        the query: Yang et al. 2024, "Gated Delta Networks", equation 10. Queries and keys have
        length 1, queries are scaled by Dk ** -0.5. Each head's result is normalised as by
        `rms_norm` and multiplied by SiLU of z. mixed [T, 2 * Hk * Dk + Hv * Dv] has q, k and v, z
        is [T, Hv * Dv], gates float32 [T, 2 * Hv]: b = `beta_scale` times the sigmoid of the first,
        a = e to the power of decay times softplus of the others and `rate_bias`. Value head h reads
        key head h // (Hv / Hk). With a decay for each channel of keys, a is diagonal, gates are
        [T, Hv + Hv * Dk]: Kimi Team 2025, "Kimi Linear", equation 1.
        """

    def mamba(
        self,
        mixed: Tensor,
        z: Tensor,
        rates: Tensor,
        *,
        rule: MambaRule,
        bank: StateBank,
        batch: AttentionBatch,
    ) -> Tensor:
        """Return what states say to queries, after each token has changed them; [T, H * P].

        A state S [H, N, P], float32, becomes a * S + b (r * x)^T, and says c S + skip * x: Dao and
        Gu 2024, "Transformers are SSMs", section 6. Results are multiplied by SiLU of z. mixed
        [T, H * P + 2 * G * N] has x, b and c, z is [T, H * P], rates float32 [T, H]: r = softplus
        of them and `rate_bias`, a = e to the power of decay times r. Head h reads group
        h // (H / G).
        """

    def add_norm_linear(
        self,
        x: Tensor,
        residual: Tensor,
        norm: tuple[Tensor, float],
        weight: Weight,
        bias: Tensor | None,
        *,
        is_gated: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return (`linear` or `gated_linear` of `add_rms_norm`, x + residual); norm: weight, eps.

        May overwrite `residual`.
        """
        x, residual = self.add_rms_norm(x, residual, *norm)
        if not isinstance(weight, Tensor):
            return self.linear(x, weight, bias), residual
        return (self.gated_linear if is_gated else self.linear)(x, weight, bias), residual

    def choose_experts(
        self, products: Tensor, bias: Tensor | None, choice: ExpertChoice
    ) -> tuple[Tensor, Tensor]:
        """Return experts int64 [T, num_chosen] and their weights, float32.

        products float32 [T, E]; bias float32 [E] is added to the scores by which experts are
        chosen, and to no weight. Of equal scores the first are chosen.
        """
        scores = sigmoid(products) if choice.is_sigmoid else products.softmax(-1)
        ranks = scores if bias is None else scores + bias
        if choice.num_groups > 1:
            ranks = choice.within_groups(ranks)
        chosen = ranks.topk(choice.num_chosen, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if choice.normalises:
            weights = weights / (weights.sum(-1, keepdim=True) + choice.added)
        return chosen, weights * choice.scale if choice.scale != 1.0 else weights

    def expert_mixer(
        self, experts: Sequence[tuple[Weight, Weight]], dtype: torch.dtype
    ) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
        """Return a function that mixes experts one after another, as `mix_experts` does.

        `experts`: each one's packed weight of gates and ups, `is_gated`, and packed weight of its
        down. The function takes x of `dtype`, chosen and weights. None: these kernels mix no such
        weights in one call.
        """
        return None

    def mix_experts(
        self,
        x: Tensor,
        chosen: Tensor,
        weights: Tensor,
        gate_up: Tensor | PackedExperts,
        down: Tensor | PackedExperts,
        *,
        biases: ExpertBiases | None = None,
        activation: BlockActivation = SILU_GATES,
    ) -> Tensor:
        """Return the sum of the results of each token's experts, times their weights.

        An expert gives down @ `features_of`(gate_up @ x). x [T, K], chosen int64 [T, C] (experts
        below E, different ones for a token), weights float32 [T, C], gate_up [E, 2*I, K] (gates
        first; without gates [E, I, K]), down [E, K, I], both contiguous -> [T, K]. With
        `Can.PACKED_EXPERTS` both may be results of `stack_experts`.
        """
        raise _missing(self, Can.EXPERTS)

    def record(
        self, layers: Callable[[PassInputs], Tensor], like: PassInputs, ranks: Summing | None = None
    ) -> Callable[[PassInputs], Tensor]:
        """Return a function that does as `layers`, to the bit, for any numbers of rows.

        All else is as in `like`: sizes, types, the stride of `req_to_slot`, and whether there are
        `logit_rows`. Recording computes nothing and writes no KV. Sums of `layers` over `ranks`
        are made between two calls.

        Raises:
            NotRecordableError: `layers` need an operation that these kernels do not have, or
                another operation for another number of rows.
        """
        raise _missing(self, Can.RECORD)

    def quantize(self, weight: Tensor, *, is_gated: bool = False) -> Int8Weight:
        """Round `weight` [M, K] to 8 bits: ties to even, by each output's largest number."""
        raise _missing(self, Can.INTEGERS)

    def quantize_groups(
        self, weight: Tensor, group_size: int, *, is_gated: bool = False
    ) -> GroupedWeight:
        """Round `weight` [M, K] to 4 bits in groups, with the least squared error of some widths.

        A factor that float16 cannot hold is infinite.
        """
        raise _missing(self, Can.INTEGERS)

    def pack_int8(self, integers: Tensor, factors: Tensor, *, is_gated: bool = False) -> Int8Weight:
        """Return the weight of integers int8 [M, K] and factors float32 [M], rounded elsewhere.

        Its largest integers need not be 127.
        """
        raise _missing(self, Can.INTEGERS)

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
        """Return the weight of integers uint8 [M, K] below 2 ** bits, rounded elsewhere.

        factors float16 and zeros uint8 [M, number of groups].
        """
        raise _missing(self, Can.INTEGERS)

    def pack_fp8(
        self, values: Tensor, factors: Tensor, *, group_size: int, is_gated: bool = False
    ) -> Fp8Weight:
        """Return the weight of values float8_e4m3fn [M, K], rounded elsewhere.

        factors float32 [M, number of groups]; group_size is a multiple of 64, or not below K.
        """
        raise _missing(self, Can.FP8)

    def pack_fp4(self, codes: Tensor, factors: Tensor, *, group_size: int) -> Fp4Weight:
        """Return the weight of codes uint8 [M, K] below 16 and factors float32 [M, groups]."""
        raise _missing(self, Can.PACKED_EXPERTS)

    def stack_experts(
        self, weights: Sequence[Int8Weight | GroupedWeight | Fp8Weight | Fp4Weight]
    ) -> PackedExperts:
        """Return the weights of all experts, which are packed in the same way, without gates."""
        raise _missing(self, Can.PACKED_EXPERTS)


def _missing(kernels: Kernels, need: Can) -> RuntimeError:
    """Return the error of an operation for which callers should have asked `Kernels.can`."""
    return RuntimeError(f"{kernels.name} kernels have no {need.name}")


def sigmoid(x: Tensor) -> Tensor:
    """Return sigmoid(x), the same bits wherever x stands.

    Written out: torch's own depends, in its last bits, on where its vectors end.
    """
    return 1.0 / (1.0 + torch.exp(-x))


def activate(kernels: Kernels, x: Tensor, kind: Activation, up: Tensor | None = None) -> Tensor:
    """Return an activation of numbers of any shape, times `up` of as many if there is one.

    Raises:
        ValueError: for `CLAMPED_SILU`, which is of gates and ups alone, see `features_of`.
    """
    match kind:
        case Activation.GELU | Activation.GELU_TANH:
            return kernels.gelu(x, up, is_exact=kind is Activation.GELU)
        case Activation.RELU:
            out = functional.relu(x)
        case Activation.RELU_SQUARED:
            out = functional.relu(x).square()
        case Activation.QUICK_GELU:
            out = x * sigmoid(1.702 * x)
        case Activation.SILU:
            out = functional.silu(x)
        case Activation.CLAMPED_SILU:
            raise ValueError(f"{kind} is of gates and ups alone")
    return out if up is None else out * up


def features_of(kernels: Kernels, product: Tensor, activation: BlockActivation) -> Tensor:
    """Return features [T, I] of a first product: [T, I], or of gates and ups [T, 2*I]."""
    kind, is_gated, alpha, limit = activation
    if not is_gated:
        return activate(kernels, product, kind)
    if kind is Activation.SILU:
        return kernels.silu_and_mul(product)
    gates, ups = product.chunk(2, dim=-1)
    if kind is not Activation.CLAMPED_SILU:
        return activate(kernels, gates, kind, ups)
    gates, ups = gates.float().clamp(max=limit), ups.float().clamp(-limit, limit)
    # Written out: torch's own sigmoid depends, in its last bits, on where its vectors end.
    return (gates / (1.0 + torch.exp(-alpha * gates)) * (ups + 1.0)).to(product.dtype)


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
