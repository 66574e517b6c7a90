"""Chooses the kernels of a worker."""

from __future__ import annotations

from lightserve.errors import ConfigError
from lightserve.kernels.cpu.default import TorchKernels
from lightserve.kernels.cpu.invariant import InvariantKernels
from lightserve.kernels.interface import Kernels
from lightserve.kernels.reference import ReferenceKernels


def make_kernels(name: str, *, batch_invariant: bool) -> Kernels:
    """Return the kernels for `--attention-backend` (auto, torch or reference).

    Raises:
        ConfigError: a combination that does not exist.
    """
    if name == "reference":
        if batch_invariant:
            raise ConfigError("--batch-invariant needs --attention-backend torch or auto")
        return ReferenceKernels()
    return InvariantKernels() if batch_invariant else TorchKernels()
