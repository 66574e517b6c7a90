"""What a part is given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.gpu.machine import Machine
from bench.gpu.report import RowFile


@dataclass(frozen=True)
class Bench:
    """The machine, where rows go, and where files may go."""

    machine: Machine
    rows: RowFile
    out: Path
    rehearse: bool
    """Tiny sizes, on the CPU."""
