"""Which kernels a worker gets, and which combinations are refused, where."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import torch
import triton

from lightserve.config import ServeConfig
from lightserve.errors import ConfigError
from lightserve.kernels import select
from lightserve.kernels.select import NEWEST_TRITON, OLDEST_TRITON, make_kernels

ON_CPU = "torch" if select.missing_core() else "native"
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("name", "batch_invariant", "device", "expected"),
    [
        ("auto", False, None, ON_CPU),
        ("auto", False, CPU, ON_CPU),
        ("auto", False, CUDA, "triton"),
        ("torch", False, CPU, "torch"),
        ("torch", False, CUDA, "torch"),
        ("triton", False, CUDA, "triton"),
        ("reference", False, CPU, "reference"),
        ("reference", False, CUDA, "reference"),
        ("auto", True, CPU, "torch-batch-invariant"),
        ("torch", True, CPU, "torch-batch-invariant"),
    ],
)
def test_kernels(
    name: str, batch_invariant: bool, device: torch.device | None, expected: str
) -> None:
    assert make_kernels(name, batch_invariant=batch_invariant, device=device).name == expected


def test_triton_on_the_cpu_is_for_trying_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert make_kernels("triton", batch_invariant=False, device=CPU).name == "triton"
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match="needs a GPU"):
        make_kernels("triton", batch_invariant=False, device=CPU)


@pytest.mark.parametrize("name", ["auto", "triton", "torch"])
def test_a_gpu_without_triton(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="the extra gpu"):
        make_kernels(name, batch_invariant=False, device=CUDA)
    assert make_kernels("torch", batch_invariant=False, device=CPU).name == "torch"


def test_versions_of_triton(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is older is refused; what is newer is said, and left to the check of the start."""
    for version in ("3.6.0", "3.9.1"):
        monkeypatch.setattr(triton, "__version__", version)
        make_kernels("torch", batch_invariant=False, device=CUDA)
    assert not caplog.records
    monkeypatch.setattr(triton, "__version__", "3.10.0+git1")
    make_kernels("torch", batch_invariant=False, device=CUDA)
    assert caplog.messages == ["triton 3.10.0+git1 is untried: the newest that was tried is 3.9"]
    monkeypatch.setattr(triton, "__version__", "3.5.1")
    with pytest.raises(ConfigError, match=r"needs triton 3\.6 or newer, got 3\.5\.1"):
        make_kernels("torch", batch_invariant=False, device=CUDA)
    wanted = "triton>={}.{},<{}.{}".format(*OLDEST_TRITON, NEWEST_TRITON[0], NEWEST_TRITON[1] + 1)
    root = Path(__file__).parents[2]
    assert tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"][
        "gpu"
    ] == [wanted]
    assert wanted in (root / "requirements" / "triton.in").read_text()


def test_auto_on_a_gpu_is_no_place_for_batch_invariance() -> None:
    with pytest.raises(ConfigError, match="--device cpu"):
        make_kernels("auto", batch_invariant=True, device=CUDA)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"device": "gpu"}, "--device must be one of auto, cpu, cuda, got 'gpu'"),
        ({"attention_backend": "flash"}, "--attention-backend must be one of auto, triton, torch"),
        ({"kernel_tuning": "off", "device": "cpu"}, "--kernel-tuning needs a GPU"),
        (
            {"kernel_tuning": "off", "attention_backend": "torch"},
            "--kernel-tuning needs --attention-backend triton, got 'torch'",
        ),
        (
            {"batch_invariant": True, "device": "cuda"},
            "--batch-invariant needs --device cpu or auto, got 'cuda'",
        ),
        (
            {"batch_invariant": True, "attention_backend": "triton"},
            "--batch-invariant needs --attention-backend torch or auto, got 'triton'",
        ),
        ({"quantization": "int3"}, "--quantization must be one of none, int8, got 'int3'"),
        (
            {"quantization": "int8", "dtype": "float16"},
            "--quantization int8 needs --dtype auto or bfloat16 or float32, got 'float16'",
        ),
        (
            {"quantization": "int8", "device": "cuda"},
            "--quantization int8 needs --device auto or cpu, got 'cuda'",
        ),
        (
            {"quantization": "int8", "attention_backend": "torch"},
            "--quantization int8 needs --attention-backend auto, got 'torch'",
        ),
        (
            {"quantization": "int8", "batch_invariant": True},
            "--quantization int8 cannot be had with --batch-invariant",
        ),
        (
            {"batch_invariant": True, "dtype": "bfloat16"},
            "--batch-invariant needs --dtype float32 or auto, got 'bfloat16'",
        ),
    ],
)
def test_refused_options(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServeConfig(**values)  # type: ignore[arg-type]
