"""What this rank computes on, for people and for the key of its profile."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from pathlib import Path

import torch

from lightserve.config import ServeConfig
from lightserve.kernels.select import kernel_name
from lightserve.messages.device import DeviceFacts

CPU_INFO = Path("/proc/cpuinfo")
DRIVER_INFO = Path("/proc/driver/nvidia/version")


def facts_of(config: ServeConfig, device: torch.device) -> DeviceFacts:
    """Return the facts of a rank's device and of the kernels that a configuration takes there."""
    kernels = kernel_name(
        config.attention_backend, batch_invariant=config.batch_invariant, device=device
    )
    if device.type == "cpu":
        return DeviceFacts("cpu", _cpu_name(), 0, "", "", str(torch.__version__), "", kernels)
    properties = torch.cuda.get_device_properties(device)
    return DeviceFacts(
        kind=device.type,
        name=properties.name,
        memory_bytes=properties.total_memory,
        driver=_driver_version(),
        cuda=torch.version.cuda or "",
        torch=str(torch.__version__),
        triton=_triton_version(),
        kernels=kernels,
    )


def _cpu_name() -> str:
    """Return the name of the processor, as well as the system knows it."""
    try:
        found = re.search(r"^model name\s*: (.*)$", CPU_INFO.read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else f"cpu {platform.machine()}"


def _driver_version() -> str:
    """Return the driver's version, such as 580.159.04; "unknown" where the system does not say."""
    try:
        found = re.search(r"Kernel Module(?: +for \S+)? +(\d+(?:\.\d+)+)", DRIVER_INFO.read_text())
    except OSError:
        found = None
    return found[1] if found else "unknown"


def _triton_version() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ""
