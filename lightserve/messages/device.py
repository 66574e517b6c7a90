"""What a worker computes on: told once, shown to operators."""

from __future__ import annotations

import msgspec


class DeviceFacts(msgspec.Struct, frozen=True):
    """A rank's device and what drives it; empty where there is no such thing."""

    kind: str
    """cpu or cuda."""
    name: str
    """Of the processor or the GPU."""
    memory_bytes: int
    """Of the GPU."""
    driver: str
    """Version of the GPU's driver."""
    cuda: str
    """Version of CUDA that torch was built for."""
    torch: str
    triton: str
    kernels: str
    """Name of the kernels in use."""

    @property
    def summary(self) -> str:
        """What step times depend on, in one line."""
        if self.kind == "cpu":
            return self.name
        return (
            f"{self.name} (driver {self.driver}, CUDA {self.cuda}, torch {self.torch},"
            f" Triton {self.triton or 'none'})"
        )
