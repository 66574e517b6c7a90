"""Servers that share one PostgreSQL store: how much faster a batch gets on, and what a death costs.

python -m bench.faults.shared_store [--lines 6000] [--tokens 25] [--in-flight 64] [--repeats 3]
python -m bench.faults.shared_store engine [--lines 600] [--repeats 3]

Each server is a process with the real runner and store; in place of the engine it sleeps for as
long as steps of so many rows take by a cost model (`STEP_S`, `ROW_S`): what is measured is the
store and its leases. Lines have half to one and a half times `--tokens`. *Rate* is lines per second
from the first result to the last, with one server and with two in turns. Then one of two is killed
with half of the lines done: the time from there until the lines that it held are others'.

`engine`: whole servers with the bundled model, one and two in turns, all their processes and the
database's on one core: what two have in all should be what one has.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from support.batch_store import ENDPOINT, check_lines, create, jsonl, line, new_batch, upload
from support.faulted_batch import Servers
from support.postgres import PostgresServer

from bench.table import print_head, print_row
from lightserve.batches.access import Store, StoreThread, prepare
from lightserve.batches.forecast import Costs
from lightserve.batches.records import LeasedLine
from lightserve.batches.runner import Answer, Runner

STEP_S, ROW_S = 0.015, 0.0001
"""Of a step, and of each row in it."""


class SleepingEngine:
    """Answers each line after as many steps as it has tokens, in a full batch."""

    is_ready = True
    is_ending = False
    costs = Costs(0.0, 0.0)

    def __init__(self, num_tokens: int, in_flight: int) -> None:
        self._line_s = num_tokens * (STEP_S + ROW_S * in_flight)

    def move_batch(self, batch: int, due_in_s: float) -> bool:
        """See `runner.Engine`."""
        return True

    async def answer(self, line: LeasedLine, *, due_in_s: float) -> Answer:
        """See `runner.Engine`."""
        await asyncio.sleep(self._line_s * (0.5 + line.number % 11 / 10))
        usage = {"prompt_tokens": 9, "completion_tokens": 25}
        body = json.dumps({"text": line.custom_id * 20, "usage": usage}).encode()
        return Answer(status=200, body=body, request_id=line.id)


async def serve(location: str, owner: str, num_tokens: int, in_flight: int) -> None:
    """Work off what there is until SIGTERM."""
    store = StoreThread(location)
    engine = SleepingEngine(num_tokens, in_flight)
    runner = Runner(store, engine, max_in_flight=in_flight, owner=owner)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, lambda: setattr(runner, "should_exit", True))
    await runner.serve()
    store.close()


class Scene:
    """A store, and the servers that work on it."""

    def __init__(self, location: str, arguments: argparse.Namespace) -> None:
        self._location, self._arguments = location, arguments
        self.store = Store(location)

    def start(self, owner: str) -> subprocess.Popen[bytes]:
        """Start a server."""
        given = (self._location, owner, self._arguments.tokens, self._arguments.in_flight)
        command = (sys.executable, "-m", "bench.faults.shared_store", "serve", *map(str, given))
        return subprocess.Popen(command)

    def make(self, num_lines: int) -> str:
        """Make a batch; return its id."""
        now_s = time.time()
        lines = [line(f"r{number}") for number in range(num_lines)]
        file = upload(self.store, jsonl(lines), now_s=now_s)
        checked = check_lines(self.store.files, file, ENDPOINT, lambda name: None)
        new = new_batch(file, accepts_late=True)
        return create(self.store, new, checked, now_s).id

    def wait(self, batch_id: str, least: int) -> float:
        """Return when so many lines have results (monotonic)."""
        sql = "SELECT num_done FROM batches WHERE id = ?"
        while self.store.database.value(sql, batch_id) < least:
            time.sleep(0.02)
        return time.monotonic()

    def rate(self, owners: tuple[str, ...], num_lines: int) -> float:
        """Return lines per second with these servers."""
        batch_id = self.make(num_lines)
        servers = [self.start(owner) for owner in owners]
        first_s = self.wait(batch_id, self._arguments.in_flight * len(owners))
        num_first = self.store.database.value("SELECT num_done FROM batches WHERE id = ?", batch_id)
        last_s = self.wait(batch_id, num_lines)
        for server in servers:
            server.send_signal(signal.SIGTERM)
            server.wait()
        return float((num_lines - num_first) / (last_s - first_s))

    def death(self, num_lines: int) -> dict[str, Any]:
        """Kill one of two servers; return what came of it."""
        batch_id = self.make(num_lines)
        victim, other = self.start("victim"), self.start("other")
        self.wait(batch_id, num_lines // 2)
        victim.kill()
        victim.wait()
        killed_s = time.monotonic()
        held = self.store.database.value("SELECT count(*) FROM lines WHERE owner = 'victim'")
        moved_s = None
        while moved_s is None:
            time.sleep(0.05)
            left = "SELECT count(*) FROM lines WHERE owner = 'victim' AND state = 'leased'"
            if self.store.database.value(left) == 0:
                moved_s = time.monotonic() - killed_s
        self.wait(batch_id, num_lines)
        other.send_signal(signal.SIGTERM)
        other.wait()
        row = self.store.database.row(
            "SELECT count(*), count(DISTINCT lines.number) FROM lines JOIN batches"
            " ON batches.number = lines.batch WHERE batches.id = ? AND state = 'done'",
            batch_id,
        )
        assert row is not None
        return {
            "held": held,
            "moved_s": moved_s,
            "lost": num_lines - row[1],
            "doubled": row[0] - row[1],
        }


def engine_rate(postgres: PostgresServer, name: str, num_servers: int, num_lines: int) -> float:
    """Return lines per second of so many whole servers, from the making of a batch to its end."""
    with tempfile.TemporaryDirectory(prefix="ls-bench-") as directory:
        location = postgres.database(name)
        with Servers(Path(directory), location, num_servers=num_servers, postgres=postgres) as all_:
            all_.run(num_lines // 4)  # what is compiled or loaded at first use
            found, report = all_.run(num_lines)
        if len(found) != num_lines or report.num_lost or report.num_doubled or report.num_errors:
            raise SystemExit(f"not each line has one answer: {report}")
        return num_lines / report.wall_s


def engine() -> None:
    """Print the table of whole servers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lines", type=int, default=600)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args(sys.argv[2:])
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    with closing(PostgresServer(is_durable=True)) as postgres:
        ratios = []
        print_head("one server (lines/s)", "two (lines/s)", "ratio")
        for number in range(arguments.repeats):
            one, two = (
                engine_rate(postgres, f"store{number}{servers}", servers, arguments.lines)
                for servers in (1, 2)
            )
            ratios.append(two / one)
            print_row(f"{one:.1f}", f"{two:.1f}", f"{two / one:.2f}")
        print(f"median ratio {statistics.median(ratios):.2f}")


def main() -> None:
    """Print the table; exit code 1 if anything was lost or doubled."""
    if sys.argv[1:2] == ["engine"]:
        engine()
        return
    if sys.argv[1:2] == ["serve"]:
        location, owner, num_tokens, in_flight = sys.argv[2:]
        asyncio.run(serve(location, owner, int(num_tokens), int(in_flight)))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--lines", type=int, default=6000)
    parser.add_argument("--tokens", type=int, default=25)
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    with ExitStack() as stack:
        postgres = stack.enter_context(closing(PostgresServer(is_durable=True)))
        location = postgres.database("store")
        stack.enter_context(prepare(location))
        scene = Scene(location, arguments)
        stack.callback(scene.store.database.close)
        ratios = []
        print_head("one server (lines/s)", "two (lines/s)", "ratio")
        for _ in range(arguments.repeats):
            one = scene.rate(("a",), arguments.lines // 2)
            two = scene.rate(("a", "b"), arguments.lines)
            ratios.append(two / one)
            print_row(f"{one:.1f}", f"{two:.1f}", f"{two / one:.2f}")
        print(f"median ratio {statistics.median(ratios):.2f}")
        found = scene.death(arguments.lines)
        print(found)
    if found["lost"] or found["doubled"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
