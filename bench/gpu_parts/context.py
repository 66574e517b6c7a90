"""What a part is given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpu_parts.machine import Machine
from gpu_parts.report import RowFile


@dataclass(frozen=True)
class Bench:
    """The machine, where rows go, and where files may go."""

    machine: Machine
    rows: RowFile
    out: Path
    rehearse: bool
    """Tiny sizes, on the CPU."""
