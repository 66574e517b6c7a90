"""The comparison with the reference that every worker makes before it serves."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.broken_kernels import FAULTS
from support.grids import every_value
from support.kernel_grid import SMALL_SHAPES

from lightserve.bundled import BUNDLED_MODEL_DIR
from lightserve.config import ServeConfig
from lightserve.errors import StartupError
from lightserve.kernels.check_pair import relative_error
from lightserve.kernels.cpu.default import TorchKernels
from lightserve.kernels.cpu.invariant import InvariantKernels
from lightserve.kernels.cpu.native import NativeKernels
from lightserve.kernels.interface import Kernels
from lightserve.kernels.reference import ReferenceKernels
from lightserve.kernels.select import missing_core
from lightserve.kernels.self_check import check_kernels
from lightserve.kernels.triton.kernels import TritonKernels
from lightserve.kernels.weights import ConvolutionSizes, StateSizes
from lightserve.worker import build

CPU = torch.device("cpu")
SHAPES = replace(
    SMALL_SHAPES,
    dtype=torch.float32,
    hidden_size=48,
    num_heads=4,
    num_kv_heads=2,
    sliding_windows=(None, 24),
    qk_norm=True,
    qkv_bias=True,
    has_alibi=True,
    soft_cap=50.0,
    context_len=2048,
    num_experts=0,
    delta=StateSizes(2, 4, 16, 12, 4, beta_scale=2.0),
)
IMPLEMENTATIONS = [
    ReferenceKernels,
    TorchKernels,
    *([] if missing_core() else [NativeKernels]),
    InvariantKernels,
]
OPERATIONS = {
    "decay lost": "states of",
    "betas of one": "states of",
    "an old state": "states of",
    "other inputs of a convolution": "states of",
    "KV beside its slot": "write_kv",
    "KV to another slot": "write_kv",
    "rotary backwards": "rotary",
    "keys not rotated": "rotary",
    "one norm for q and k": "rotate_and_write with norms",
    "queries not rotated": "rotate_and_write with norms",
    "another eps": "rms_norm",
    "norm of the summand": "add_rms_norm",
    "mean kept": "layer_norm",
    "no up": "gelu",
    "gate and up swapped": r"linear \(gate_up\)",
    "last column lost": "linear",
    "no bias": r"linear \(qkv\)",
    "failed launch": "an operation failed: RuntimeError: no kernel image",
    "too large": "an operation failed: OutOfResources: out of resource: shared memory",
    "reads the host": r"an operation failed: \w+: host_rows of a recorded pass was read",
}
"""Of the faults that are not attention's."""


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_that_are_right(implementation: type[Kernels], dtype: torch.dtype) -> None:
    if implementation is InvariantKernels and dtype is not torch.float32:
        pytest.skip("batch-invariant kernels are float32 only")
    check_kernels(implementation(), replace(SHAPES, dtype=dtype), CPU)


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    every_value([*IMPLEMENTATIONS[:3], TritonKernels], [torch.float32, torch.bfloat16]),
)
def test_convolutions_alone(implementation: type[Kernels], dtype: torch.dtype) -> None:
    changes = {"delta": None, "convolution": ConvolutionSizes(20, 3)}
    shapes = replace(SHAPES, dtype=dtype, context_len=40, sliding_windows=(24,), **changes)
    check_kernels(implementation(), shapes, CPU)
    with pytest.raises(StartupError, match="states of"):
        check_kernels(ConvolutionWithSilu(), shapes, CPU)


class ConvolutionWithSilu(TorchKernels):
    def convolve(self, *args: Any, is_plain: bool = False) -> torch.Tensor:
        return super().convolve(*args)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"delta": StateSizes(2, 2, 8, 12, 4, decays_channels=True)},
        {"delta": StateSizes(2, 4, 20, 12, 4, is_mamba=True)},
    ],
)
def test_triton_kernels(changes: dict[str, object]) -> None:
    """In the interpreter, where long contexts take seconds: short ones."""
    shapes = replace(SHAPES, dtype=torch.bfloat16, context_len=40, sliding_windows=(24,))
    check_kernels(TritonKernels(), replace(shapes, **changes), CPU)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_heads": 1, "num_kv_heads": 1, "head_dim": 8, "rotary_dim": 8},
        {"num_heads": 7, "num_kv_heads": 1, "head_dim": 80, "rotary_dim": 32},
        {"context_len": 1, "sliding_windows": (1,)},
        {"context_len": 3, "sliding_windows": (None,)},
        {"sliding_windows": (100_000,)},
        {"qk_norm": False, "qkv_bias": False},
        {"has_wide_norms": True, "dtype": torch.bfloat16},
        {"delta": StateSizes(1, 3, 8, 20, 2)},
        {"delta": StateSizes(2, 2, 8, 12, 4, decays_channels=True)},
        {"delta": StateSizes(2, 4, 20, 12, 4, is_mamba=True)},
        {"delta": StateSizes(1, 3, 8, 20, 2, is_mamba=True)},
    ],
)
def test_other_shapes(changes: dict[str, object]) -> None:
    for implementation in IMPLEMENTATIONS if "delta" in changes else [TorchKernels]:
        check_kernels(implementation(), replace(SHAPES, **changes), CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", FAULTS)
def test_kernels_that_are_wrong(
    fault: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")  # the interpreter is no alternative, and slow
    operation = OPERATIONS.get(fault, "attention of")
    with pytest.raises(StartupError, match=operation) as caught:
        check_kernels(FAULTS[fault](), replace(SHAPES, dtype=dtype), CPU)
    message = str(caught.value)
    assert message.startswith("the torch kernels do not agree with the reference on cpu: ")
    if "operation failed" not in operation:
        limit = 0.001 if dtype is torch.float32 else 0.02
        assert " has a relative error of " in message
        assert f"at most {limit:g} is allowed" in message
    assert "\n" not in message


class TritonWindow(TritonKernels):
    def attention(
        self, *args: object, sliding_window: int | None, **options: object
    ) -> torch.Tensor:
        wider = None if sliding_window is None else sliding_window + 1
        return super().attention(*args, sliding_window=wider, **options)  # type: ignore[arg-type]


def test_a_wrong_triton_kernel_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = replace(SHAPES, sliding_windows=(24,), context_len=40, delta=None)
    with pytest.raises(StartupError, match=r"attention of .* window of 24 .*backend torch does$"):
        check_kernels(TritonWindow(), shapes, CPU)
    monkeypatch.delenv("TRITON_INTERPRET")  # so that Triton is no way out here
    with pytest.raises(StartupError, match=r"backend reference is slow, but right$"):
        check_kernels(FAULTS["no bias"](), shapes, CPU)


def test_relative_error() -> None:
    truth = torch.randn(5, 400)
    assert relative_error(truth.clone(), truth) == 0.0
    one_vector = truth.clone()
    one_vector[3] *= 1.05
    assert relative_error(one_vector, truth) == pytest.approx(0.05, rel=1e-3)
    one_element = truth.clone()
    one_element[2, 7] += truth[2].square().mean().sqrt()
    assert relative_error(one_element, truth) == pytest.approx(0.1, rel=1e-3)
    unwritten = truth.clone()
    unwritten[4, 399] = torch.nan
    assert not relative_error(unwritten, truth) <= 1.0
    assert relative_error(truth[:4], truth) == float("inf")


def test_a_runner_is_not_built_over_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    config = ServeConfig(model=str(BUNDLED_MODEL_DIR), kv_memory="4MiB")
    monkeypatch.setattr(build, "make_kernels", lambda *_, **__: FAULTS["rotary backwards"]())
    with pytest.raises(StartupError, match="rotary of 8 query and 4 KV heads of 32"):
        build.build_runner(config)


def test_a_server_does_not_start_over_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    tests = Path(__file__).parents[1]
    result = subprocess.run(
        [
            sys.executable,
            str(tests / "support" / "broken_server.py"),
            "heads in turn",
            "serve",
            "--port=0",
            "--metrics-port=-1",
            "--kv-memory=4MiB",
            "--profile=off",
            "--device=cpu",
        ],
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(tests.parent), str(tests)))},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 1, result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert "worker-0: the torch kernels do not agree with the reference on cpu: attention" in last
    assert "--attention-backend reference is slow, but right" in last
