"""Fits kernels to the GPU before it serves: `--kernel-tuning`."""

from __future__ import annotations

import torch

from lightserve.kernels.interface import Kernels
from lightserve.kernels.shapes import KernelShapes
from lightserve.progress import progress


@torch.inference_mode()
def tune_kernels(
    kernels: Kernels, shapes: KernelShapes, device: torch.device, *, mode: str, is_shown: bool
) -> None:
    """Give Triton's kernels on a GPU their measured configurations; others need none.

    The first start with a shape takes some seconds per kind of work; later ones read a file.
    `mode` is --kernel-tuning: auto or off.
    """
    if mode == "off" or device.type != "cuda" or kernels.name != "triton":
        return
    # Optional and slow to import: only where they are used.
    from lightserve.kernels.triton.kernels import TritonKernels  # noqa: PLC0415
    from lightserve.kernels.triton.tuning import (  # noqa: PLC0415
        cuda_timer,
        tuned_configs,
        works,
    )

    assert isinstance(kernels, TritonKernels)
    with progress("tuning kernels", len(works(shapes)), is_shown=is_shown) as advance:
        kernels.configs = tuned_configs(shapes, device, timer=cuda_timer, advance=advance)
    torch.cuda.empty_cache()
