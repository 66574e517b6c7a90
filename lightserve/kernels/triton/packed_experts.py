"""Products with the weights of experts that stay packed: those of `experts`, by `quantized`.

The outputs of all experts stand one below the other, as if they were of one weight.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.kernels.interface import (
    ClampedGate,
    ExpertBiases,
    Fp4Weight,
    Fp8Weight,
    GroupedWeight,
    Int8Weight,
    PackedExperts,
)
from lightserve.kernels.triton.experts import (
    BLOCK_N,
    LARGE_BLOCK_P,
    NUM_WARPS,
    gated,
    place_of,
    sorted_pairs,
)
from lightserve.kernels.triton.quantized import BLOCK_K, half_of, product

MOST_REGISTERS = 160
"""Of gates and ups of 4-bit numbers: left alone, the compiler keeps to 128, and spills."""


# fmt: off
@triton.jit
def _packed_features_kernel(
    x_ptr, values_ptr, factors_ptr, zeros_ptr, bias_ptr, out_ptr, order_ptr, starts_ptr, x_stride,
    factors_stride, size, alpha, limit, NUM_INPUTS: tl.constexpr, NUM_BYTES: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, NUM_CHOSEN: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr, HAS_BIASES: tl.constexpr, IS_CLAMPED: tl.constexpr,
):
    # fmt: on
    """See `experts._features_kernel`."""
    expert, first, end = place_of(starts_ptr, tl.program_id(0), NUM_EXPERTS, BLOCK_E, BLOCK_P)
    if expert >= NUM_EXPERTS:
        return
    pairs = first + tl.arange(0, BLOCK_P)
    is_pair = pairs < end
    tokens = tl.load(order_ptr + pairs, mask=is_pair, other=0) // NUM_CHOSEN
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = outputs < size
    rows = expert.to(tl.int64) * 2 * size + outputs
    lines = x_ptr + tokens[:, None] * x_stride
    gate = product(
        lines, is_pair, values_ptr, factors_ptr, zeros_ptr, rows, is_output, factors_stride,
        NUM_INPUTS, NUM_BYTES, KIND, GROUP, BLOCK_P, BLOCK_N, BLOCK_K, WIDEN,
    )  # fmt: skip
    up = product(
        lines, is_pair, values_ptr, factors_ptr, zeros_ptr, rows + size, is_output, factors_stride,
        NUM_INPUTS, NUM_BYTES, KIND, GROUP, BLOCK_P, BLOCK_N, BLOCK_K, WIDEN,
    )  # fmt: skip
    if HAS_BIASES:
        gate += tl.load(bias_ptr + rows, mask=is_output, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias_ptr + rows + size, mask=is_output, other=0.0).to(tl.float32)[None, :]
    features = gated(gate, up, alpha, limit, IS_CLAMPED)
    place = out_ptr + pairs[:, None] * size + outputs[None, :]
    kind: tl.constexpr = out_ptr.dtype.element_ty
    tl.store(place, features.to(kind), mask=is_pair[:, None] & is_output[None, :])


# fmt: off
@triton.jit
def _packed_outputs_kernel(
    features_ptr, values_ptr, factors_ptr, zeros_ptr, bias_ptr, weights_ptr, out_ptr, order_ptr,
    starts_ptr, factors_stride, num_outputs, NUM_INPUTS: tl.constexpr, NUM_BYTES: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WIDEN: tl.constexpr,
    HAS_BIASES: tl.constexpr,
):
    # fmt: on
    """See `experts._outputs_kernel`."""
    expert, first, end = place_of(starts_ptr, tl.program_id(0), NUM_EXPERTS, BLOCK_E, BLOCK_P)
    if expert >= NUM_EXPERTS:
        return
    pairs = first + tl.arange(0, BLOCK_P)
    is_pair = pairs < end
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = outputs < num_outputs
    rows = expert.to(tl.int64) * num_outputs + outputs
    total = product(
        features_ptr + pairs[:, None] * NUM_INPUTS, is_pair, values_ptr, factors_ptr, zeros_ptr,
        rows, is_output, factors_stride, NUM_INPUTS, NUM_BYTES, KIND, GROUP, BLOCK_P, BLOCK_N,
        BLOCK_K, WIDEN,
    )  # fmt: skip
    if HAS_BIASES:
        total += tl.load(bias_ptr + rows, mask=is_output, other=0.0).to(tl.float32)[None, :]
    places = tl.load(order_ptr + pairs, mask=is_pair, other=0)
    weights = tl.load(weights_ptr + places, mask=is_pair, other=0.0)
    out = out_ptr + places[:, None] * num_outputs + outputs[None, :]
    tl.store(out, total * weights[:, None], mask=is_pair[:, None] & is_output[None, :])


def stack_experts(
    weights: Sequence[Int8Weight | GroupedWeight | Fp8Weight | Fp4Weight],
) -> PackedExperts:
    """See `PackedExpertKernels.stack_experts`."""
    first, zeros = weights[0], None
    match first:
        case Int8Weight():
            kind, group, block_k = "int8", 0, 2 * BLOCK_K
        case Fp8Weight():
            kind, group, block_k = "fp8", first.group_size, BLOCK_K
            group = 0 if len(first.factors) == 1 else group
        case Fp4Weight():
            kind, group, block_k = "fp4", first.group_size, half_of(first.group_size)
        case GroupedWeight():
            kind = "int4" if first.bits == 4 else "uint8"
            group, block_k = first.group_size, half_of(first.group_size)
            zeros = torch.cat([own.zeros for own in weights if isinstance(own, GroupedWeight)], 1)
    values = torch.cat([own.packed.view(torch.uint8) for own in weights])
    factors = torch.cat([own.factors for own in weights], 1)
    values = values.view(torch.int8) if kind == "int8" else values
    return PackedExperts(kind, values, factors, zeros, len(weights), group, block_k)


def mix_packed_experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    *,
    biases: ExpertBiases | None = None,
    gate: ClampedGate | None = None,
) -> Tensor:
    """See `PackedExpertKernels.mix_packed_experts`."""
    num_tokens, num_inputs = x.shape
    if not num_tokens:
        return torch.empty_like(x)
    assert x.stride(1) == 1
    size = len(gate_up.values) // gate_up.num_experts // 2
    pairs = sorted_pairs(chosen, gate_up.num_experts)
    features = torch.empty((len(pairs.order), size), dtype=x.dtype, device=x.device)
    # Both halves of a byte, with two sums, or with zeros: more outputs would spill registers.
    is_large = pairs.block == LARGE_BLOCK_P
    block_f = BLOCK_N // 2 if is_large and gate_up.kind in ("int4", "fp4") else BLOCK_N
    block_n = BLOCK_N // 2 if is_large and down.kind == "int4" else BLOCK_N
    shared = {
        "NUM_EXPERTS": gate_up.num_experts,
        "BLOCK_E": triton.next_power_of_2(gate_up.num_experts),
        "BLOCK_P": pairs.block,
        "WIDEN": x.device.type == "cpu",  # interpreted by numpy, which has no bfloat16
        "HAS_BIASES": biases is not None,
        "num_warps": NUM_WARPS,
    }
    first, second = biases or (None, None)
    alpha, limit = gate or (0.0, 0.0)
    _packed_features_kernel[(pairs.num_blocks, triton.cdiv(size, block_f))](
        x, gate_up.values, gate_up.factors, gate_up.zeros, first, features, pairs.order,
        pairs.starts, x.stride(0), gate_up.factors.stride(0), size, alpha, limit,
        NUM_INPUTS=num_inputs, NUM_BYTES=gate_up.values.shape[1], KIND=gate_up.kind,
        GROUP=gate_up.group, NUM_CHOSEN=pairs.num_chosen, BLOCK_K=gate_up.block_k,
        BLOCK_N=block_f, IS_CLAMPED=gate is not None,
        maxnreg=MOST_REGISTERS if is_large and gate_up.kind == "fp4" else None,
        enable_fp_fusion=True, **shared,
    )  # fmt: skip
    added = torch.empty((*chosen.shape, num_inputs), dtype=torch.float32, device=x.device)
    _packed_outputs_kernel[(pairs.num_blocks, triton.cdiv(num_inputs, block_n))](
        features, down.values, down.factors, down.zeros, second, weights.contiguous(), added,
        pairs.order, pairs.starts, down.factors.stride(0), num_inputs, NUM_INPUTS=size,
        NUM_BYTES=down.values.shape[1], KIND=down.kind, GROUP=down.group, BLOCK_K=down.block_k,
        BLOCK_N=block_n, enable_fp_fusion=True, **shared,
    )  # fmt: skip
    return added.sum(dim=1).to(x.dtype)
