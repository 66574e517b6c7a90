"""Everything that only a GPU can show, in one table, the parts by their worth.

    python -m bench.gpu [PART ...] [--out DIR] [--limit-s 580]
    python -m bench.gpu --rehearse        every part on the CPU, with tiny sizes

Each part runs in a process of its own, within a time of its own; one that fails or hangs has its
error in the table and stops no other. Parts that only say right or wrong run beside each other.
The rows of a part are printed when it ends, with the seconds that it took; behind the last one
comes a list of what was missed. DIR gets report.json, parts.log, and what parts keep: decision
logs and the profile of step times of `mission`, the trace of `checkpoints`.
Exit status: 0 all targets met, 1 a target missed, 2 a part failed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.gpu.table import (
    HEAD,
    Bench,
    Job,
    Row,
    RowFile,
    exit_status,
    markdown_row,
    run_jobs,
    summary,
)

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Part:
    """How a part is run."""

    module: str
    """Module of this package that has a function of the part's name."""
    limit_s: float
    is_timed: bool = True
    """Whether it is alone on the device."""
    needs_weights: bool = False
    """Whether the part needs the model that `weights` writes, to start servers of it."""


PARTS: dict[str, Part] = {
    "ceilings": Part("device", 30),
    "weights": Part("weights", 60),
    "mission": Part("mission", 190, needs_weights=True),
    "whole-model": Part("whole_model", 90),
    "eight-bits": Part("whole_model", 240),
    "through-http": Part("through_http", 170, needs_weights=True),
    "kernels": Part("correctness", 200, is_timed=False),
    "self-check": Part("correctness", 120, is_timed=False),
    "parity": Part("parity", 120, is_timed=False),
    "tensor-parallel": Part("correctness", 120, is_timed=False),
    "dead-rank": Part("correctness", 180, is_timed=False),
    "decode-attention": Part("attention", 60),
    "prefill-attention": Part("attention", 60),
    "packed-products": Part("packed", 60),
    "sampling": Part("correctness", 60),
    "checkpoints": Part("whole_model", 90),
    "guesses": Part("whole_model", 170),
    "images": Part("whole_model", 90),
}
"""In the order in which they run."""
AT_ONCE = 4
"""Parts beside each other that are not timed."""


MEMORY_DIR = Path("/dev/shm")
SHARED_BYTES = 20e9
"""Room that weights and caches need, with some to spare."""


def make_shared_dir(*, rehearse: bool) -> Path:
    """Make a directory for what parts share: in memory where there is room, else on the disk."""
    has_room = MEMORY_DIR.is_dir() and shutil.disk_usage(MEMORY_DIR).free > SHARED_BYTES
    parent = MEMORY_DIR if has_room and not rehearse else None
    return Path(tempfile.mkdtemp(prefix="gpu-check-", dir=parent))


def function_of(name: str) -> Callable[[Bench], None]:
    """Return what a part does."""
    module = importlib.import_module(f"bench.gpu.{PARTS[name].module}")
    function: Callable[[Bench], None] = getattr(module, name.replace("-", "_"))
    return function


def with_weights(names: Sequence[str]) -> list[str]:
    """Return the parts by their worth, each once, and the writing of weights where one needs it."""
    wanted = set(names)
    if any(PARTS[name].needs_weights for name in wanted):
        wanted.add("weights")
    return [name for name in PARTS if name in wanted]


def run_part(name: str, rows: Path, out: Path, shared: Path, *, rehearse: bool) -> None:
    """Be a part."""

    from bench.gpu.device import this_machine  # noqa: PLC0415 - torch, which the parent lacks

    machine = this_machine(rehearse=rehearse)
    row_file = RowFile(rows, name, is_rehearsal=rehearse)
    print(f"\n## {name}\n", flush=True)
    function_of(name)(Bench(machine, row_file, out, shared, rehearse))


def job_of(name: str, out: Path, shared: Path, *, rehearse: bool) -> Job:
    """Return how a part is started."""
    flags = ["--rehearse"] if rehearse else []
    command = [sys.executable, "-m", "bench.gpu", name, *flags, "--out", str(out)]
    command += ["--shared", str(shared), "--rows"]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]  # of servers and ranks
    env = {"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(paths)}
    # What a server has measured before, perhaps with other code, counts for nothing.
    env["XDG_CACHE_HOME"] = str(shared / "cache")
    if rehearse:  # Triton reads it when it is imported.
        env |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return Job(name, command, PARTS[name].limit_s, env, is_timed=PARTS[name].is_timed)


def main() -> int:
    """Run the parts and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default: {' '.join(PARTS)}")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with tiny sizes")
    parser.add_argument("--out", type=Path, default=Path("build/gpu-check"), metavar="DIR")
    parser.add_argument("--limit-s", type=float, default=580.0, help="for all parts together")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--shared", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = args.parts or list(PARTS)
    if unknown := set(names) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; parts: {', '.join(PARTS)}")
    args.out.mkdir(parents=True, exist_ok=True)
    if args.rows is not None:
        run_part(names[0], args.rows, args.out, args.shared, rehearse=args.rehearse)
        return 0
    # Asked to end, it removes what is shared as well: that may be in memory.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))
    shared = make_shared_dir(rehearse=args.rehearse)
    try:
        rows = _run(with_weights(names), args, shared)
    finally:
        shutil.rmtree(shared, ignore_errors=True)
    print(summary(rows))
    return exit_status(rows)


def _run(names: Sequence[str], args: argparse.Namespace, shared: Path) -> list[Row]:
    jobs = [job_of(name, args.out.resolve(), shared, rehearse=args.rehearse) for name in names]
    rows: list[Row] = []
    print(HEAD, flush=True)
    for found in run_jobs(jobs, args.out, limit_s=args.limit_s, at_once=AT_ONCE):
        rows += found
        print("\n".join(map(markdown_row, found)), flush=True)
        (args.out / "report.json").write_text(json.dumps([asdict(row) for row in rows], indent=2))
    return rows


if __name__ == "__main__":
    sys.exit(main())
