"""Weights packed once into oneDNN's own layout.

Measured (bfloat16, one core): packed products of 1 to 16 rows take 1/3 to 2/3 of the time of
`F.linear`, which packs anew in every call. Where oneDNN has no kernels for a type, weights stay
as they are.

oneDNN generates code for every shape that it has not seen lately, 1 to 10 ms each, and keeps about
0.6 MiB for it; and a server has another number of rows in almost every step. So rows are padded to
one of a few numbers, at most a quarter more. (A model of five shapes: 44 numbers up to 512 rows
held 122 to 136 MiB, these 24 hold 65 to 69; steps of 65 to 512 rows multiply 9 % more rows in the
mean, not 3.) The least is four: oneDNN takes another way for one row or two, slower by 10 to 25 %.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


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
    padding = padded_rows(num_rows) - num_rows
    if padding == 0:
        return _multiply(x.contiguous(), weight, bias)
    return _multiply(F.pad(x, (0, 0, 0, padding)), weight, bias)[:num_rows]


def padded_rows(num_rows: int) -> int:
    """Return the number that `num_rows` are padded to: a multiple of 4, then four per doubling."""
    step = 4
    while num_rows > 8 * step:
        step *= 2
    return -(-num_rows // step) * step


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product
