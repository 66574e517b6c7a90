"""Weights as the native core reads them: in panels of `core.PANEL` outputs, see `core.h`.

A packed weight is a tensor that looks like the one it was made of, [M, K], over memory that holds
the core's panels: only `linear` can read it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from lightserve.kernels.cpu.core import BYTE_BLOCK, PANEL, Core, Operations, num_panels
from lightserve.kernels.interface import GroupedWeight, Int8Weight


def pack(core: Core, operations: Operations, weight: Tensor, *, is_gated: bool) -> Tensor:
    """See `Kernels.pack_weight`; `operations` are those of the weight's type, here and below."""
    weight = weight.contiguous()
    num_outputs, num_inputs = weight.shape
    size = core.packed_size(
        num_outputs, num_inputs, is_bf16=weight.dtype is torch.bfloat16, is_gated=is_gated
    )
    packed = _memory(core, size, weight.dtype)
    operations.pack(
        weight.data_ptr(),
        num_outputs,
        num_inputs,
        is_gated,
        packed.data_ptr(),
        torch.get_num_threads(),
    )
    return packed[: weight.numel()].view(weight.shape)


def quantize(core: Core, operations: Operations, weight: Tensor, *, is_gated: bool) -> Int8Weight:
    """See `QuantizingKernels.quantize`."""
    weight = weight.contiguous()
    num_outputs, num_inputs = weight.shape
    size = core.packed_bytes(num_outputs, num_inputs, is_gated=is_gated)
    packed = _memory(core, size, torch.int8)
    factors = torch.empty(num_panels(num_outputs, is_gated=is_gated) * PANEL, dtype=torch.float32)
    operations.pack_int8(
        weight.data_ptr(),
        num_outputs,
        num_inputs,
        is_gated,
        packed.data_ptr(),
        factors.data_ptr(),
        torch.get_num_threads(),
    )
    return Int8Weight(packed, factors, num_outputs, is_gated)


def quantize_groups(
    core: Core, operations: Operations, weight: Tensor, group_size: int, *, is_gated: bool
) -> GroupedWeight:
    """See `QuantizingKernels.quantize_groups`."""
    weight = weight.contiguous()
    num_outputs, num_inputs = weight.shape
    result = _grouped(
        core, num_outputs, num_inputs, bits=4, group_size=group_size, is_gated=is_gated
    )
    operations.quantize_groups(
        weight.data_ptr(),
        num_outputs,
        num_inputs,
        group_size,
        is_gated,
        result.packed.data_ptr(),
        result.factors.data_ptr(),
        result.zeros.data_ptr(),
        torch.get_num_threads(),
    )
    return result


def pack_int8(core: Core, integers: Tensor, factors: Tensor, *, is_gated: bool) -> Int8Weight:
    """See `QuantizingKernels.pack_int8`."""
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
    """See `QuantizingKernels.pack_groups`."""
    num_outputs, num_inputs = integers.shape
    result = _grouped(
        core, num_outputs, num_inputs, bits=bits, group_size=group_size, is_gated=is_gated
    )
    lines = _in_panels(integers, is_gated=is_gated).contiguous()
    core.pack_groups(
        lines.data_ptr(),
        (len(lines), num_inputs),
        bits,
        result.packed.data_ptr(),
        torch.get_num_threads(),
    )
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
    """Return what belongs to each output [M, …] in the order of whole panels, zeros between."""
    width = PANEL // 2 if is_gated else PANEL
    halves = rows.chunk(2) if is_gated else (rows,)
    padding = [0, 0] * (rows.dim() - 1) + [0, -len(halves[0]) % width]
    panels = [functional.pad(half, padding) for half in halves]
    shape = (-1, width, *rows.shape[1:])
    return torch.cat([panel.view(shape) for panel in panels], dim=1).flatten(0, 1)
