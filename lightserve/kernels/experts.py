"""Experts in kernels that go through a layer's in turn; see `ExpertKernels` for all at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from lightserve.kernels.interface import Kernels


class ExpertChoice(NamedTuple):
    """How a token's experts and their weights follow from its products with the router's weight."""

    num_chosen: int
    is_sigmoid: bool
    """Whether scores are sigmoids of products; else their softmax."""
    normalises: bool
    """Whether the weights of a token's experts are divided by their sum."""
    scale: float = 1.0
    """Of the weights."""
    num_groups: int = 1
    """Equal groups of experts, …"""
    num_chosen_groups: int = 1
    """… so many of which a token's are in: those with the largest sums of their …"""
    group_best: int = 1
    """… so many best."""


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


@runtime_checkable
class ExpertMixingKernels(Kernels, Protocol):
    """Kernels that go through experts in turn, whose weights are packed as other weights are."""

    def choose_experts(
        self, products: Tensor, bias: Tensor | None, choice: ExpertChoice
    ) -> tuple[Tensor, Tensor]:
        """Return experts int64 [T, num_chosen] and their weights, float32.

        products float32 [T, E]; bias float32 [E] is added to scores where experts are chosen, and
        nowhere else. Of equal ones the first are chosen.
        """

    def expert_mixer(
        self, experts: Sequence[tuple[object, object]], dtype: torch.dtype
    ) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
        """Return what gives `ExpertKernels.mix_experts` of x of `dtype`, chosen and weights.

        `experts`: what these kernels made of each one's gates and ups, `is_gated`, and of its down.
        None: they mix no such weights.
        """
