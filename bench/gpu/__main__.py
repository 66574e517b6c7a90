"""Everything that only a GPU can show, in one table: correctness first, then speed.

    python -m bench.gpu [PART ...] [--out DIR] [--limit-s 570]
    python -m bench.gpu --rehearse        every part on the CPU, with tiny sizes

Each part runs in a process of its own, within a time of its own; one that fails or hangs has its
error in the table and stops no other. Parts that only say right or wrong run beside each other,
before those that are timed. DIR gets report.json, parts.log and the trace of a checkpoint.
Exit status: 0 all targets met, 1 a target missed, 2 a part failed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.gpu.table import Bench, Job, Row, RowFile, exit_status, markdown, run_jobs

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Part:
    """How a part is run."""

    module: str
    """Of this package, with a function of the part's name."""
    limit_s: float
    is_timed: bool = True
    """Whether it is alone on the device."""


PARTS: dict[str, Part] = {
    "kernels": Part("correctness", 200, is_timed=False),
    "self-check": Part("correctness", 180, is_timed=False),
    "parity": Part("correctness", 240, is_timed=False),
    "graphs": Part(
        "whole_model", 120
    ),  # alone: how much memory graphs will take is read off the whole GPU
    "tensor-parallel": Part("correctness", 120, is_timed=False),
    "dead-rank": Part("correctness", 180, is_timed=False),
    "ceilings": Part("device", 60),
    "decode-attention": Part("attention", 90),
    "prefill-attention": Part("attention", 90),
    "packed-products": Part("packed", 60),
    "sampling": Part("correctness", 90),
    "whole-model": Part("whole_model", 150),
    "checkpoints": Part("whole_model", 90),
    "through-http": Part("through_http", 240),
}
"""In the order of the table."""
AT_ONCE = 4
"""Parts beside each other that are not timed."""


def function_of(name: str) -> Callable[[Bench], None]:
    """Return what a part does."""
    module = importlib.import_module(f"bench.gpu.{PARTS[name].module}")
    function: Callable[[Bench], None] = getattr(module, name.replace("-", "_"))
    return function


def run_part(name: str, rows: Path, out: Path, *, rehearse: bool) -> None:
    """Be a part."""

    from bench.gpu.device import this_machine  # noqa: PLC0415 - torch, which the parent lacks

    machine = this_machine(rehearse=rehearse)
    row_file = RowFile(rows, name, is_rehearsal=rehearse)
    print(f"\n## {name}\n", flush=True)
    function_of(name)(Bench(machine, row_file, out, rehearse))


def job_of(name: str, out: Path, *, rehearse: bool) -> Job:
    """Return how a part is started."""
    flags = ["--rehearse"] if rehearse else []
    command = [sys.executable, "-m", "bench.gpu", name, *flags, "--out", str(out), "--rows"]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]  # of servers and ranks
    env = {"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(paths)}
    if rehearse:  # Triton reads it when it is imported.
        env |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return Job(name, command, PARTS[name].limit_s, env, is_timed=PARTS[name].is_timed)


def main() -> int:
    """Run the parts and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default: {' '.join(PARTS)}")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with tiny sizes")
    parser.add_argument("--out", type=Path, default=Path("build/gpu-check"), metavar="DIR")
    parser.add_argument("--limit-s", type=float, default=570.0, help="for all parts together")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = args.parts or list(PARTS)
    if unknown := set(names) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; parts: {', '.join(PARTS)}")
    args.out.mkdir(parents=True, exist_ok=True)
    if args.rows is not None:
        run_part(names[0], args.rows, args.out, rehearse=args.rehearse)
        return 0
    jobs = [job_of(name, args.out, rehearse=args.rehearse) for name in names]
    rows: list[Row] = []
    for found in run_jobs(jobs, args.out, limit_s=args.limit_s, at_once=AT_ONCE):
        rows += found
        (args.out / "report.json").write_text(json.dumps([asdict(row) for row in rows], indent=2))
    print(markdown(rows))
    return exit_status(rows)


if __name__ == "__main__":
    sys.exit(main())
