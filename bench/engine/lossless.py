"""A check that pauses, copies and aborts change no answer: `python -m bench.engine.lossless`.

Random schedules of the real core run over a real runner of a small random model, in virtual time.
All tokens are compared with those of each request run alone (`--batch-invariant`, float32), and all
KV that is read with what was computed; rows may draft as well. Exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path

import torch
from support.lossless import Catalogue, Tally, make_runner, make_schedule

SCHEDULES_PER_CATALOGUE = 25


def run_part(numbers: range, max_drafts: int) -> Tally:
    """Run schedules over requests of their own."""
    torch.set_num_threads(1)
    tally = Tally()
    with tempfile.TemporaryDirectory() as directory:
        catalogue = Catalogue(make_runner(Path(directory)), numbers[0])
    catalogue.script_drafts(0.7)
    for number in numbers:
        tally.add(catalogue.run(replace(make_schedule(number), max_drafts=max_drafts)))
    return tally


def main() -> None:
    """Run the schedules and print what they contained."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=900.0, help="begin nothing after these")
    parser.add_argument("--max-drafts", type=int, default=0, help="of a row; 0.7 of them are right")
    options = parser.parse_args()
    start_s, total, numbers = time.monotonic(), Tally(), range(options.schedules)
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        parts = [
            pool.submit(run_part, numbers[first:][:SCHEDULES_PER_CATALOGUE], options.max_drafts)
            for first in range(0, options.schedules, SCHEDULES_PER_CATALOGUE)
        ]
        for part in as_completed(parts):
            if part.cancelled():
                continue
            total.add(part.result())
            elapsed_s = time.monotonic() - start_s
            done = f"{total.num_schedules} schedules, {total.num_different} different"
            print(f"{elapsed_s:.0f} s: {done}", file=sys.stderr)
            if elapsed_s > options.seconds:
                for other in parts:
                    other.cancel()
    for name, value in (asdict(total) | asdict(total.seen)).items():
        if name != "seen":
            print(f"{name:24} {value:,}")
    print(f"{'seconds':24} {time.monotonic() - start_s:.0f}")
    sys.exit(total.num_different > 0)


if __name__ == "__main__":
    main()
