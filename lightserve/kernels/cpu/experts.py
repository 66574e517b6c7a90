"""A mixture of experts by the native core: all of a layer's in one call, one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightserve.kernels.cpu.core import Operations
from lightserve.kernels.interface import ExpertChoice, GroupedWeight, Int8Weight

_NO_WEIGHT = ()


def expert_mixer(
    operations: Operations, experts: Sequence[tuple[object, object]], level: int
) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """See `ExpertMixingKernels.expert_mixer`; `level`: which instructions are used."""
    weights = [weight for expert in experts for weight in expert]
    words = [_words(weight) for weight in weights]
    if _NO_WEIGHT in words:
        return None
    table = torch.tensor(words, dtype=torch.int64)
    first = weights[0]
    size = (len(first) if isinstance(first, Tensor) else first.num_outputs) // 2  # type: ignore[attr-defined]

    def mix(x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        num_rows, num_inputs = x.shape
        x, out = x if x.stride(1) == 1 else x.contiguous(), x.new_empty(num_rows, num_inputs)
        assert (chosen.dtype, shares.dtype) == (torch.int64, torch.float32)
        assert chosen.is_contiguous() and shares.is_contiguous()
        if num_rows and not operations.mix_experts(
            x.data_ptr(),
            x.stride(0),
            num_rows,
            chosen.data_ptr(),
            shares.data_ptr(),
            chosen.shape[1],
            table.data_ptr(),
            len(experts),  # which own the weights whose addresses are in the table
            num_inputs,
            size,
            out.data_ptr(),
            level,
            torch.get_num_threads(),
        ):
            raise IndexError(f"an expert of {chosen.tolist()} is none of {len(experts)}")
        return out

    return mix


def choose_experts(
    operations: Operations, products: Tensor, bias: Tensor | None, choice: ExpertChoice
) -> tuple[Tensor, Tensor]:
    """See `ExpertMixingKernels.choose_experts`; `operations` are those of float32."""
    num_rows, num_experts = products.shape
    assert products.dtype is torch.float32 and products.is_contiguous()
    chosen = products.new_empty(num_rows, choice.num_chosen, dtype=torch.int64)
    shares = products.new_empty(num_rows, choice.num_chosen)
    if num_rows:
        operations.choose_experts(
            products.data_ptr(),
            num_rows,
            None if bias is None else bias.data_ptr(),
            num_experts,
            choice.num_groups,
            choice.num_chosen_groups,
            choice.group_best,
            choice.num_chosen,
            choice.is_sigmoid,
            choice.normalises,
            choice.scale,
            chosen.data_ptr(),
            shares.data_ptr(),
            torch.get_num_threads(),
        )
    return chosen, shares


def _words(weight: object) -> tuple[int, ...]:
    """Return a packed weight as csrc/experts.cpp reads it, nothing for what is none."""
    match weight:
        case Tensor() if weight.numel():
            return weight.data_ptr(), 0, 0, 0, 0
        case Int8Weight():
            return weight.packed.data_ptr(), weight.factors.data_ptr(), 0, 8, 0
        case GroupedWeight():
            parts = (weight.packed, weight.factors, weight.zeros)
            packed, factors, zeros = (part.data_ptr() for part in parts)
            return packed, factors, zeros, weight.bits, weight.group_size
    return _NO_WEIGHT
