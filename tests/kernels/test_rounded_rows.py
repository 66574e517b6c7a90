"""Rows of 8 bits: rounded by what makes them as by a kernel of its own, and multiplied as well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from support.kernel_grid import LIMITS, SMALL_SHAPES, Poisoned, relative_error
from support.model_runs import load_tiny
from support.parity import TokenSequence, schedule
from support.quantised_files import quantise
from support.tiny_models import find_tiny_model, write_tiny_model
from torch import Tensor

from lightserve.kernels.interface import Can, Kernels
from lightserve.kernels.triton import norms, product_tuning, quantized
from lightserve.kernels.triton.kernels import TritonKernels
from lightserve.kernels.triton.norms import RoundedRows, round_rows
from lightserve.kernels.triton.product_tuning import ScaledScene, tuned_scaled
from lightserve.kernels.triton.quantized import ScaledKey, scaled_key
from lightserve.kernels.weights import Fp8Block, Fp8Weight, Weight
from lightserve.models.layers.linear import LinearMethod
from lightserve.models.layers.quantized import Fp8Method, StoredMethod

CPU = torch.device("cpu")
KERNELS = TritonKernels()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_same(found: RoundedRows, truth: RoundedRows) -> None:
    """Compare bits; a factor that is no number is one, whatever its bits."""
    assert (found.group, found.dtype) == (truth.group, truth.dtype)
    torch.testing.assert_close(found.factors, truth.factors, rtol=0, atol=0, equal_nan=True)
    size = truth.group or truth.values.shape[1]
    is_number = truth.factors.T.repeat_interleave(size, dim=1)[:, : truth.values.shape[1]]
    is_good = is_number.isfinite()
    assert torch.equal(found.values[is_good], truth.values[is_good])
    assert len(found.values) < 2 or is_good.any()


def with_borders(x: Tensor) -> Tensor:
    """Make rows of all sizes, one of zeros, one with zeros in a group, and two without an end."""
    x = x * torch.logspace(-3, 3, len(x))[:, None]
    if len(x) > 5:
        x[1], x[2, :64], x[3, 5], x[4, -1] = 0.0, 0.0, torch.nan, torch.inf
    return x


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # infinity times 0
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(
    ("rows", "width", "group"),
    [(1, 96, 0), (17, 96, 64), (7, 320, 128), (7, 1100, 0), (3, 1100, 128)],
)
def test_norms_and_gates_round_as_a_kernel_of_its_own(
    rows: int, width: int, group: int, dtype: torch.dtype
) -> None:
    """To the bit: rows that share a program, groups that are short, numbers that are none."""
    x, residual = with_borders(normal(rows, width)).to(dtype), normal(rows, width, seed=1).to(dtype)
    residual[1:2] = 0.0
    weight, ours = normal(width, seed=2).to(dtype), residual.clone()
    own, theirs = norms.add_rms_norm(x, residual.clone(), weight, 1e-5)
    with Poisoned():
        found, kept = norms.add_rms_norm_rounded(x, ours, weight, 1e-5, group)
    assert kept is ours
    torch.testing.assert_close(kept, theirs, rtol=0, atol=0, equal_nan=True)
    assert_same(found, round_rows(own, group))
    gate_up = torch.cat([normal(rows, width, seed=3), with_borders(normal(rows, width))], 1)
    gate_up = gate_up.to(dtype)
    with Poisoned():
        found = norms.silu_and_mul_rounded(gate_up, group)
    assert_same(found, round_rows(norms.silu_and_mul(gate_up), group))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # infinity times 0
@pytest.mark.parametrize("group", [0, 64])
def test_wide_rows_are_rounded_apart(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one kernel for both would have more numbers than registers: the bits are the same."""
    x, weight = normal(3, 200), normal(200, seed=2)
    fused = [
        norms.add_rms_norm_rounded(x, x.clone(), weight, 1e-5, group)[0],
        norms.silu_and_mul_rounded(normal(3, 400), group),
    ]
    monkeypatch.setattr(norms, "MOST_ROUNDED", 64)
    with patch.object(norms, "round_rows", side_effect=round_rows) as rounded:
        rows, kept = norms.add_rms_norm_rounded(x, x.clone(), weight, 1e-5, group)
        assert_same(rows, fused[0])
        assert torch.equal(kept, x + x)
        assert_same(norms.silu_and_mul_rounded(normal(3, 400), group), fused[1])
    for own in (with_borders(normal(9, 200)), normal(2, 129)):
        wide = round_rows(own, group)
        monkeypatch.undo()
        assert_same(wide, round_rows(own, group))
        monkeypatch.setattr(norms, "MOST_ROUNDED", 64)
    assert rounded.call_count == (2 if group == 0 else 1), (
        "gates of groups have blocks of their own"
    )


def fp8(outputs: int, inputs: int, group: int, *, is_gated: bool = False) -> Fp8Weight:
    values = normal(outputs, inputs, seed=outputs).to(torch.float8_e4m3fn)
    factors = torch.rand(outputs, -(-inputs // group)) / inputs**0.5
    packed = KERNELS.pack_fp8(values, factors, group_size=group, is_gated=is_gated)
    return packed._replace(rounds_rows=True)


@pytest.mark.parametrize(("first", "second"), [(64, 128), (128, 1000), (1000, 1000)])
def test_a_block_behind_a_norm_is_its_parts(first: int, second: int) -> None:
    """The weights of a block may have groups of different sizes, and biases."""
    weights = fp8(2 * 160, 192, first, is_gated=True), fp8(192, 160, second)
    pairs = (weights[0], normal(320)), (weights[1], normal(192))
    block = Fp8Block(*pairs[0], weights[1]), pairs[1][1]
    x, residual, norm = normal(5, 192), normal(5, 192, seed=1), normal(192, seed=2)
    rows, total = KERNELS.add_rms_norm(x, residual.clone(), norm, 1e-5)
    gated = KERNELS.linear(rows, *pairs[0])
    truth, kept = KERNELS.linear(gated, *pairs[1]), residual.clone()
    found, kept = KERNELS.add_norm_linear(x, kept, (norm, 1e-5), *block, is_gated=False)
    assert torch.equal(found, truth) and torch.equal(kept, total)
    assert torch.equal(KERNELS.linear(rows, *block), truth)
    found, kept = KERNELS.add_norm_linear(
        x, residual.clone(), (norm, 1e-5), *pairs[0], is_gated=True
    )
    assert torch.equal(found, gated) and torch.equal(kept, total)


def test_rows_are_for_weights_of_their_groups() -> None:
    rows = round_rows(normal(2, 192), 64)
    for weight in (fp8(32, 192, 128), fp8(32, 192, 64)._replace(rounds_rows=False)):
        with pytest.raises(AssertionError, match="rounded for this weight"):
            quantized.linear_fp8(rows, weight, None)


def run(path: Path, method: LinearMethod, kernels: Kernels) -> Tensor:
    loaded = load_tiny(path, torch.float32, kernels, method=method)
    results = loaded.run(
        [TokenSequence(torch.arange(7, 27), torch.empty(0))],
        schedule([20], chunk=16, num_decodes=2),
    )
    assert results is not None
    return results[0]


class Apart(TritonKernels):
    """Kernels whose norms and gates give numbers of the model's type."""

    add_norm_linear = Kernels.add_norm_linear

    def linear(
        self, x: Tensor, weight: Weight, bias: Tensor | None, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return the product of parts."""
        if isinstance(weight, Fp8Block):
            features = super().linear(x, weight.first, weight.first_bias)
            return super().linear(features, weight.second, bias)
        return super().linear(x, weight, bias, dtype=dtype)


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_model_is_the_same_by_fewer_launches(is_stored: bool, tmp_path: Path) -> None:
    path = write_tiny_model(find_tiny_model("qwen2"), tmp_path / "plain")
    if is_stored:
        path = quantise(path, tmp_path / "packed", "fp8 of an output")
    found, calls = [], []
    for kernels in (TritonKernels(), Apart()):
        kernels.can |= Can.FP8_PRODUCTS
        method = StoredMethod(kernels) if is_stored else Fp8Method(kernels)
        with patch.object(quantized, "round_rows", side_effect=round_rows) as rounded:
            found.append(run(path, method, kernels))
        assert method.has_fp8_rows
        calls.append(rounded.call_count)
    assert torch.equal(*found)
    assert calls[0] < calls[1] / 2, "fewer rows are rounded by a kernel of its own"


# torch's products beside Triton's.


def test_torch_multiplies_what_triton_does() -> None:
    """In units that cancel out on GPUs; in the interpreter both sides are 256 times as large."""
    weight, x = fp8(32, 96, 96), normal(5, 96).bfloat16()
    for bias in (None, normal(32).bfloat16()):
        rows = round_rows(x, 0)
        own = rows._replace(factors=rows.factors / 2**16)
        found = quantized.scaled_product(own, weight, bias)
        truth = quantized.linear_fp8(rows, weight, bias)
        assert found.dtype is torch.bfloat16 and relative_error(found, truth) < 1e-2


def test_which_products_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of chosen sizes in bfloat16, for up to so many rows; never an empty one."""
    assert [scaled_key(rows, 96, 32).num_rows for rows in (1, 16, 17, 2048, 5000)] == [
        16, 16, 64, 2048, 2048,
    ]  # fmt: skip
    kernels, asked = TritonKernels(), []
    kernels.scaled = frozenset({ScaledKey(96, 32, 16)})

    def scaled(rows: RoundedRows, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
        asked.append(len(rows.values))
        return torch.zeros(len(rows.values), len(weight.packed))

    monkeypatch.setattr(quantized, "scaled_product", scaled)
    weight = fp8(32, 96, 96)
    for rows in (0, 1, 16, 17):
        kernels.linear(normal(rows, 96).bfloat16(), weight, None)
        kernels.linear(normal(rows, 96), weight, None)
    kernels.linear(normal(1, 96).bfloat16(), fp8(32, 96, 64), None)
    kernels.linear(normal(1, 96).bfloat16(), fp8(48, 96, 96), None)
    kernels.linear(normal(1, 96).bfloat16(), weight._replace(rounds_rows=False), None)
    assert asked == [1, 16]


def scene_time(seconds: dict[bool, float]) -> tuple[Callable, list[bool]]:
    """Return a timer that does not run what it times, and what it timed."""
    timed: list[bool] = []

    def timer(call: Callable) -> float:
        timed.append(call.keywords["is_scaled"])
        return seconds[timed[-1]]

    return timer, timed


def test_a_start_takes_the_faster_product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = replace(SMALL_SHAPES, dtype=torch.bfloat16, num_heads=3, num_kv_heads=1, head_dim=8)
    shapes = replace(shapes, hidden_size=32, intermediate_size=48)
    monkeypatch.setattr(product_tuning, "SCALED_ROWS", (4, 8))
    keys = {work.key for work in product_tuning.scaled_works(shapes)}
    assert keys and all(key.num_inputs % 16 == key.num_outputs % 16 == 0 for key in keys)
    assert not {key for key in keys if key.num_inputs == 24}, "three heads of 8 are no multiple"
    assert {key.num_rows for key in keys} == {4, 8}
    assert not product_tuning.scaled_works(replace(shapes, dtype=torch.float16))
    agrees = {"now": True}
    monkeypatch.setattr(ScaledScene, "agrees", lambda self: agrees["now"])
    for number, (torch_s, is_torchs) in enumerate([(0.5, True), (0.99, False), (2.0, False)]):
        directory, done = tmp_path / str(number), []
        timer, timed = scene_time({False: 1.0, True: torch_s})
        options = {"timer": timer, "directory": directory}
        found = tuned_scaled(shapes, CPU, advance=done.append, **options)  # type: ignore[arg-type]
        assert found == (keys if is_torchs else set()) and len(timed) == 2 * len(keys)
        assert sum(done) == len(keys)
        assert tuned_scaled(shapes, CPU, **options) == found and len(timed) == 2 * len(keys)  # type: ignore[arg-type]
    agrees["now"] = False
    timer, timed = scene_time({False: 1.0, True: 0.1})
    kept = tuned_scaled(shapes, CPU, timer=timer, directory=tmp_path / "0")
    assert not kept and not timed, "what a file says is tried before it is used"
    assert not tuned_scaled(shapes, CPU, timer=timer, directory=tmp_path / "none")
    assert set(timed) == {False}


@pytest.mark.parametrize("error", [RuntimeError("needs sm_89"), ValueError("no such scales"), None])
def test_a_product_that_torch_has_not(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails, or gives something else, as in the interpreter's unit."""

    def fail(*args: object, **options: object) -> Tensor:
        assert error is not None
        raise error

    if error is not None:
        monkeypatch.setattr(torch, "_scaled_mm", fail)
    assert not ScaledScene(ScaledKey(96, 32, 16), CPU, 1).agrees()
    exact = product_tuning.scaled_product

    def right(rows: RoundedRows, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
        return exact(rows._replace(factors=rows.factors / 2**16), weight, bias)

    if error is None:
        monkeypatch.setattr(product_tuning, "scaled_product", right)
        assert ScaledScene(ScaledKey(96, 32, 16), CPU, 1).agrees()
