"""Weights packed once into oneDNN's own layout.

Measured (bfloat16, one core): packed products of 1 to 16 rows take 1/3 to 2/3 of the time of
`F.linear`, which packs anew in every call. oneDNN takes another way for one row or two, which is
slower than four rows by 10 to 25 %. Where it has no kernels for a type, weights stay as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

SLOW_ROWS = 3
"""Fewer rows than this are padded…"""
FAST_ROWS = 4
"""…to this many."""


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this machine multiplies packed weights of `dtype`."""
    if not torch._C._has_mkldnn:
        return False
    match dtype:
        case torch.float32:
            return True
        case torch.bfloat16:
            return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        case torch.float16:
            return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return False


def pack(weight: Tensor) -> Tensor:
    """Return `weight` [M, K] packed where that is possible, otherwise as it is."""
    if not can_pack(weight.dtype) or weight.numel() == 0:
        return weight
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return packed


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias for a weight from `pack`; x [N, K] -> [N, M]."""
    if not weight.is_mkldnn:
        return F.linear(x, weight, bias)
    num_rows = x.shape[0]
    if 0 < num_rows < SLOW_ROWS:
        return _multiply(F.pad(x, (0, 0, 0, FAST_ROWS - num_rows)), weight, bias)[:num_rows]
    return _multiply(x.contiguous(), weight, bias)


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product
