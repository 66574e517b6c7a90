"""Which kernel is fastest for a model's products on this GPU, measured at the start.

As `tuning` has it for attention. Weights are more than caches hold, and are multiplied by in turn,
with all that one kernel does before a product and behind it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from lightserve.kernels.check_pair import LIMITS, relative_error
from lightserve.kernels.triton.configs import gpu_of
from lightserve.kernels.triton.kernels import TritonKernels
from lightserve.kernels.triton.norms import RoundedRows, round_rows
from lightserve.kernels.triton.products import (
    PRODUCT_ROWS,
    ProductChoice,
    ProductChoices,
    ProductConfig,
    ProductKey,
    candidates,
)
from lightserve.kernels.triton.quantized import (
    SCALED_ROWS,
    SCALED_UNIT,
    ScaledKey,
    linear_fp8,
    pack_fp8,
    scaled_product,
)
from lightserve.kernels.triton.tuning import (
    MIN_GAIN,
    Call,
    Choice,
    Kept,
    Timer,
    compile_ahead,
    time_of,
)
from lightserve.kernels.weights import Fp8Weight, KernelShapes, linears_of

log = logging.getLogger(__name__)
K = TypeVar("K", bound=Hashable)

MIN_PRODUCT_BYTES = 128 << 20
MAX_COPIES = 16
"""Weights that are multiplied by in turn, so many or of so many bytes: caches hold no more."""


def sizes_of(shapes: KernelShapes) -> dict[str, tuple[int, int]]:
    """Return (outputs, inputs) of the products whose sizes are those of the model, by name."""
    left_out = {"qkv", "out"} if shapes.value_dim is not None else set()
    return {
        name: sizes
        for name, sizes in linears_of(shapes).items()
        if all(sizes) and name not in left_out
    }


def fastest(
    name: str,
    calls: Mapping[K, Call],
    default: K,
    device: torch.device,
    timer: Timer,
    *,
    num_copies: int,
) -> tuple[K, float, float]:
    """Return the key of the fastest call, `default` in doubt, and the times of both, in us."""
    if device.type == "cuda":
        compile_ahead(list(calls.values()), device, num_threads=torch.get_num_threads())
    timed = {key: time_of(run, timer) for key, run in calls.items()}
    times = {key: 1e6 * time_s / num_copies for key, time_s in timed.items() if time_s is not None}
    for key, time_us in times.items():
        log.debug("%s: %.2f us by %s", name, time_us, key or "cuBLAS")
    best = min(times, key=times.__getitem__)
    if times[best] > (1 - MIN_GAIN) * times[default]:
        best = default
    words = (best or "cuBLAS", times[best], default or "cuBLAS", times[default])
    log.info("%s: %s, %.1f us (%s: %.1f)", name, *words)
    return best, times[best], times[default]


# Products of few rows (see `products`), beside cuBLAS, which a choice without a configuration is.


@dataclass(frozen=True)
class ProductWork:
    """One kind of product that gets a configuration, or none."""

    key: ProductKey
    num_outputs: int
    """Outputs of the weight: gates and ups together."""
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """Its name in the file."""
        key, dtype = self.key, str(self.dtype).removeprefix("torch.")
        kind = ("norm, " if key.has_norm else "") + ("gated " if key.is_gated else "") + "product"
        return f"{kind} {key.num_rows}x{key.num_inputs} to {self.num_outputs} {dtype}"


def product_works(shapes: KernelShapes) -> list[ProductWork]:
    """Return a model's kinds of products; of latents and float32 there are none."""
    if shapes.dtype.itemsize != 2:
        return []
    return [
        ProductWork(
            ProductKey(num_inputs, num_rows, name in {"qkv", "gate_up"}, name == "gate_up"),
            num_outputs,
            shapes.dtype,
        )
        for name, (num_outputs, num_inputs) in sizes_of(shapes).items()
        for num_rows in PRODUCT_ROWS
    ]


def tuned_products(
    shapes: KernelShapes,
    device: torch.device,
    *,
    timer: Timer,
    directory: Path | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> ProductChoices:
    """Return configurations for those of a model's products that are faster with one.

    `advance` is told of each of `product_works(shapes)` when it is done.
    """
    kept = Kept(gpu_of(device), directory)
    found = ProductChoices()
    for work in product_works(shapes):
        measure = partial(choose_product, work, device, timer)
        choice = kept.choice(work.name, _is_product_choice, measure)
        if choice.config:
            found[work.key] = ProductChoice(ProductConfig(**choice.config), work.num_outputs)
        advance(1)
    return found


def _is_product_choice(choice: Choice) -> bool:
    try:
        return not choice.config or bool(ProductConfig(**choice.config))
    except TypeError:
        return False


def choose_product(
    work: ProductWork, device: torch.device, timer: Timer, *, max_copies: int = MAX_COPIES
) -> Choice:
    """Measure a product's candidates beside cuBLAS, which is taken in doubt."""
    key = work.key
    num_bytes = work.num_outputs * key.num_inputs * work.dtype.itemsize
    num_copies = max(1, min(max_copies, MIN_PRODUCT_BYTES // num_bytes))
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=work.dtype)

    weights = normal(num_copies, work.num_outputs, key.num_inputs)
    x, residual = normal(key.num_rows, key.num_inputs), normal(key.num_rows, key.num_inputs)
    norm = normal(key.num_inputs)

    def call(config: ProductConfig | None) -> Call:
        choices = ProductChoices()
        if config is not None:
            choices[key] = ProductChoice(config, work.num_outputs)
        kernels = TritonKernels(products=choices)

        def run() -> None:
            for weight in weights:
                if key.has_norm:
                    kernels.add_norm_linear(
                        x, residual, (norm, 1e-5), weight, None, is_gated=key.is_gated
                    )
                else:
                    kernels.linear(x, weight, None)

        return run

    calls = {config: call(config) for config in (None, *candidates(key, work.dtype))}
    best, time_us, default_us = fastest(
        work.name, calls, None, device, timer, num_copies=num_copies
    )
    config = {} if best is None else asdict(best)
    return Choice(work.name, config, time_us, default_us)


# Products of e4m3 by e4m3 with one factor for a row: torch's beside Triton's, which stands where a
# choice has no configuration.


@dataclass(frozen=True)
class ScaledWork:
    """One kind of product of e4m3 by e4m3."""

    key: ScaledKey

    @property
    def name(self) -> str:
        """Its name in the file."""
        num_inputs, num_outputs, num_rows = self.key
        return f"fp8 product {num_rows}x{num_inputs} to {num_outputs}"


def scaled_works(shapes: KernelShapes) -> list[ScaledWork]:
    """Return the kinds of products that torch may have, too."""
    if shapes.dtype is not torch.bfloat16:
        return []
    sizes = dict.fromkeys(sizes_of(shapes).values())
    return [
        ScaledWork(ScaledKey(num_inputs, num_outputs, num_rows))
        for num_outputs, num_inputs in sizes
        if num_outputs % SCALED_UNIT == 0 and num_inputs % SCALED_UNIT == 0
        for num_rows in SCALED_ROWS
    ]


def tuned_scaled(
    shapes: KernelShapes,
    device: torch.device,
    *,
    timer: Timer,
    directory: Path | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> frozenset[ScaledKey]:
    """Return the products that torch computes faster than Triton, and as well.

    `advance` is told of each of `scaled_works(shapes)` when it is done.
    """
    kept = Kept(gpu_of(device), directory)
    found = set()
    for work in scaled_works(shapes):
        measure = partial(choose_scaled, work, device, timer)
        choice = kept.choice(work.name, lambda own: own.config in ({}, IS_SCALED), measure)
        if choice.config and ScaledScene(work.key, device, 1).agrees():
            found.add(work.key)
        advance(1)
    return frozenset(found)


IS_SCALED = {"is_scaled": 1}
"""Configuration of a choice that is torch's."""


class ScaledScene:
    """Rows and weights of e4m3 on the device."""

    def __init__(self, key: ScaledKey, device: torch.device, num_copies: int) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def normal(num_rows: int) -> Tensor:
            size, dtype = (num_rows, key.num_inputs), torch.bfloat16
            return torch.randn(size, generator=generator, device=device, dtype=dtype)

        self._weights: list[Fp8Weight] = []
        for _ in range(num_copies):
            values = normal(key.num_outputs).to(torch.float8_e4m3fn)
            factors = torch.rand(len(values), 1, generator=generator, device=device) + 0.5
            weight = pack_fp8(values, factors, group_size=key.num_inputs)
            self._weights.append(weight._replace(rounds_rows=True))
        self._rows: RoundedRows = round_rows(normal(key.num_rows), 0)

    def multiply(self, *, is_scaled: bool) -> None:
        """Multiply by each of the weights."""
        for weight in self._weights:
            if is_scaled:
                scaled_product(self._rows, weight, None)
            else:
                linear_fp8(self._rows, weight, None)

    def agrees(self) -> bool:
        """Return whether torch multiplies on this device, and gives the products of Triton.

        With a bias, and of rows of an uneven number, as steps have them.
        """
        weight, (values, factors, group, dtype) = self._weights[0], self._rows
        bias = torch.ones(len(weight.packed), dtype=dtype, device=values.device)
        rows = RoundedRows(values[:-3], factors[:, :-3].contiguous(), group, dtype)
        try:
            found = scaled_product(rows, weight, bias)
        except (RuntimeError, ValueError, TypeError) as error:  # none for this GPU, this CUDA
            log.debug("torch has no product of e4m3 here: %s", error)
            return False
        off_by = relative_error(found, linear_fp8(rows, weight, bias))
        if not off_by <= LIMITS[torch.bfloat16]:
            log.warning("torch's product of e4m3 is not used: its relative error is %.2g", off_by)
            return False
        return True


def choose_scaled(
    work: ScaledWork, device: torch.device, timer: Timer, *, max_copies: int = MAX_COPIES
) -> Choice:
    """Measure torch's product beside Triton's, which is taken in doubt."""
    num_bytes = work.key.num_outputs * work.key.num_inputs
    num_copies = max(1, min(max_copies, MIN_PRODUCT_BYTES // num_bytes))
    scene = ScaledScene(work.key, device, num_copies)
    calls = {"Triton": partial(scene.multiply, is_scaled=False)}
    if scene.agrees():
        calls["torch"] = partial(scene.multiply, is_scaled=True)
    best, time_us, default_us = fastest(
        work.name, calls, "Triton", device, timer, num_copies=num_copies
    )
    return Choice(work.name, IS_SCALED if best == "torch" else {}, time_us, default_us)
