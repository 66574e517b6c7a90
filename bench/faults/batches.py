"""A batch whose servers are killed again and again: is each line answered once, and as without?

python -m bench.faults.batches [--store sqlite|postgresql] [--objects] [--lines 2000] [--kills 200]
    [--seed 1] [--json]

The bundled model under --batch-invariant, sampled with seeds. First the lines are answered without
faults, then with a kill -9 after every so many results: of the batches process, the router, the
worker, the frontend, the supervisor (whose children end by themselves), or of all at once, by
chance. What has ended is started again, as a service manager does. With PostgreSQL two servers
share the store, it ends itself as in a crash (`pg_ctl stop -m immediate`) after every 20 kills, and
after every 50 all processes of one server are stopped until 2 s after the end of their lease.
With --objects the bytes of files are in an object store, which speaks S3's protocol.

*Begun again* counts leases of lines beyond their first. *Computed twice* is the share of all
tokens, prompts included, if each line had been computed to its end each time: it is at most that.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path

from support.faulted_batch import DATABASE, PROCESSES, STOP, Report, Servers
from support.object_store import BUCKET, fake_s3
from support.postgres import PostgresServer

from bench.table import print_head, print_row

WEIGHTS = (5, 3, 3, 2, 3, 4)
"""Of PROCESSES."""


def faults(num_kills: int, *, is_shared: bool, seed: int) -> Iterator[str]:
    """Yield what happens, in this order."""
    chance = random.Random(seed)
    for number in range(1, num_kills + 1):
        yield chance.choices(PROCESSES, WEIGHTS)[0]
        if is_shared and number % 20 == 0:
            yield DATABASE
        if is_shared and number % 50 == 0:
            yield STOP


def run(
    store: str, num_lines: int, num_kills: int, seed: int, *, has_objects: bool
) -> tuple[Report, Report]:
    """Return the reports of the run without faults and of the one with them."""
    is_shared = store == "postgresql"
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="ls-bench-"))
        location, postgres = f"{directory}/store", None
        if is_shared:
            postgres = stack.enter_context(closing(PostgresServer(is_durable=True)))
            location = postgres.database("store")
        s3 = stack.enter_context(fake_s3()) if has_objects else None
        servers = stack.enter_context(
            Servers(
                *(Path(directory), location),
                num_servers=1 + is_shared,
                postgres=postgres,
                file_store="" if s3 is None else f"s3://{BUCKET}/files",
                environment={} if s3 is None else s3.environment,
                seed=seed,
            )
        )
        whole, plain = servers.run(num_lines)
        found, report = servers.run(
            num_lines, list(faults(num_kills, is_shared=is_shared, seed=seed))
        )
    report.num_changed = sum(found.get(name) != answer for name, answer in whole.items())
    return plain, report


def main() -> None:
    """Print a row for each run; exit code 1 if anything was lost, doubled or changed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--store", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--objects", action="store_true")
    parser.add_argument("--lines", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sizes = (arguments.lines, arguments.kills, arguments.seed)
    reports = run(arguments.store, *sizes, has_objects=arguments.objects)
    if arguments.json:
        print(json.dumps([asdict(report) for report in reports], indent=2))
    else:
        columns = ("lines", "faults", "lost", "doubled", "errors", "changed")
        print_head(*columns, "begun again", "computed twice", "seconds")
        for report in reports:
            counts = (report.num_lost, report.num_doubled, report.num_errors, report.num_changed)
            print_row(
                *(report.num_lines, sum(report.faults.values()), *counts, report.num_begun_again),
                *(f"{100 * report.share_again:.1f} %", f"{report.wall_s:.0f}"),
            )
        print(reports[1].faults)
    bad = (reports[1].num_lost, reports[1].num_doubled, reports[1].num_errors)
    if any(bad) or reports[1].num_changed:
        sys.exit(1)


if __name__ == "__main__":
    main()
