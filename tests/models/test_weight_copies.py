"""Weights on their way to a device: right however late its copies run, and looked at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.model_runs import LoadedModel, load_tiny
from support.parity import Chunk, DirectDriver
from support.tiny_models import find_tiny_model, write_tiny_model
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
)

from lightserve.errors import ModelLoadError
from lightserve.kernels.reference import ReferenceKernels
from lightserve.models import safetensors_reader
from lightserve.models.base import Part
from lightserve.models.weight_copies import DirectCopies, StagedCopies, weight_copies
from lightserve.models.weight_files import SINGLE_FILE, find_weights


class LateDevice(TorchDispatchMode):
    """Runs copies that are not waited for only when a step does, or the results are looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.late: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        self.num_late = 0
        self.num_looks = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: Any = None
    ) -> Any:
        options = options or {}
        if function is torch.ops.aten.copy_.default:
            is_late = (len(arguments) > 2 and arguments[2]) or options.get("non_blocking")
            if is_late:
                self.late.append((function, arguments, options))
                self.num_late += 1
                return arguments[0]
        elif function is torch.ops.aten.aminmax.default:
            self.run_all()
        elif function is torch.ops.aten._local_scalar_dense.default:
            self.num_looks += 1
        return function(*arguments, **options)

    def run_all(self) -> None:
        self.run_up_to(self.num_late)

    def run_up_to(self, count: int) -> None:
        """Run the first copies, as far as they have not run."""
        while self.late and self.num_late - len(self.late) < count:
            function, arguments, options = self.late.pop(0)
            with _disable_current_modes():
                function(*arguments, **options)


class LateFence:
    def __init__(self, device: LateDevice, *, is_careless: bool) -> None:
        self._device, self._is_careless = device, is_careless
        self.num_copies = 0

    def record(self) -> None:
        self.num_copies = self._device.num_late

    def wait(self) -> None:
        """Run what was started before the fence, and no more than that."""
        if self._is_careless:
            return
        self._device.run_up_to(self.num_copies)


@contextmanager
def late_copies(buffer_bytes: int, *, is_careless: bool = False) -> Iterator[StagedCopies]:
    memory = torch.full((2, buffer_bytes), 77, dtype=torch.uint8)
    with LateDevice() as device:
        yield StagedCopies(memory, lambda: LateFence(device, is_careless=is_careless))


SHAPES = [(7, 3), (1, 5), (64,), (40, 6), (1,), (13, 8)]


def copied(*, buffer_bytes: int, is_careless: bool = False) -> bool:
    """Whether parameters hold their sources' values once all were looked at."""
    torch.manual_seed(0)
    sources = [torch.randn(shape) for shape in SHAPES]
    sources[3] = torch.randn(40, 12)[:, 3:9]  # some columns, as of a row-parallel weight
    targets = [torch.full(source.shape, torch.nan, dtype=torch.bfloat16) for source in sources]
    with late_copies(buffer_bytes, is_careless=is_careless) as copies:
        for index, (target, source) in enumerate(zip(targets, sources, strict=True)):
            copies.copy(target, source, str(index))
        names = copies.not_finite()
    assert names == []
    pairs = zip(targets, sources, strict=True)
    return all(torch.equal(target, source.bfloat16()) for target, source in pairs)


@pytest.mark.parametrize("buffer_bytes", [16, 50, 4096])
def test_late_copies_arrive_whole(buffer_bytes: int) -> None:
    """Rows that fit in no whole number, one row at a time, all at once; the type is converted."""
    assert copied(buffer_bytes=buffer_bytes)


def test_a_buffer_refilled_too_early_shows() -> None:
    assert not copied(buffer_bytes=16, is_careless=True)


def test_what_is_not_finite_is_named_once_at_the_end() -> None:
    good, bad = torch.ones(4, 2), torch.tensor([[1.0, 2.0], [torch.nan, 0.0]])
    big = torch.tensor([1e6])
    for copies in (
        DirectCopies(),
        StagedCopies(
            torch.empty(2, 8, dtype=torch.uint8), lambda: LateFence(LateDevice(), is_careless=True)
        ),
    ):
        for name, source in {"good": good, "bad": bad, "inf": -bad / 0, "big": big}.items():
            copies.copy(torch.empty(source.shape, dtype=torch.float16), source, name)
        assert copies.not_finite() == ["bad", "inf", "big"]
        assert copies.not_finite() == []


def test_nothing_is_looked_at_in_between() -> None:
    with late_copies(64) as copies:
        device = _get_current_dispatch_mode()
        assert isinstance(device, LateDevice)
        for index in range(5):
            copies.copy(torch.empty(9, 4), torch.ones(9, 4), str(index))
        assert device.num_looks == 0


def stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a loader copy as to a device."""
    device = LateDevice()
    memory = torch.empty(2, 2048, dtype=torch.uint8)
    monkeypatch.setattr(
        safetensors_reader,
        "weight_copies",
        lambda _: StagedCopies(memory, lambda: LateFence(device, is_careless=True)),
    )


def logits_of(loaded: LoadedModel) -> torch.Tensor:
    tokens = torch.arange(20)
    driver = DirectDriver(
        loaded.model, num_kv_heads=loaded.num_kv_heads, dtype=loaded.dtype, lengths=[len(tokens)]
    )
    logits = driver.run_pass([tokens], [Chunk(0, 0, len(tokens))])
    assert logits is not None
    return logits[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_staged_model_is_the_same(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_model(find_tiny_model("llama-biases-sharded"), tmp_path)
    direct = logits_of(load_tiny(tmp_path, dtype, ReferenceKernels()))
    stage(monkeypatch)
    staged = logits_of(load_tiny(tmp_path, dtype, ReferenceKernels()))
    assert torch.equal(direct, staged)


def test_a_staged_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and columns of a tensor, as ranks read them."""
    write_tiny_model(find_tiny_model("mistral-full"), tmp_path)
    name = "model.layers.0.mlp.down_proj.weight"
    whole = load_file(tmp_path / SINGLE_FILE)[name].float()
    stage(monkeypatch)
    part = torch.empty(10, 16)
    with safetensors_reader.SafetensorsReader(
        find_weights(tmp_path), dtype=torch.float32, device=torch.device("cpu")
    ) as reader:
        reader.read_into(part, name, rows=Part(3, 10), columns=Part(32, 16))
        reader.check_finite()
    assert torch.equal(part, whole[3:13, 32:48])


def test_a_staged_model_with_bad_weights_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_model(find_tiny_model("mistral-full"), tmp_path)
    stage(monkeypatch)
    tensors = load_file(tmp_path / SINGLE_FILE)
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors[name][3, 5] = torch.nan
    save_file(tensors, tmp_path / SINGLE_FILE)
    with pytest.raises(ModelLoadError, match=f"{SINGLE_FILE}: tensor '{name}' has values that"):
        load_tiny(tmp_path, torch.float32, ReferenceKernels())
    tensors[name][3, 5] = 1e6
    save_file(tensors, tmp_path / SINGLE_FILE)
    with pytest.raises(ModelLoadError, match=f"'{name}' has values beyond torch.float16"):
        load_tiny(tmp_path, torch.float16, ReferenceKernels())


def test_the_cpu_copies_directly() -> None:
    assert isinstance(weight_copies(torch.device("cpu")), DirectCopies)
