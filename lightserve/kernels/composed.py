"""Operations made of others, or of torch's, for kernels that have nothing faster."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from lightserve.kernels.interface import ClampedGate, ExpertChoice, Kernels, QKNorm


def gelu(x: Tensor, up: Tensor | None = None, *, is_exact: bool = False) -> Tensor:
    """See `Kernels.gelu`."""
    if is_exact:
        out = functional.gelu(x)
    elif x.dtype is torch.float32:
        # Written out: torch's own depends, in its last bits, on where its vectors end.
        twice = x * (1.0 + 0.044715 * x * x) * (2.0 * math.sqrt(2.0 / math.pi))
        out = x * (1.0 / (1.0 + torch.exp(-twice)))
    else:
        out = functional.gelu(x, approximate="tanh")
    return out if up is None else out.mul_(up)


def clamped_gate(gate_up: Tensor, gate: ClampedGate) -> Tensor:
    """Return what a `ClampedGate` makes of gate_up [T, 2*I] (gates first), [T, I]."""
    gates, ups = gate_up.float().chunk(2, dim=-1)
    gates, ups = gates.clamp(max=gate.limit), ups.clamp(-gate.limit, gate.limit)
    # Written out: torch's own sigmoid depends, in its last bits, on where its vectors end.
    features = gates / (1.0 + torch.exp(-gate.alpha * gates)) * (ups + 1.0)
    return features.to(gate_up.dtype)


def rotate_and_write(
    kernels: Kernels,
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
    """See `Kernels.rotate_and_write`."""
    if qk_norm is not None:
        q = kernels.rms_norm(q, qk_norm.q_weight, qk_norm.eps)
        k = kernels.rms_norm(k, qk_norm.k_weight, qk_norm.eps)
    q, k = kernels.rotary(q, k, cos, sin)
    kernels.write_kv(k, v, k_pool, v_pool, slot_mapping)
    return q


def sigmoid(x: Tensor) -> Tensor:
    """Written out: torch's own depends, in its last bits, on where its vectors end."""
    return 1.0 / (1.0 + torch.exp(-x))


def choose_experts(
    products: Tensor, bias: Tensor | None, choice: ExpertChoice
) -> tuple[Tensor, Tensor]:
    """See `ExpertMixingKernels.choose_experts`; by torch."""
    scores = sigmoid(products) if choice.is_sigmoid else products.softmax(-1)
    ranks = scores if bias is None else scores + bias
    if choice.num_groups > 1:
        ranks = _within_groups(ranks, choice)
    chosen = ranks.topk(choice.num_chosen, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if choice.normalises:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return chosen, weights * choice.scale if choice.scale != 1.0 else weights


def _within_groups(ranks: Tensor, choice: ExpertChoice) -> Tensor:
    """Leave out experts [T, E] of groups that are not chosen."""
    groups = ranks.view(len(ranks), choice.num_groups, -1)
    sums = groups.topk(choice.group_best, dim=-1).values.sum(-1)
    best = sums.topk(choice.num_chosen_groups, dim=-1).indices
    is_out = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(-1, best, False)
    return groups.masked_fill(is_out[..., None], float("-inf")).view_as(ranks)
