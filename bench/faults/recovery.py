"""kill -9 of each process while clients stream: what they saw, what was left, how long it took.

    python -m bench.faults.recovery [--streams 20] [--http-workers 2] [--json]

One fresh server per victim. *Orphans* are processes of the server that still run 5 s after the
kill and do not belong to a server that lives. *Ready again* is the time from the kill until
every process is back and a new one-token request has been answered, among the others.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import psutil
from support.streams import Outcome, StreamLoad, stream_once

from bench.serving.server import Server, running_server

PROMPT = "Tell me a story about Mira and the brass lantern."
READY_TIMEOUT_S = 120.0
ORPHAN_AFTER_S = 5.0


@dataclass(frozen=True)
class FaultResult:
    """What one kill led to."""

    victim: str
    num_in_flight: int
    outcomes: dict[str, int]
    num_orphans: int
    ready_again_s: float | None
    """None: not expected (the supervisor) or not within the time-out."""


def kill_while_streaming(victim: str, num_streams: int, flags: list[str]) -> FaultResult:
    """Start a server, load it, kill one process, and watch."""
    with running_server(flags) as server:
        before = server.tree()
        messages = [{"role": "user", "content": PROMPT}]
        body = {"model": server.model, "messages": messages, "max_tokens": 400}
        with StreamLoad(server.url, body, num_streams) as load:
            load.wait_all_streaming()
            killed_s = time.monotonic()
            before[victim].kill()
            ready_again_s = None
            if victim != "supervisor":
                ready_again_s = _wait_ready(server, body, before[victim], len(before))
            load.stop()
        time.sleep(max(0.0, killed_s + ORPHAN_AFTER_S - time.monotonic()))
        num_orphans = _count_orphans(server, before, victim)
    in_flight = load.in_flight_at(killed_s)
    counts = Counter(result.outcome for result in in_flight)
    return FaultResult(
        victim=victim,
        num_in_flight=len(in_flight),
        outcomes={outcome.value: counts[outcome] for outcome in Outcome},
        num_orphans=num_orphans,
        ready_again_s=ready_again_s,
    )


def _wait_ready(
    server: Server, body: dict[str, Any], victim: psutil.Process, num_processes: int
) -> float | None:
    """Return the seconds from now until all processes are back and a request is answered."""
    start_s = time.monotonic()
    while time.monotonic() < start_s + READY_TIMEOUT_S:
        pids = {process.pid for process in server.tree().values()}
        if victim.pid not in pids and len(pids) == num_processes:
            probe = stream_once(server.url, body | {"max_tokens": 1})
            if probe.outcome is Outcome.WHOLE:
                return time.monotonic() - start_s
        time.sleep(0.01)
    return None


def _count_orphans(server: Server, before: dict[str, psutil.Process], victim: str) -> int:
    """Count old processes that run although they are no part of the server any more."""
    wanted = set() if victim == "supervisor" else {p.pid for p in server.tree().values()}
    return sum(_runs(process) and process.pid not in wanted for process in before.values())


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def print_table(results: list[FaultResult]) -> None:
    """Print a Markdown table."""
    outcomes = [outcome.value for outcome in Outcome]
    header = ["killed", "in flight", *outcomes, "orphans", "ready again (s)"]
    print("| " + " | ".join(header) + " |")
    print("| " + " | ".join("---" for _ in header) + " |")
    for result in results:
        again = "-" if result.ready_again_s is None else f"{result.ready_again_s:.2f}"
        counts = [result.outcomes[outcome] for outcome in outcomes]
        row: list[Any] = [result.victim, result.num_in_flight, *counts, result.num_orphans, again]
        print("| " + " | ".join(map(str, row)) + " |")


def main() -> None:
    """Run the whole table; exit code 1 if anything happened that must not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--http-workers", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    flags = [f"--http-workers={arguments.http_workers}"]
    results = [
        kill_while_streaming(victim, arguments.streams, flags)
        for victim in ("frontend-0", "router-0", "worker-0", "supervisor")
    ]
    if arguments.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    else:
        print_table(results)
    for result in results:
        lost = result.victim != "supervisor" and result.ready_again_s is None
        if lost or result.num_orphans or result.outcomes[Outcome.TORN]:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
