"""What a server computes for lines whose lease it has lost: `python -m bench.faults.lost_leases`.

Two servers of the bundled model share a PostgreSQL store, both with lines in flight. One of them is
stopped, all its processes, until 2 s after the end of its lease, when the other has its lines; or
it is cut off from the store alone while its lines go on, beyond the end of its lease. Its decision
log says what its engine has computed for them since it went on, or since that end.

*Told*: the router has heard that a line is given up. *Left*: tokens that they had to come. Targets:
at most two steps of a line after that, and 2 s; lost 0, doubled 0.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import closing
from pathlib import Path

from support.lost_leases import cut_off, stopped
from support.postgres import PostgresServer

from bench.table import print_head, print_row


def main() -> None:
    """Print a row for each run; exit code 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    is_missed = False
    with (
        closing(PostgresServer(is_durable=True)) as postgres,
        tempfile.TemporaryDirectory(prefix="ls-bench-") as directory,
    ):
        print_head("server", "lines", "steps since", "of a line after told", "tokens", "left", "s")
        for number in range(arguments.repeats):
            loss, report = stopped(Path(directory), postgres, f"stopped{number}")
            cut = cut_off(Path(directory), postgres, f"cut{number}")
            print(f"lost {report.num_lost}, doubled {report.num_doubled}")
            is_missed |= report.num_lost + report.num_doubled > 0
            for how, each in (("stopped", loss), ("cut off", cut)):
                print_row(
                    *(how, each.num_told, each.num_steps, each.num_steps_after, each.num_tokens),
                    *(each.num_left, f"{each.seconds:.3f}"),
                )
                is_missed |= not each.num_told or each.num_steps_after > 2 or each.seconds > 2.0
    if is_missed:
        sys.exit(1)


if __name__ == "__main__":
    main()
