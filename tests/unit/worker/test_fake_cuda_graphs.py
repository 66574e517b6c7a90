"""What a CUDA graph records, on tensors that say they are on a GPU: all is on the device, no value
is asked for, and nothing is copied from or to the host.

Needs a build of torch with CUDA, though no GPU: the CPU build cannot index such tensors.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.graph_recorders import Tape
from support.random_model import layout_of, random_model, tiny_config
from support.tensor_kernels import TensorKernels
from torch import Tensor
from torch._subclasses import FakeTensorMode

from lightserve.errors import StartupError
from lightserve.worker.graphs import DecodeGraphs, DecodeTables, MemoryUse
from lightserve.worker.memory import KVPool

CUDA = torch.device("cuda", 0)
SIZES = (1, 2, 4, 8)

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="a build of torch without CUDA")


class Captures:
    """Takes down what is recorded; fake tensors need no warm-up."""

    def __init__(self) -> None:
        self.tapes: list[Tape] = []

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        with Tape() as tape:
            function()
        self.tapes.append(tape)
        return lambda: None

    def memory(self) -> MemoryUse:
        return MemoryUse(0, 0)


class SpoiltKernels(TensorKernels):
    """And something that no graph may have."""

    def __init__(self, spoil: Callable[[Tensor], object]) -> None:
        self._spoil = spoil

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        self._spoil(gate_up)
        return super().silu_and_mul(gate_up)


def captured(kernels: TensorKernels) -> list[Tape]:
    with FakeTensorMode():
        config = tiny_config(sliding_windows=(None, 5))
        tables = [torch.zeros(9, 65, dtype=torch.int32, device=CUDA) for _ in range(2)]
        recorder = Captures()
        DecodeGraphs(
            random_model(kernels, config, device=CUDA, dtype=torch.bfloat16),
            KVPool(layout_of(config, "bfloat16"), 100, CUDA),
            DecodeTables(*tables),
            sizes=SIZES,
            recorder=recorder,
            has_logits=True,
        ).capture()
        return recorder.tapes


def test_a_pass_stays_on_the_device() -> None:
    tapes = captured(TensorKernels())
    assert len(tapes) == len(SIZES)
    for tape in tapes:
        tensors = [tensor for operation in tape.operations for tensor in operation.outputs]
        assert len(tensors) > 50
        assert {tensor.device for tensor in tensors} == {CUDA}
        assert tensors[-1].dtype is torch.bfloat16 and tensors[-1].shape[1] == 200


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda x: float(x.amax()), "waits for the device"),
        (lambda x: x.amax(dim=-1).tolist(), "waits for the device"),
        (lambda x: x.nonzero(), "waits for the device"),
        (lambda x: torch.arange(x.shape[-1]).to(x.device), "copies between"),
        (lambda x: x.cpu(), "copies between"),
    ],
)
def test_what_would_not_be_captured(spoil: Callable[[Tensor], object], reason: str) -> None:
    with pytest.raises(StartupError, match=f"8 decodes could not be captured: .*{reason}"):
        captured(SpoiltKernels(spoil))
