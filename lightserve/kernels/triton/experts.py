"""Products with the weights of experts, packed or not: one launch for all that a pass has chosen.

Pairs of a token and one of its experts are sorted by expert, on the device. A program has BLOCK_P
pairs of one expert and BLOCK_N outputs; how many pairs an expert has is read on the device, so a
launch has as many programs as there can be, and some of them end at once:

    pairs      0 ─── expert 0 ───┐┌─ expert 2 ─┐┌──── expert 3 ────┐
    programs   [ 0 ][ 1 ][ 2 ]    [ 3 ][ 4 ]    [ 5 ][ 6 ][ 7 ]      [8: none left]

The outputs of all experts stand one below the other, as if they were of one weight, whose tiles
are read as `quantized` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.kernels.triton.launch import cdiv, launched, next_power_of_2
from lightserve.kernels.triton.norms import round_rows
from lightserve.kernels.triton.quantized import add_tile, finished, form_of
from lightserve.kernels.weights import (
    SILU_GATES,
    BlockActivation,
    ExpertBiases,
    Fp4Weight,
    Fp8Weight,
    GroupedWeight,
    Int8Weight,
    PackedExperts,
)

BLOCK_P, BLOCK_N, BLOCK_K = 16, 64, 64
"""Pairs, outputs and inputs of a program's product; pairs are few, as decodes have them."""
LARGE_BLOCK_P = 64
"""From `LARGE_FROM` pairs per expert on, as prompts have them."""
LARGE_FROM = 32
NUM_WARPS = 4
MOST_REGISTERS = 240
"""Registers for gates and ups of MXFP4, and for int4 whose last block is not full: left alone, the
compiler keeps to 128, or 168, and spills."""


@dataclass(frozen=True, eq=False)
class Pairs:
    """P pairs of a token and an expert, by expert."""

    order: Tensor
    """int64 [P], place of each in the table of chosen experts, [T, C]."""
    starts: Tensor
    """int64 [E + 1], the first of each expert's, and P."""
    num_chosen: int
    block: int
    """Pairs of a program."""

    @property
    def num_blocks(self) -> int:
        """Most programs that pairs may need, each with those of one expert."""
        num_pairs, num_experts = len(self.order), len(self.starts) - 1
        return num_pairs // self.block + min(num_pairs, num_experts)


def sorted_pairs(chosen: Tensor, num_experts: int) -> Pairs:
    """Return pairs of chosen int64 [T, C], by expert."""
    experts, order = chosen.flatten().sort(stable=True)
    bounds = torch.arange(num_experts + 1, device=chosen.device)
    is_large = len(order) >= LARGE_FROM * num_experts
    return Pairs(
        order,
        torch.searchsorted(experts, bounds),
        chosen.shape[1],
        LARGE_BLOCK_P if is_large else BLOCK_P,
    )


@triton.jit
def place_of(
    starts_ptr, block, NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, SIZE: tl.constexpr
):
    """Return a block's expert, NUM_EXPERTS if there is none, its first pair, and its expert's end.

    SIZE: pairs of a block.
    """
    experts = tl.arange(0, BLOCK_E)
    is_one = experts < NUM_EXPERTS
    starts = tl.load(starts_ptr + experts, mask=is_one, other=0)
    ends = tl.load(starts_ptr + experts + 1, mask=is_one, other=0)
    last_blocks = tl.cumsum((ends - starts + SIZE - 1) // SIZE, 0)
    expert = tl.sum(((last_blocks <= block) & is_one).to(tl.int32), 0)
    before = tl.sum(tl.where(experts == expert - 1, last_blocks, 0), 0)
    first = tl.sum(tl.where(experts == expert, starts, 0), 0) + (block - before) * SIZE
    return expert, first, tl.sum(tl.where(experts == expert, ends, 0), 0)


@triton.jit
def activated(x, KIND: tl.constexpr):
    """Return an `Activation` of float32 numbers, by its value."""
    if KIND == "silu":
        x = x / (1.0 + tl.exp(-x))
    elif KIND == "quick_gelu":
        x = x / (1.0 + tl.exp(-1.702 * x))
    elif KIND == "gelu_tanh":
        x = x / (1.0 + tl.exp(-1.5957691216057308 * x * (1.0 + 0.044715 * x * x)))
    elif KIND == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(0.7071067811865476 * x))
    else:
        tl.static_assert((KIND == "relu") | (KIND == "relu squared"))
        x = tl.maximum(x, 0.0)
        if KIND == "relu squared":
            x *= x
    return x


@triton.jit
def gated(gate, up, alpha, limit, KIND: tl.constexpr):
    """Return the activation of gates times ups; alpha and limit: of `BlockActivation`."""
    if KIND == "clamped silu":
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        features = gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)
    else:
        features = activated(gate, KIND) * up
    return features


# fmt: off
@launched
@triton.jit(do_not_specialize=["num_tokens"])
def _features_kernel(
    x_ptr, x_factors_ptr, values_ptr, factors_ptr, zeros_ptr, bias_ptr, out_ptr, order_ptr,
    starts_ptr, num_tokens, x_stride, factors_stride, size, alpha, limit, NUM_INPUTS: tl.constexpr,
    NUM_BYTES: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, NUM_CHOSEN: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, WIDEN: tl.constexpr, HAS_BIASES: tl.constexpr,
    ACTIVATION: tl.constexpr, IS_GATED: tl.constexpr,
):
    # fmt: on
    """Features of BLOCK_P pairs, see `features_of`: out [P, size], by expert."""
    expert, first, end = place_of(starts_ptr, tl.program_id(0), NUM_EXPERTS, BLOCK_E, BLOCK_P)
    if expert >= NUM_EXPERTS:
        return
    pairs = first + tl.arange(0, BLOCK_P)
    is_pair = pairs < end
    tokens = tl.load(order_ptr + pairs, mask=is_pair, other=0) // NUM_CHOSEN
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = outputs < size
    rows = expert.to(tl.int64) * (2 if IS_GATED else 1) * size + outputs
    lines, own = x_ptr + tokens[:, None] * x_stride, x_factors_ptr + tokens
    is_small: tl.constexpr = x_ptr.dtype.element_ty == tl.uint8
    gate = tl.zeros((BLOCK_P, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_P, BLOCK_N), dtype=tl.float32)
    for start in range(0, NUM_BYTES, BLOCK_K):
        gate = add_tile(
            gate, start, lines, own, num_tokens, is_pair, values_ptr, factors_ptr, zeros_ptr, rows,
            is_output, factors_stride, NUM_INPUTS, NUM_BYTES, KIND, GROUP, BLOCK_K, WIDEN,
        )  # fmt: skip
        if IS_GATED:
            up = add_tile(
                up, start, lines, own, num_tokens, is_pair, values_ptr, factors_ptr, zeros_ptr,
                rows + size, is_output, factors_stride, NUM_INPUTS, NUM_BYTES, KIND, GROUP, BLOCK_K,
                WIDEN,
            )  # fmt: skip
    gate = finished(
        gate, own, is_pair, factors_ptr, bias_ptr, rows, is_output, KIND, GROUP, HAS_BIASES,
        is_small,
    )  # fmt: skip
    if IS_GATED:
        up = finished(
            up, own, is_pair, factors_ptr, bias_ptr, rows + size, is_output, KIND, GROUP,
            HAS_BIASES, is_small,
        )  # fmt: skip
        features = gated(gate, up, alpha, limit, ACTIVATION)
    else:
        features = activated(gate, ACTIVATION)
    place = out_ptr + pairs[:, None] * size + outputs[None, :]
    kind: tl.constexpr = out_ptr.dtype.element_ty
    tl.store(place, features.to(kind), mask=is_pair[:, None] & is_output[None, :])


# fmt: off
@launched
@triton.jit(do_not_specialize=["num_pairs"])
def _outputs_kernel(
    features_ptr, x_factors_ptr, values_ptr, factors_ptr, zeros_ptr, bias_ptr, weights_ptr, out_ptr,
    order_ptr, starts_ptr, num_pairs, factors_stride, num_outputs, NUM_INPUTS: tl.constexpr,
    NUM_BYTES: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr, HAS_BIASES: tl.constexpr,
):
    # fmt: on
    """down @ features, times the pair's weight: out float32 [P, num_outputs], as chosen."""
    expert, first, end = place_of(starts_ptr, tl.program_id(0), NUM_EXPERTS, BLOCK_E, BLOCK_P)
    if expert >= NUM_EXPERTS:
        return
    pairs = first + tl.arange(0, BLOCK_P)
    is_pair = pairs < end
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = outputs < num_outputs
    rows = expert.to(tl.int64) * num_outputs + outputs
    lines, own = features_ptr + pairs[:, None] * NUM_INPUTS, x_factors_ptr + pairs
    is_small: tl.constexpr = features_ptr.dtype.element_ty == tl.uint8
    total = tl.zeros((BLOCK_P, BLOCK_N), dtype=tl.float32)
    for start in range(0, NUM_BYTES, BLOCK_K):
        total = add_tile(
            total, start, lines, own, num_pairs, is_pair, values_ptr, factors_ptr, zeros_ptr, rows,
            is_output, factors_stride, NUM_INPUTS, NUM_BYTES, KIND, GROUP, BLOCK_K, WIDEN,
        )  # fmt: skip
    total = finished(
        total, own, is_pair, factors_ptr, bias_ptr, rows, is_output, KIND, GROUP, HAS_BIASES,
        is_small,
    )  # fmt: skip
    places = tl.load(order_ptr + pairs, mask=is_pair, other=0)
    weights = tl.load(weights_ptr + places, mask=is_pair, other=0.0)
    out = out_ptr + places[:, None] * num_outputs + outputs[None, :]
    tl.store(out, total * weights[:, None], mask=is_pair[:, None] & is_output[None, :])


def plain_experts(weights: Tensor) -> PackedExperts:
    """Return weights [E, M, K] of the model's type, as they are."""
    assert weights.is_contiguous()
    return PackedExperts("plain", weights.flatten(0, 1), None, None, len(weights), 0, BLOCK_K)


def stack_experts(
    weights: Sequence[Int8Weight | GroupedWeight | Fp8Weight | Fp4Weight],
) -> PackedExperts:
    """See `Kernels.stack_experts`."""
    first, zeros = weights[0], None
    kind, group, block_k = form_of(first)
    if isinstance(first, GroupedWeight):
        zeros = torch.cat([own.zeros for own in weights if isinstance(own, GroupedWeight)], 1)
    values = torch.cat([own.packed.view(torch.uint8) for own in weights])
    factors = torch.cat([own.factors for own in weights], 1)
    values = values.view(torch.int8) if kind == "int8" else values
    rounds_rows = isinstance(first, Fp8Weight) and first.rounds_rows
    block_k = (group or 2 * block_k) if rounds_rows else block_k
    return PackedExperts(kind, values, factors, zeros, len(weights), group, block_k, rounds_rows)


def _stride_of(weights: PackedExperts) -> int:
    return 0 if weights.factors is None else weights.factors.stride(0)


def _rounded(x: Tensor, weights: PackedExperts) -> tuple[Tensor, Tensor]:
    """Return rows as products by these weights take them, and factors; any, if there are none."""
    if not weights.rounds_rows:
        return x, x
    return round_rows(x, weights.group)[:2]


def mix_experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    *,
    biases: ExpertBiases | None = None,
    activation: BlockActivation = SILU_GATES,
) -> Tensor:
    """See `Kernels.mix_experts`."""
    num_tokens, num_inputs = x.shape
    if not num_tokens:
        return torch.empty_like(x)
    assert x.stride(1) == 1
    size = len(gate_up.values) // gate_up.num_experts // activation.num_parts
    pairs = sorted_pairs(chosen, gate_up.num_experts)
    features = torch.empty((len(pairs.order), size), dtype=x.dtype, device=x.device)
    # Packed numbers of gates and of ups, or with zeros: more outputs would spill registers.
    is_large = pairs.block == LARGE_BLOCK_P
    block_f = BLOCK_N // 2 if is_large and gate_up.kind != "plain" else BLOCK_N
    block_n = BLOCK_N // 2 if is_large and down.kind == "int4" else BLOCK_N
    is_ragged = block_n < BLOCK_N and size % (2 * down.block_k) > 0
    shared = {
        "NUM_EXPERTS": gate_up.num_experts,
        "BLOCK_E": next_power_of_2(gate_up.num_experts),
        "BLOCK_P": pairs.block,
        "WIDEN": x.device.type == "cpu",  # interpreted by numpy, which has no bfloat16
        "HAS_BIASES": biases is not None,
        "num_warps": NUM_WARPS,
    }
    (kind, is_gated, *limits), (first, second) = activation, biases or (None, None)
    own, x_factors = _rounded(x, gate_up)
    _features_kernel[(pairs.num_blocks, cdiv(size, block_f))](
        own, x_factors, gate_up.values, gate_up.factors, gate_up.zeros, first, features,
        pairs.order, pairs.starts, num_tokens, own.stride(0), _stride_of(gate_up), size, *limits,
        NUM_INPUTS=num_inputs, NUM_BYTES=gate_up.values.shape[1], KIND=gate_up.kind,
        GROUP=gate_up.group, NUM_CHOSEN=pairs.num_chosen, BLOCK_K=gate_up.block_k, BLOCK_N=block_f,
        ACTIVATION=kind.value, IS_GATED=is_gated, enable_fp_fusion=True,
        maxnreg=MOST_REGISTERS if is_large and gate_up.kind == "fp4" else None, **shared,
    )  # fmt: skip
    added = torch.empty((*chosen.shape, num_inputs), dtype=torch.float32, device=x.device)
    own, x_factors = _rounded(features, down)
    _outputs_kernel[(pairs.num_blocks, cdiv(num_inputs, block_n))](
        own, x_factors, down.values, down.factors, down.zeros, second, weights.contiguous(), added,
        pairs.order, pairs.starts, len(pairs.order), _stride_of(down), num_inputs, NUM_INPUTS=size,
        NUM_BYTES=down.values.shape[1], KIND=down.kind, GROUP=down.group, BLOCK_K=down.block_k,
        BLOCK_N=block_n, enable_fp_fusion=True, maxnreg=MOST_REGISTERS if is_ragged else None,
        **shared,
    )  # fmt: skip
    return added.sum(dim=1).to(x.dtype)
