"""Model directories whose weights are quantised, made of plain ones by simple rounding.

Words are put together here number by number, apart from how lightserve takes them apart.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightserve.models.weight_files import SINGLE_FILE

AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs stands where in an int32, from the lowest bits."""
Module = tuple[dict[str, Tensor], Tensor]
"""Tensors by name, and the numbers that they stand for, [M, K]."""


def rounded(
    weight: Tensor, size: int, bits: int, *, is_symmetric: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return integers int64 [M, K], factors [M, G] and zeros int64 [M, G]."""
    outputs, inputs = weight.shape
    groups = -(-inputs // size)
    padded = torch.nn.functional.pad(weight.double(), (0, groups * size - inputs))
    lines = padded.view(outputs, groups, size)
    most = 2**bits - 1
    if is_symmetric:
        factors = (lines.abs().amax(-1) / (2 ** (bits - 1) - 1)).to(dtype)
        zeros = torch.full((outputs, groups), 2 ** (bits - 1))
    else:
        low, high = lines.amin(-1).clamp_max(0), lines.amax(-1).clamp_min(0)
        factors = ((high - low) / most).to(dtype)
        zeros = (-low / factors.double()).round().clamp(1, most).long()
    steps = (lines / factors.double()[..., None]).round() + zeros[..., None]
    integers = steps.clamp(0, most).long().view(outputs, -1)[:, :inputs]
    return integers, factors, zeros


def numbers(integers: Tensor, factors: Tensor, zeros: Tensor, groups: Tensor) -> Tensor:
    """Return float64 [M, K], of each input's group."""
    return (integers - zeros[:, groups]).double() * factors.double()[:, groups]


def words(values: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """Return int32 [A, ceil(B / n)] of values [A, B]."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % per_word))
    found = torch.zeros(len(values), padded.shape[1] // per_word, dtype=torch.int64)
    for place, which in enumerate(places or range(per_word)):
        found |= padded[:, which::per_word] << (bits * place)
    return torch.where(found >= 2**31, found - 2**32, found).to(torch.int32)


def in_turn(inputs: int, size: int) -> Tensor:
    return torch.arange(inputs) // size


def gptq(
    weight: Tensor,
    *,
    bits: int = 4,
    size: int = 32,
    is_symmetric: bool = True,
    order: bool = False,
    zero_offset: int = 1,
) -> Module:
    inputs = weight.shape[1]
    size = inputs if size == -1 else size
    groups = in_turn(inputs, size)
    permutation = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
    place = permutation if order else torch.arange(inputs)
    # Inputs that are quantised together stand together; then they go back to their places.
    integers, factors, zeros = rounded(
        weight[:, place], size, bits, is_symmetric=is_symmetric, dtype=torch.float16
    )
    own = torch.empty(inputs, dtype=torch.int64)
    own[place] = groups
    back = torch.empty_like(integers)
    back[:, place] = integers
    tensors = {
        "qweight": words(back, bits).T.contiguous(),
        "qzeros": words(zeros.T - zero_offset, bits),
        "scales": factors.T.contiguous(),
        "g_idx": own.to(torch.int32),
    }
    return tensors, numbers(back, factors, zeros, own)


def awq(weight: Tensor, *, size: int = 32) -> Module:
    size = weight.shape[1] if size == -1 else size
    integers, factors, zeros = rounded(weight, size, 4, is_symmetric=False, dtype=torch.float16)
    tensors = {
        "qweight": words(integers.T.contiguous(), 4, AWQ_PLACES),
        "qzeros": words(zeros.T.contiguous(), 4, AWQ_PLACES),
        "scales": factors.T.contiguous(),
    }
    return tensors, numbers(integers, factors, zeros, in_turn(weight.shape[1], size))


def packed(weight: Tensor, *, bits: int = 4, size: int = 32, is_symmetric: bool = True) -> Module:
    size = weight.shape[1] if size == -1 else size
    integers, factors, zeros = rounded(
        weight, size, bits, is_symmetric=is_symmetric, dtype=torch.bfloat16
    )
    tensors = {
        "weight_packed": words(integers, bits),
        "weight_scale": factors,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not is_symmetric:
        tensors["weight_zero_point"] = words(zeros.T.contiguous(), bits).T.contiguous()
    return tensors, numbers(integers, factors, zeros, in_turn(weight.shape[1], size))


def int8(weight: Tensor, *, has_least: bool = True) -> Module:
    """`has_least`: put in -128, which no rounding gives."""
    size = weight.shape[1]
    integers, factors, zeros = rounded(weight, size, 8, is_symmetric=True, dtype=torch.float32)
    if has_least:
        integers[:, 0] = 0
    tensors = {"weight": (integers - 128).to(torch.int8), "weight_scale": factors}
    return tensors, numbers(integers, factors, zeros, in_turn(size, size))


def fp8(weight: Tensor, *, block: tuple[int, int] | None, name: str = "weight_scale") -> Module:
    """`block`: outputs and inputs that share a factor; None: all."""
    outputs, inputs = weight.shape
    high, wide = block or weight.shape
    rows, columns = -(-outputs // high), -(-inputs // wide)
    room = torch.nn.functional.pad(weight, (0, columns * wide - inputs, 0, rows * high - outputs))
    largest = room.view(rows, high, columns, wide).abs().amax((1, 3))
    factors = (largest / 448).float()
    grid = factors.repeat_interleave(high, 0).repeat_interleave(wide, 1)[:outputs, :inputs]
    values = (weight / grid).to(torch.float8_e4m3fn)
    stored = factors if block else factors.reshape(1)
    return {"weight": values, name: stored}, values.double() * grid.double()


def compressed(
    form: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return what config.json says of `weights`, and of what is multiplied by them."""
    kind = "float" if form == "float-quantized" else "int"
    group = {
        "targets": ["Linear"],
        "weights": {"type": kind, "symmetric": True, **weights},
        "input_activations": inputs,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


GPTQ = {"quant_method": "gptq", "bits": 4, "desc_act": False, "sym": True}
FORMATS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Module]]] = {
    "gptq": (GPTQ | {"group_size": 32}, gptq),
    "gptq asymmetric": (
        GPTQ | {"group_size": 32, "sym": False},
        lambda weight: gptq(weight, is_symmetric=False),
    ),
    "gptq v2": (
        GPTQ | {"group_size": 32, "sym": False, "checkpoint_format": "gptq_v2"},
        lambda weight: gptq(weight, is_symmetric=False, zero_offset=0),
    ),
    "gptq 8 bits": (GPTQ | {"group_size": 64, "bits": 8}, lambda w: gptq(w, bits=8, size=64)),
    "gptq one group": (GPTQ | {"group_size": -1}, lambda weight: gptq(weight, size=-1)),
    "gptq in another order": (
        GPTQ | {"group_size": 32, "desc_act": True},
        lambda weight: gptq(weight, order=True),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
        awq,
    ),
    "w4a16": (
        compressed("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
        packed,
    ),
    "w4a16 asymmetric": (
        compressed(
            "pack-quantized",
            {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
        ),
        lambda weight: packed(weight, is_symmetric=False),
    ),
    "w8a16": (
        compressed("pack-quantized", {"num_bits": 8, "strategy": "channel"}),
        lambda weight: packed(weight, bits=8, size=-1),
    ),
    "w8a8": (compressed("int-quantized", {"num_bits": 8, "strategy": "channel"}), int8),
    "w8a8 by token": (
        compressed(
            "int-quantized",
            {"num_bits": 8, "strategy": "channel"},
            {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
        ),
        int8,
    ),
    "fp8 blocks": (
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 48]},
        lambda weight: fp8(weight, block=(32, 48), name="weight_scale_inv"),
    ),
    "fp8 of a tensor": (
        compressed("float-quantized", {"num_bits": 8, "strategy": "tensor"}),
        lambda weight: fp8(weight, block=None),
    ),
    "fp8 of an output": (
        compressed("float-quantized", {"num_bits": 8, "strategy": "channel"}),
        lambda weight: fp8(weight, block=(1, weight.shape[1])),
    ),
}
"""`quantization_config`, and what makes a module's tensors of its weight."""


def is_linear(name: str, tensor: Tensor) -> bool:
    is_left_out = "embed" in name or "lm_head" in name or name.endswith("mlp.gate.weight")
    return tensor.ndim == 2 and name.endswith(".weight") and not is_left_out


def quantise(plain: Path, path: Path, name: str, *, kept: tuple[str, ...] = ()) -> Path:
    """Write the model of a directory in a format of FORMATS; see `quantise_by`."""
    config, make = FORMATS[name]
    return quantise_by(plain, path, config, make, kept=kept)


def quantise_by(
    plain: Path,
    path: Path,
    config: Mapping[str, Any],
    make: Callable[[Tensor], Module],
    *,
    kept: tuple[str, ...] = (),
) -> Path:
    """Write the model of a directory quantised; and in `numbers` within it, what it stands for.

    `kept`: parts of the names of modules that stay plain.
    """
    same = path / "numbers"
    for target in (path, same):
        target.mkdir(parents=True, exist_ok=True)
        for file in plain.iterdir():
            if file.suffix == ".json":
                shutil.copy(file, target / file.name)
    tensors: dict[str, Tensor] = {}
    wide: dict[str, Tensor] = {}
    for full, tensor in load_file(plain / SINGLE_FILE).items():
        if is_linear(full, tensor) and not any(part in full for part in kept):
            module, truth = make(tensor.double())
            tensors |= {f"{full.removesuffix('weight')}{own}": t for own, t in module.items()}
            wide[full] = truth.float()
        else:
            tensors[full] = tensor
            wide[full] = tensor.float()
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path / SINGLE_FILE)
    save_file({key: tensor.contiguous() for key, tensor in wide.items()}, same / SINGLE_FILE)
    described = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(described | {"quantization_config": dict(config)}))
    return path
