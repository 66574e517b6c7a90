"""Weights as the native core reads them: in panels of `core.PANEL` outputs, see `core.h`.

A packed weight is a tensor that looks like the one it was made of, [M, K], over memory that holds
the core's panels: only `linear` can read it. A layer's experts are mixed by one call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from lightserve.kernels.cpu.core import BYTE_BLOCK, PANEL, Core, Operations, num_panels
from lightserve.kernels.weights import (
    ExpertChoice,
    Fp8Block,
    Fp8Weight,
    GroupedWeight,
    Int8Weight,
    Weight,
)


def pack(core: Core, operations: Operations, weight: Tensor, *, is_gated: bool) -> Tensor:
    """See `Kernels.pack_weight`; `operations` are those of the weight's type, here and below."""
    weight = weight.contiguous()
    num_outputs, num_inputs = weight.shape
    size = core.packed_size(
        num_outputs, num_inputs, is_bf16=weight.dtype is torch.bfloat16, is_gated=is_gated
    )
    packed = _memory(core, size, weight.dtype)
    sizes = (num_outputs, num_inputs, is_gated)
    operations.pack(weight.data_ptr(), *sizes, packed.data_ptr(), torch.get_num_threads())
    return packed[: weight.numel()].view(weight.shape)


def quantize(core: Core, operations: Operations, weight: Tensor, *, is_gated: bool) -> Int8Weight:
    """See `Kernels.quantize`."""
    weight = weight.contiguous()
    num_outputs, num_inputs = weight.shape
    size = core.packed_bytes(num_outputs, num_inputs, is_gated=is_gated)
    packed = _memory(core, size, torch.int8)
    factors = torch.empty(num_panels(num_outputs, is_gated=is_gated) * PANEL, dtype=torch.float32)
    operations.pack_int8(
        *(weight.data_ptr(), num_outputs, num_inputs, is_gated),
        *(packed.data_ptr(), factors.data_ptr(), torch.get_num_threads()),
    )
    return Int8Weight(packed, factors, num_outputs, is_gated)


def quantize_groups(
    core: Core, operations: Operations, weight: Tensor, group_size: int, *, is_gated: bool
) -> GroupedWeight:
    """See `Kernels.quantize_groups`."""
    weight = weight.contiguous()
    num_outputs, num_inputs = weight.shape
    result = _grouped(
        core, num_outputs, num_inputs, bits=4, group_size=group_size, is_gated=is_gated
    )
    operations.quantize_groups(
        *(weight.data_ptr(), num_outputs, num_inputs, group_size, is_gated),
        *(part.data_ptr() for part in result[:3]),
        torch.get_num_threads(),
    )
    return result


def pack_int8(core: Core, integers: Tensor, factors: Tensor, *, is_gated: bool) -> Int8Weight:
    """See `Kernels.pack_int8`."""
    num_outputs, num_inputs = integers.shape
    lines, factors = (_in_panels(part, is_gated=is_gated) for part in (integers, factors))
    padded = -(-num_inputs // BYTE_BLOCK) * BYTE_BLOCK
    lines = functional.pad(lines, (0, padded - num_inputs))
    # [panels, halves, outputs, blocks, fours, inputs of a four]
    fours = lines.view(-1, 2, PANEL // 2, padded // BYTE_BLOCK, BYTE_BLOCK // 4, 4)
    packed = _memory(core, lines.numel(), torch.int8)
    placed = fours.permute(0, 3, 1, 4, 2, 5)
    packed.view(placed.shape).copy_(placed)
    return Int8Weight(packed, factors.float().contiguous(), num_outputs, is_gated)


def pack_groups(
    core: Core,
    integers: Tensor,
    factors: Tensor,
    zeros: Tensor,
    *,
    bits: int,
    group_size: int,
    is_gated: bool,
) -> GroupedWeight:
    """See `Kernels.pack_groups`."""
    num_outputs, num_inputs = integers.shape
    result = _grouped(
        core, num_outputs, num_inputs, bits=bits, group_size=group_size, is_gated=is_gated
    )
    lines = _in_panels(integers, is_gated=is_gated).contiguous()
    sizes, packed = (len(lines), num_inputs), result.packed.data_ptr()
    core.pack_groups(lines.data_ptr(), sizes, bits, packed, torch.get_num_threads())
    for target, source in ((result.factors, factors), (result.zeros, zeros)):
        own = _in_panels(source, is_gated=is_gated)
        target.copy_(own.view(len(target), PANEL, -1).mT)
    return result


def _grouped(
    core: Core, num_outputs: int, num_inputs: int, *, bits: int, group_size: int, is_gated: bool
) -> GroupedWeight:
    """Return a weight that is to be filled."""
    num_bytes = core.packed_group_bytes(num_outputs, num_inputs, bits, is_gated=is_gated)
    packed = _memory(core, num_bytes, torch.uint8)
    shape = (num_panels(num_outputs, is_gated=is_gated), -(-num_inputs // group_size), PANEL)
    factors, zeros = torch.empty(shape, dtype=torch.float16), torch.empty(shape, dtype=torch.uint8)
    return GroupedWeight(
        packed, factors, zeros, num_outputs, num_inputs, bits, group_size, is_gated
    )


def _memory(core: Core, size: int, dtype: torch.dtype) -> Tensor:
    """Return so many numbers, not yet written, in large pages where there are some."""
    memory = torch.empty(size, dtype=dtype)
    core.use_large_pages(memory.data_ptr(), memory.nbytes)
    return memory


def _in_panels(rows: Tensor, *, is_gated: bool) -> Tensor:
    """Return the part of each output [M, …] in the order of whole panels, zeros between."""
    width = PANEL // 2 if is_gated else PANEL
    halves = rows.chunk(2) if is_gated else (rows,)
    padding = [0, 0] * (rows.dim() - 1) + [0, -len(halves[0]) % width]
    panels = [functional.pad(half, padding) for half in halves]
    shape = (-1, width, *rows.shape[1:])
    return torch.cat([panel.view(shape) for panel in panels], dim=1).flatten(0, 1)


class PackedNumbers(NamedTuple):
    """A packed weight as the core takes it, each address 0 where there is nothing."""

    packed: int
    """Address of the numbers."""
    factors: int
    zeros: int
    bits: int
    """Bits of each number; 0: a number has x's own type."""
    group_size: int
    """Inputs of a group; 0: factors are those of outputs."""


def numbers_of(weight: Weight) -> PackedNumbers:
    """Return a weight as `linear` and csrc/experts.cpp read it."""
    match weight:
        case Int8Weight():
            return PackedNumbers(weight.packed.data_ptr(), weight.factors.data_ptr(), 0, 8, 0)
        case GroupedWeight():
            packed, factors, zeros = (part.data_ptr() for part in weight[:3])
            return PackedNumbers(packed, factors, zeros, weight.bits, weight.group_size)
    assert isinstance(weight, Tensor), "the native core has no floating point of 8 bits"
    return PackedNumbers(weight.data_ptr(), 0, 0, 0, 0)


def num_outputs_of(weight: Weight) -> int:
    """Return M of a weight [M, K]."""
    assert not isinstance(weight, Fp8Weight | Fp8Block), (
        "the native core has no floating point of 8 bits"
    )
    return len(weight) if isinstance(weight, Tensor) else weight.num_outputs


def expert_mixer(
    operations: Operations, experts: Sequence[tuple[Weight, Weight]], level: int
) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """See `Kernels.expert_mixer`; `level`: which instructions are used."""
    weights = [weight for expert in experts for weight in expert]
    are_packed = all(
        weight.numel() > 0 if isinstance(weight, Tensor) else not isinstance(weight, Fp8Weight)
        for weight in weights
    )
    if not are_packed:
        return None
    table = torch.tensor([numbers_of(weight) for weight in weights], dtype=torch.int64)
    size = num_outputs_of(experts[0][0]) // 2

    def mix(x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        num_rows, num_inputs = x.shape
        x, out = x if x.stride(1) == 1 else x.contiguous(), x.new_empty(num_rows, num_inputs)
        assert (chosen.dtype, shares.dtype) == (torch.int64, torch.float32)
        assert chosen.is_contiguous() and shares.is_contiguous()
        if num_rows and not operations.mix_experts(
            *(x.data_ptr(), x.stride(0), num_rows),
            *(chosen.data_ptr(), shares.data_ptr(), chosen.shape[1]),
            *(table.data_ptr(), len(experts)),  # which own the weights with addresses in the table
            *(num_inputs, size, out.data_ptr(), level, torch.get_num_threads()),
        ):
            raise IndexError(f"an expert of {chosen.tolist()} is not below {len(experts)}")
        return out

    return mix


def choose_experts(
    operations: Operations, products: Tensor, bias: Tensor | None, choice: ExpertChoice
) -> tuple[Tensor, Tensor]:
    """See `Kernels.choose_experts`; `operations` are those of float32."""
    num_rows, num_experts = products.shape
    assert products.dtype is torch.float32 and products.is_contiguous()
    chosen = products.new_empty(num_rows, choice.num_chosen, dtype=torch.int64)
    shares = products.new_empty(num_rows, choice.num_chosen)
    if num_rows:
        operations.choose_experts(
            *(products.data_ptr(), num_rows, None if bias is None else bias.data_ptr()),
            *(num_experts, choice.num_groups, choice.num_chosen_groups, choice.group_best),
            *(choice.num_chosen, choice.is_sigmoid, choice.normalises, choice.added, choice.scale),
            *(chosen.data_ptr(), shares.data_ptr(), torch.get_num_threads()),
        )
    return chosen, shares
