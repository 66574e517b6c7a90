"""Chooses the kernels of a worker."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightserve.errors import ConfigError
from lightserve.kernels.cpu.core import CoreMissingError, load_core
from lightserve.kernels.cpu.default import TorchKernels
from lightserve.kernels.cpu.invariant import InvariantKernels
from lightserve.kernels.cpu.native import InvariantNativeKernels, NativeKernels
from lightserve.kernels.interface import Kernels
from lightserve.kernels.reference import ReferenceKernels
from lightserve.kernels.triton import NEWEST_TRITON, OLDEST_TRITON
from lightserve.kernels.weights import KernelShapes
from lightserve.progress import progress

log = logging.getLogger(__name__)

# Fits kernels to the GPU before it serves: `--kernel-tuning`.


@torch.inference_mode()
def tune_kernels(
    kernels: Kernels,
    shapes: Sequence[KernelShapes],
    device: torch.device,
    *,
    mode: str,
    is_shown: bool,
    has_fp8_rows: bool = False,
) -> None:
    """Give Triton's kernels on a GPU their measured configurations; others need none.

    The first start with a shape takes some seconds per kind of work; later ones read a file.

    Args:
        kernels: get the configurations.
        shapes: of each size of heads.
        device: where they compute.
        mode: --kernel-tuning: auto or off.
        is_shown: whether progress is.
        has_fp8_rows: see `LinearMethod`.
    """
    if mode == "off" or device.type != "cuda" or kernels.name != "triton":
        return
    # Optional and slow to import: only where it is used.
    from lightserve.kernels.triton.kernels import TritonKernels  # noqa: PLC0415
    from lightserve.kernels.triton.product_tuning import (  # noqa: PLC0415
        product_works,
        scaled_works,
        tuned_products,
        tuned_scaled,
    )
    from lightserve.kernels.triton.tuning import cuda_timer, tuned_configs, works  # noqa: PLC0415

    assert isinstance(kernels, TritonKernels)
    num_works = 0
    for own in shapes:
        num_works += len(works(own)) + len(product_works(own))
        num_works += len(scaled_works(own)) if has_fp8_rows else 0
    with progress("tuning kernels", num_works, is_shown=is_shown) as advance:
        options: Any = {"timer": cuda_timer, "advance": advance}
        for own in shapes:
            kernels.configs = tuned_configs(own, device, base=kernels.configs, **options)
            kernels.products.update(tuned_products(own, device, **options))
            if has_fp8_rows:
                kernels.scaled |= tuned_scaled(own, device, **options)
    torch.cuda.empty_cache()


def make_kernels(
    name: str, *, batch_invariant: bool, device: torch.device | None = None
) -> Kernels:
    """Return the kernels for `--attention-backend` (auto, triton, torch or reference).

    Args:
        name: auto is triton on a GPU; on the CPU native, or torch where there is no native core.
        batch_invariant: `ServeConfig` has checked that the rest goes with it.
        device: where they will compute, default the CPU.

    Raises:
        ConfigError: a combination that does not exist on this machine.
    """
    is_cuda = device is not None and device.type == "cuda"
    if (is_cuda or name == "triton") and importlib.util.find_spec("triton") is None:
        raise ConfigError(
            "a GPU needs the package triton (the extra gpu), whatever the --attention-backend:"
            " tokens are drawn by its kernels"
            if is_cuda
            else "--attention-backend triton needs the package triton (the extra gpu)"
        )
    if is_cuda:
        _check_triton()
    kind = kernel_name(name, batch_invariant=batch_invariant, device=device)
    if is_cuda and kind == InvariantKernels.name:
        raise ConfigError("--batch-invariant needs the CPU: --device cpu")
    if is_cuda and kind == TorchKernels.name:
        raise ConfigError(
            "--attention-backend must be auto, triton or reference on a GPU, got 'torch':"
            " torch's kernels need --device cpu"
        )
    return _KINDS[kind]() if kind in _KINDS else _triton_kernels(is_cuda=is_cuda)


_KINDS: dict[str, Callable[[], Kernels]] = {
    kind.name: kind
    for kind in (
        ReferenceKernels,
        TorchKernels,
        InvariantKernels,
        NativeKernels,
        InvariantNativeKernels,
    )
}
"""All but Triton's, which are an optional dependency."""


def kernel_name(name: str, *, batch_invariant: bool, device: torch.device | None) -> str:
    """Return the name of the kernels that `make_kernels` returns."""
    is_cuda = device is not None and device.type == "cuda"
    if batch_invariant:
        is_native = name == "auto" and not is_cuda and not missing_core()
        return InvariantNativeKernels.name if is_native else InvariantKernels.name
    if name != "auto":
        return name
    if is_cuda:
        return "triton"
    return TorchKernels.name if missing_core() else NativeKernels.name


def missing_core() -> str:
    """Return why the CPU's native kernels cannot be used; empty if they can."""
    try:
        load_core()
    except CoreMissingError as reason:
        return str(reason)
    return ""


def _check_triton() -> None:
    """Check the version that a build of torch for GPUs has brought.

    Newer ones are tried: the check of the start says whether their kernels are right. Launches go
    Triton's own way there, see `kernels.triton.launch`.
    """
    # Optional and slow to import: only where it is used.
    from triton import __version__  # noqa: PLC0415

    major, minor, *_ = __version__.split(".")
    newest = ".".join(map(str, NEWEST_TRITON))
    if (int(major), int(minor)) < OLDEST_TRITON:
        oldest = ".".join(map(str, OLDEST_TRITON))
        raise ConfigError(f"a GPU needs triton {oldest} or newer, got {__version__}")
    if (int(major), int(minor)) > NEWEST_TRITON:
        log.warning("triton %s is untried: the newest that was tried is %s", __version__, newest)


def _triton_kernels(*, is_cuda: bool) -> Kernels:
    if not is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(
            "--attention-backend triton needs a GPU, or TRITON_INTERPRET=1 to try its kernels"
        )
    # An optional dependency, and slow to import: only where it is used.
    from lightserve.kernels.triton.kernels import TritonKernels  # noqa: PLC0415

    return TritonKernels()
