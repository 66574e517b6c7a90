"""Chooses the kernels of a worker."""

from __future__ import annotations

import importlib.util
import os

import torch

from lightserve.errors import ConfigError
from lightserve.kernels.cpu.default import TorchKernels
from lightserve.kernels.cpu.invariant import InvariantKernels
from lightserve.kernels.interface import Kernels
from lightserve.kernels.reference import ReferenceKernels


def make_kernels(name: str, *, batch_invariant: bool) -> Kernels:
    """Return the kernels for `--attention-backend` (auto, torch, triton or reference).

    Raises:
        ConfigError: a combination that does not exist, or not on this machine.
    """
    if name in ("reference", "triton") and batch_invariant:
        raise ConfigError("--batch-invariant needs --attention-backend torch or auto")
    if name == "reference":
        return ReferenceKernels()
    if name == "triton":
        return _triton_kernels()
    return InvariantKernels() if batch_invariant else TorchKernels()


def _triton_kernels() -> Kernels:
    if importlib.util.find_spec("triton") is None:
        raise ConfigError("--attention-backend triton needs the package triton (the extra gpu)")
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(
            "--attention-backend triton needs a GPU, or TRITON_INTERPRET=1 to try its kernels"
        )
    # An optional dependency, and slow to import: only where it is used.
    from lightserve.kernels.triton.kernels import TritonKernels  # noqa: PLC0415

    return TritonKernels()
