"""Where a worker computes, and how host data gets there."""

from __future__ import annotations

import torch
from torch import Tensor

from lightserve.errors import ConfigError


def resolve_device(name: str, rank: int) -> torch.device:
    """Return the device of a rank for --device auto, cpu or cuda.

    Raises:
        ConfigError: cuda without a GPU for every rank up to this one.
    """
    if name == "cpu":
        return torch.device("cpu")
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto" and num_devices == 0:
        return torch.device("cpu")
    if rank >= num_devices:
        raise ConfigError(f"--device {name}: rank {rank} needs a GPU, found {num_devices}")
    return torch.device("cuda", rank)


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Return a host tensor on `device`, itself on the CPU; does not wait for the copy."""
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)
