"""What activations give a token does not depend on the tokens beside it, to the bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lightserve.kernels.cpu.native import NativeKernels
from lightserve.kernels.interface import sigmoid
from lightserve.kernels.reference import ReferenceKernels
from lightserve.kernels.select import missing_core
from lightserve.models.base import choice_of
from lightserve.models.layers.feed_forward import _Router
from lightserve.models.moe_config import MoeConfig, Scoring


def torch_gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


@pytest.mark.parametrize(
    ("ours", "theirs"), [(sigmoid, torch.sigmoid), (ReferenceKernels().gelu, torch_gelu)]
)
def test_activations(ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    for width in (1, 5, 24, 100, 130):
        x = torch.randn(300, width) * 3
        whole = ours(x)
        torch.testing.assert_close(whole, theirs(x), rtol=1e-5, atol=1e-6)
        for row in (0, 1, 150, 299):
            assert torch.equal(ours(x[row : row + 1].clone())[0], whole[row])
    extremes = torch.tensor([[-1e30, -200.0, 0.0, 200.0, 1e30]])
    assert bool(sigmoid(extremes).isfinite().all())


class _Given:
    """The products of a router, whatever goes in."""

    def __init__(self, products: Tensor) -> None:
        self.products = products

    def apply(self, x: Tensor, *, dtype: torch.dtype) -> Tensor:
        return self.products


@pytest.mark.skipif(bool(missing_core()), reason=missing_core())
@pytest.mark.parametrize("scoring", [Scoring.SOFTMAX, Scoring.SIGMOID])
@pytest.mark.parametrize("groups", [(1, 1, 1), (4, 2, 2), (3, 1, 3)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_native_core_chooses_the_experts_that_torch_chooses(
    scoring: Scoring, groups: tuple[int, int, int], *, has_bias: bool
) -> None:
    torch.manual_seed(2)
    moe = MoeConfig(
        layers=frozenset({0}),
        num_experts=12,
        num_chosen=4,
        intermediate_size=8,
        normalises=has_bias,
        scoring=scoring,
        num_groups=groups[0],
        num_chosen_groups=groups[1],
        group_best=groups[2],
        scale=2.5,
    )
    products = torch.randn(300, 12) * 4
    bias = torch.randn(12) * 0.3 if has_bias else None
    router = _Router.__new__(_Router)
    router._weight, router._bias, router._moe = _Given(products), bias, moe  # type: ignore[assignment]
    router._choice = choice_of(moe)
    native = NativeKernels()
    found = []
    for choose in (ReferenceKernels().choose_experts, native.choose_experts):
        router._choose = choose
        chosen, weights = router(products)
        found.append(torch.zeros(300, 12).scatter(1, chosen, weights))
    torch.testing.assert_close(found[1], found[0], rtol=2e-5, atol=1e-7)
    products[1, 3], products[2] = torch.nan, torch.nan
    chosen, _ = router(products)
    assert all(len(set(row)) == 4 for row in chosen.tolist()) and chosen.min() >= 0
    assert chosen.max() < 12
