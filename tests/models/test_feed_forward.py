"""What activations give a token does not depend on the tokens beside it, to the bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lightserve.kernels.interface import gelu
from lightserve.models.layers.feed_forward import _sigmoid


def torch_gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


@pytest.mark.parametrize(("ours", "theirs"), [(_sigmoid, torch.sigmoid), (gelu, torch_gelu)])
def test_activations(ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    for width in (1, 5, 24, 100, 130):
        x = torch.randn(300, width) * 3
        whole = ours(x)
        torch.testing.assert_close(whole, theirs(x), rtol=1e-5, atol=1e-6)
        for row in (0, 1, 150, 299):
            assert torch.equal(ours(x[row : row + 1].clone())[0], whole[row])
    extremes = torch.tensor([[-1e30, -200.0, 0.0, 200.0, 1e30]])
    assert bool(_sigmoid(extremes).isfinite().all())
