"""gpt-oss's experts of 4 bits: beside transformers' own conversion, and beside plain ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.model_runs import NUM_DECODES, load_tiny, standard_sequences
from support.parity import compare_all, schedule
from support.tiny_models import find_tiny_model, load_reference, write_tiny_model
from support.tp_run import Job, run_ranks
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from lightserve.errors import ModelLoadError
from lightserve.kernels.cpu.native import NativeKernels
from lightserve.kernels.reference import ReferenceKernels
from lightserve.kernels.select import missing_core
from lightserve.kernels.triton.kernels import TritonKernels
from lightserve.models.config import load_model_config
from lightserve.models.layers.quantized import StoredMethod
from lightserve.models.weight_files import check_weights

GROUP = 32
NAMES = ("gate_up_proj", "down_proj")


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a model with experts in MXFP4, and the same one with plain numbers."""
    root = tmp_path_factory.mktemp("mxfp4")
    plain = write_tiny_model(find_tiny_model("gpt-oss-mqa"), root / "plain")
    packed = root / "packed"
    shutil.copytree(plain, packed)
    tensors = load_file(plain / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    for name in [name for name in tensors if name.endswith(NAMES)]:
        experts, inputs, outputs = tensors.pop(name).shape
        groups = (experts, outputs, inputs // GROUP)
        blocks = torch.randint(256, (*groups, GROUP // 2), generator=generator).byte()
        scales = torch.randint(121, 126, groups, generator=generator).byte()
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})
    for stacked in [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]:
        pair = (tensors.pop(f"{stacked}_blocks"), tensors.pop(f"{stacked}_scales"))
        tensors[stacked] = convert_moe_packed_tensors(*pair, dtype=torch.float32).contiguous()
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    set_config(packed, quantization_config={"quant_method": "mxfp4"})
    return packed, plain


def set_config(path: Path, **changes: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def all_numbers(model: object) -> list[Tensor]:
    layers = model._layers  # type: ignore[attr-defined]
    experts = [layer._mlp._experts for layer in layers]
    return [part for own in experts for part in (*own._weights, *own._biases)]


def test_numbers_are_those_of_transformers(directories: tuple[Path, Path]) -> None:
    packed, plain = (
        load_tiny(path, torch.float32, ReferenceKernels()).model for path in directories
    )
    pairs = list(zip(all_numbers(packed), all_numbers(plain), strict=True))
    assert len(pairs) == 8
    assert all(torch.equal(*pair) for pair in pairs)


@pytest.mark.skipif(bool(missing_core()), reason=missing_core())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_native_core_multiplies_by_them_as_they_are(
    directories: tuple[Path, Path], dtype: torch.dtype
) -> None:
    packed, plain = directories
    kernels = NativeKernels()
    method = StoredMethod(kernels)
    loaded = load_tiny(packed, dtype, kernels, method=method)
    assert (method.num_kept, method.num_widened) == (2 * 2 * 3, 0)
    sequences = standard_sequences(load_reference(plain, torch.float32), 6)
    passes = schedule([len(s.tokens) for s in sequences], chunk=16, num_decodes=NUM_DECODES)
    logits = loaded.run(sequences, passes)
    assert logits is not None
    report = compare_all(sequences, logits, dtype)
    assert report.holds(dtype), report
    shifted = compare_all(sequences, [rows.roll(1, dims=0) for rows in logits], dtype)
    assert not shifted.holds(dtype)


def test_triton_keeps_4_bits_of_a_number(directories: tuple[Path, Path]) -> None:
    """4.25 bits with the factors' exponents; what they are is a part of what transformers makes."""
    packed, plain = directories
    method = StoredMethod(TritonKernels())
    loaded = load_tiny(packed, torch.float32, method.kernels, method=method)
    assert (method.num_kept, method.num_widened) == (2 * 2 * 3, 0)
    for layer in loaded.model._layers:  # type: ignore[attr-defined]
        for experts in layer._mlp._experts._weights:
            assert experts.kind == "fp4"
    sequences = standard_sequences(load_reference(plain, torch.float32), 1)
    passes = schedule([len(s.tokens) for s in sequences], chunk=None, num_decodes=1)
    logits = loaded.run(sequences, passes)
    assert logits is not None
    report = compare_all(sequences, logits, torch.float32)
    assert report.holds(torch.float32), report


def test_two_ranks(directories: tuple[Path, Path], tmp_path: Path) -> None:
    """Half of the inputs of `down_proj` begins within a group."""
    packed, plain = directories
    sequences = standard_sequences(load_reference(plain, torch.float32), 3)
    job = Job(
        path=str(packed),
        dtype="float32",
        kernels="reference",
        chunk=16,
        tokens=[sequence.tokens for sequence in sequences],
    )
    (actual,) = run_ranks([job], 2, tmp_path)
    report = compare_all(sequences, actual, torch.float32)
    assert report.holds(torch.float32), report


def test_what_is_refused(directories: tuple[Path, Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(directories[0], broken)
    config = load_model_config(broken)
    tensors = load_file(broken / "model.safetensors")
    name = next(name for name in tensors if name.endswith("_scales"))
    good = tensors[name]
    for bad, complaint in (
        (good.float(), "has type F32, not"),
        (good[:, :, :1].contiguous(), "config.json implies"),
    ):
        save_file({**tensors, name: bad}, broken / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelLoadError, match=complaint) as failure:
            check_weights(broken, config)
        assert name in str(failure.value)
    for bad, complaint in (
        (torch.full_like(good, 255), "not finite"),
        (torch.full_like(good, 254), "beyond"),
    ):
        save_file({**tensors, name: bad}, broken / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelLoadError, match=complaint) as failure:
            load_tiny(broken, torch.float32, ReferenceKernels())
        assert name in str(failure.value) and str(broken) in str(failure.value)
    set_config(broken, architectures=["LlamaForCausalLM"])
    with pytest.raises(ModelLoadError, match=r"quant_method.*'mxfp4'; supported are"):
        load_model_config(broken)
