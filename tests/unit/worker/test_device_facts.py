"""What is said of the workers' device: in the profile's key, in /version and in the metrics."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightserve.config import ServeConfig
from lightserve.kernels.cpu import core
from lightserve.messages.common import DeviceFacts
from lightserve.metrics.catalogue import DEVICE_INFO
from lightserve.metrics.recording import Recorder
from lightserve.router.metrics import RouterMetrics
from lightserve.worker import device as device_facts
from lightserve.worker import profiling
from lightserve.worker.device import facts_of

CUDA = torch.device("cuda", 0)
DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n"
H200 = DeviceFacts(
    kind="cuda",
    name="NVIDIA H200",
    memory_bytes=150 * 10**9,
    driver="580.159.04",
    cuda="13.0",
    torch=str(torch.__version__),
    triton="3.6.0",
    kernels="triton",
)


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=150 * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(device_facts.importlib.metadata, "version", lambda name: "3.6.0")
    monkeypatch.setattr(device_facts, "DRIVER_INFO", tmp_path / "version")
    (tmp_path / "version").write_text(DRIVER)
    return tmp_path / "version"


@pytest.mark.parametrize(
    ("line", "version"),
    [
        (DRIVER, "580.159.04"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\n", "535.104.05"),
        ("no such line", "unknown"),
        (None, "unknown"),
    ],
)
def test_a_gpu(gpu: Path, line: str | None, version: str) -> None:
    if line is None:
        gpu.unlink()
    else:
        gpu.write_text(line)
    facts = facts_of(ServeConfig(), CUDA)
    assert facts == DeviceFacts(**{**_fields(H200), "driver": version})
    expected = f"NVIDIA H200 (driver {version}, CUDA 13.0, torch {torch.__version__}, Triton 3.6.0)"
    assert facts.summary == expected


def _fields(facts: DeviceFacts) -> dict[str, object]:
    return {name: getattr(facts, name) for name in facts.__struct_fields__}


@pytest.mark.parametrize(
    ("config", "kernels"),
    [
        (ServeConfig(), "native" if core.LIBRARY.exists() else "torch"),
        (ServeConfig(attention_backend="torch"), "torch"),
        (ServeConfig(attention_backend="reference"), "reference"),
        (ServeConfig(batch_invariant=True), "torch-batch-invariant"),
    ],
)
def test_a_cpu(config: ServeConfig, kernels: str) -> None:
    facts = facts_of(config, torch.device("cpu"))
    assert (facts.kind, facts.kernels, facts.memory_bytes) == ("cpu", kernels, 0)
    assert facts.summary == facts.name != ""


def test_a_profile_belongs_to_the_gpu_and_its_software(
    gpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ServeConfig()
    on_cpu = profiling.profile_key(config)
    monkeypatch.setattr(profiling, "resolve_device", lambda name, rank: CUDA)
    on_gpu = profiling.profile_key(config)
    assert (on_gpu.device, on_gpu.kernels) == (H200.summary, "triton")
    gpu.write_text(DRIVER.replace("580", "590"))
    assert len({on_cpu.digest, on_gpu.digest, profiling.profile_key(config).digest}) == 3


def test_a_profile_belongs_to_how_weights_are_kept() -> None:
    plain, rounded = (
        profiling.profile_key(ServeConfig(quantization=name)) for name in ("none", "int8")
    )
    assert rounded.kernels == f"{plain.kernels}, int8 weights"
    assert plain.digest != rounded.digest


def test_the_metric() -> None:
    recorder = Recorder()
    RouterMetrics(recorder).on_device(H200)
    (sample,) = [s for s in recorder.snapshot() if s.family == DEVICE_INFO.name]
    assert dict(zip(DEVICE_INFO.labels, sample.labels, strict=True)) == {
        "device": "cuda",
        "device_name": "NVIDIA H200",
        "driver": "580.159.04",
        "cuda": "13.0",
        "triton": "3.6.0",
        "kernels": "triton",
    }
