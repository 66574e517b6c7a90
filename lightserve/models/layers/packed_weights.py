"""Weights that files have quantised, as kernels multiply by them, where these hold them."""

from __future__ import annotations

import torch

from lightserve.kernels.interface import (
    Fp4Weight,
    Fp8Kernels,
    Fp8Weight,
    GroupedWeight,
    Int8Weight,
    PackedExpertKernels,
    QuantizingKernels,
)
from lightserve.models.stored_weights import StoredWeight, fp8_of, groups_of


def packed_weight(
    kernels: QuantizingKernels,
    parts: list[StoredWeight],
    device: torch.device,
    *,
    is_gated: bool = False,
) -> Int8Weight | GroupedWeight | Fp8Weight | None:
    """Return parts with the same inputs, one below the other; None: the kernels have none such."""
    fp8 = fp8_of(parts) if isinstance(kernels, Fp8Kernels) else None
    if fp8 is not None:
        assert isinstance(kernels, Fp8Kernels)
        own = fp8.values.to(device), fp8.factors.to(device)
        return kernels.pack_fp8(*own, group_size=fp8.group_size, is_gated=is_gated)
    groups = groups_of(parts)
    if groups is None:
        return None
    if groups.has_output_factors:
        integers = (groups.integers ^ 0x80).view(torch.int8).to(device)
        return kernels.pack_int8(integers, groups.factors[:, 0].to(device), is_gated=is_gated)
    return kernels.pack_groups(
        groups.integers.to(device),
        groups.factors.half().to(device),
        groups.zeros.to(torch.uint8).to(device),
        bits=groups.bits,
        group_size=groups.group_size,
        is_gated=is_gated,
    )


def packed_fp4(
    kernels: PackedExpertKernels, parts: list[StoredWeight], device: torch.device
) -> Fp4Weight | None:
    """Return parts one below the other; None: no numbers of 4 bits, or they begin in a group."""
    codes = [part.codes for part in parts if part.codes is not None]
    size = parts[0].group_size
    if size is None or len(codes) < len(parts) or any(part.first_input for part in parts):
        return None
    # A code stands for itself, where values and factors are of twice as much.
    factors = torch.cat([2.0 * part.factors for part in parts])
    return kernels.pack_fp4(torch.cat(codes).to(device), factors.to(device), group_size=size)
