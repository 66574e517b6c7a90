"""Products with the weights of experts: one launch for all that a pass has chosen.

Pairs of a token and one of its experts are sorted by expert, on the device. A program has BLOCK_P
pairs of one expert and BLOCK_N outputs; how many pairs an expert has is read on the device, so a
launch has as many programs as there can be, and some of them end at once:

    pairs      0 ─── expert 0 ───┐┌─ expert 2 ─┐┌──── expert 3 ────┐
    programs   [ 0 ][ 1 ][ 2 ]    [ 3 ][ 4 ]    [ 5 ][ 6 ][ 7 ]      [8: none left]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.kernels.interface import ClampedGate, ExpertBiases

BLOCK_P, BLOCK_N, BLOCK_K = 16, 64, 64
"""Pairs, outputs and inputs of a program's product; pairs are few, as decodes have them."""
LARGE_BLOCK_P = 64
"""From `LARGE_FROM` pairs per expert on, as prompts have them."""
LARGE_FROM = 32
NUM_WARPS = 4


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
def gated(gate, up, alpha, limit, IS_CLAMPED: tl.constexpr):
    """Return silu(gate) * up, or what a `ClampedGate` makes of them."""
    if IS_CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        return gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _features_kernel(
    x_ptr,
    gate_up_ptr,
    bias_ptr,
    out_ptr,
    order_ptr,
    starts_ptr,
    x_stride,
    size,
    alpha,
    limit,
    NUM_INPUTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,
    HAS_BIASES: tl.constexpr,
    IS_CLAMPED: tl.constexpr,
):
    """silu(gate @ x) * (up @ x), or a `ClampedGate`, of BLOCK_P pairs: out [P, size], by expert."""
    kind: tl.constexpr = out_ptr.dtype.element_ty
    expert, first, end = place_of(starts_ptr, tl.program_id(0), NUM_EXPERTS, BLOCK_E, BLOCK_P)
    if expert >= NUM_EXPERTS:
        return
    pairs = first + tl.arange(0, BLOCK_P)
    is_pair = pairs < end
    tokens = tl.load(order_ptr + pairs, mask=is_pair, other=0) // NUM_CHOSEN
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = outputs < size
    rows = expert.to(tl.int64) * 2 * size + outputs
    gate = tl.zeros((BLOCK_P, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_P, BLOCK_N), dtype=tl.float32)
    for start in range(0, NUM_INPUTS, BLOCK_K):
        inputs = start + tl.arange(0, BLOCK_K)
        is_input = inputs < NUM_INPUTS
        x = tl.load(
            x_ptr + tokens[:, None] * x_stride + inputs[None, :],
            mask=is_pair[:, None] & is_input[None, :],
            other=0.0,
        )
        weights = gate_up_ptr + rows[None, :] * NUM_INPUTS + inputs[:, None]
        mask = is_output[None, :] & is_input[:, None]
        gate_part = tl.load(weights, mask=mask, other=0.0)
        up_part = tl.load(weights + size.to(tl.int64) * NUM_INPUTS, mask=mask, other=0.0)
        if WIDEN:
            x = x.to(tl.float32)
            gate_part = gate_part.to(tl.float32)
            up_part = up_part.to(tl.float32)
        gate = tl.dot(x, gate_part, gate, input_precision="ieee")
        up = tl.dot(x, up_part, up, input_precision="ieee")
    if HAS_BIASES:
        gate += tl.load(bias_ptr + rows, mask=is_output, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias_ptr + rows + size, mask=is_output, other=0.0).to(tl.float32)[None, :]
    features = gated(gate, up, alpha, limit, IS_CLAMPED)
    place = out_ptr + pairs[:, None] * size + outputs[None, :]
    tl.store(place, features.to(kind), mask=is_pair[:, None] & is_output[None, :])


@triton.jit
def _outputs_kernel(
    features_ptr,
    down_ptr,
    bias_ptr,
    weights_ptr,
    out_ptr,
    order_ptr,
    starts_ptr,
    num_outputs,
    NUM_INPUTS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,
    HAS_BIASES: tl.constexpr,
):
    """down @ features, times the pair's weight: out float32 [P, num_outputs], as chosen."""
    expert, first, end = place_of(starts_ptr, tl.program_id(0), NUM_EXPERTS, BLOCK_E, BLOCK_P)
    if expert >= NUM_EXPERTS:
        return
    pairs = first + tl.arange(0, BLOCK_P)
    is_pair = pairs < end
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = outputs < num_outputs
    rows = expert.to(tl.int64) * num_outputs + outputs
    total = tl.zeros((BLOCK_P, BLOCK_N), dtype=tl.float32)
    for start in range(0, NUM_INPUTS, BLOCK_K):
        inputs = start + tl.arange(0, BLOCK_K)
        is_input = inputs < NUM_INPUTS
        x = tl.load(
            features_ptr + pairs[:, None] * NUM_INPUTS + inputs[None, :],
            mask=is_pair[:, None] & is_input[None, :],
            other=0.0,
        )
        part = tl.load(
            down_ptr + rows[None, :] * NUM_INPUTS + inputs[:, None],
            mask=is_output[None, :] & is_input[:, None],
            other=0.0,
        )
        if WIDEN:
            x = x.to(tl.float32)
            part = part.to(tl.float32)
        total = tl.dot(x, part, total, input_precision="ieee")
    if HAS_BIASES:
        total += tl.load(bias_ptr + rows, mask=is_output, other=0.0).to(tl.float32)[None, :]
    places = tl.load(order_ptr + pairs, mask=is_pair, other=0)
    weights = tl.load(weights_ptr + places, mask=is_pair, other=0.0)
    out = out_ptr + places[:, None] * num_outputs + outputs[None, :]
    tl.store(out, total * weights[:, None], mask=is_pair[:, None] & is_output[None, :])


def mix_experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    biases: ExpertBiases | None = None,
    gate: ClampedGate | None = None,
) -> Tensor:
    """See `ExpertKernels.mix_experts`."""
    num_tokens, num_inputs = x.shape
    num_experts, _, size = down.shape
    if not num_tokens:
        return torch.empty_like(x)
    assert x.stride(1) == 1 and gate_up.is_contiguous() and down.is_contiguous()
    pairs = sorted_pairs(chosen, num_experts)
    shape = (len(pairs.order), size)
    features = torch.empty(shape, dtype=x.dtype, device=x.device)
    shared = {
        "NUM_EXPERTS": num_experts,
        "BLOCK_E": triton.next_power_of_2(num_experts),
        "BLOCK_P": pairs.block,
        "BLOCK_N": BLOCK_N,
        "BLOCK_K": BLOCK_K,
        "WIDEN": x.device.type == "cpu",  # interpreted by numpy, which has no bfloat16
        "HAS_BIASES": biases is not None,
        "num_warps": NUM_WARPS,
    }
    first, second = biases or (None, None)
    alpha, limit = gate or (0.0, 0.0)
    _features_kernel[(pairs.num_blocks, triton.cdiv(size, BLOCK_N))](
        x, gate_up, first, features, pairs.order, pairs.starts, x.stride(0), size, alpha, limit,
        NUM_INPUTS=num_inputs, NUM_CHOSEN=pairs.num_chosen, IS_CLAMPED=gate is not None,
        enable_fp_fusion=True, **shared,
    )  # fmt: skip
    shape = (*chosen.shape, num_inputs)
    added = torch.empty(shape, dtype=torch.float32, device=x.device)
    _outputs_kernel[(pairs.num_blocks, triton.cdiv(num_inputs, BLOCK_N))](
        features, down, second, weights.contiguous(), added, pairs.order, pairs.starts, num_inputs,
        NUM_INPUTS=size, enable_fp_fusion=True, **shared,
    )  # fmt: skip
    return added.sum(dim=1).to(x.dtype)
