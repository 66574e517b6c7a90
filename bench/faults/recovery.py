"""What happens when processes die.

python -m bench.faults.recovery [--streams 20] [--http-workers 2] [--json]
    kill -9 of each process while clients stream: what they saw, what was left, how long it
    took. One fresh server per victim. *Orphans* are processes of the server that still run 5 s
    after the kill and do not belong to a server that lives. *Ready again* is the time from the
    kill until every process is back and a new one-token request has been answered
python -m bench.faults.recovery ranks [--repeats 3] [--step-timeout-s 3] [--decodes] [--json]
    TP=2: rank 1 is stopped in the middle of a prefill of thousands of tokens (`--decodes`: of
    thousands of decodes, for GPUs, which are through with a prefill too soon), until rank 0
    waits in the all-reduce. Then rank 1 is killed (SIGKILL), or left as it is (SIGSTOP).
    *Detected* is the time until rank 0's process is gone too: from the kill, or from the stop
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import httpx
import psutil
from support.streams import Outcome, StreamLoad, stream_once

from bench.serving.server import Server, running_server
from bench.table import print_head, print_row

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


def print_kills(results: list[FaultResult]) -> None:
    """Print a Markdown table."""
    outcomes = [outcome.value for outcome in Outcome]
    print_head("killed", "in flight", *outcomes, "orphans", "ready again (s)")
    for result in results:
        again = "-" if result.ready_again_s is None else f"{result.ready_again_s:.2f}"
        counts = [result.outcomes[outcome] for outcome in outcomes]
        print_row(result.victim, result.num_in_flight, *counts, result.num_orphans, again)


def kills() -> None:
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
        print_kills(results)
    for result in results:
        lost = result.victim != "supervisor" and result.ready_again_s is None
        if lost or result.num_orphans or result.outcomes[Outcome.TORN]:
            raise SystemExit(1)


NUM_PROMPT_TOKENS = 8000
CHUNK_TOKENS = 2000
"""Of a step: far less than --step-timeout-s also on a busy machine."""
NUM_DECODES = 8000
QUIET_S = 0.3
"""Without computing for so long, rank 0 waits."""
MAX_QUIET_WAIT_S = 5.0
"""A rank whose GPU waits may look at it in a loop: after this time it waits, whatever it does."""
POLL_S = 0.002
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class RankFault:
    """What one signal led to."""

    signal: str
    detected_s: float
    ready_again_s: float
    outcome: str
    """Of the request that ran."""
    num_orphans: int


def fault_in_all_reduce(
    signum: signal.Signals, *, step_timeout_s: float, decodes: bool = False
) -> RankFault:
    """Start a server, stop rank 1 within a step, kill it if that is wanted, and watch."""
    flags = ["--tp=2", "--profile=off"]
    if signum is signal.SIGSTOP:  # else it is not to be faster than the death
        flags.append(f"--step-timeout-s={step_timeout_s}")
    flags += [f"--max-num-batched-tokens={CHUNK_TOKENS}", "--kv-memory=64MiB"]
    with running_server(flags) as server:
        ranks = [server.tree()[f"worker-{rank}"] for rank in range(2)]
        request = _Request(server, decodes=decodes)
        request.start()
        _wait_until_busy(ranks[1])
        stopped_s = time.monotonic()
        ranks[1].suspend()
        if signum is signal.SIGKILL:
            _wait_until_quiet(ranks[0])
            stopped_s = time.monotonic()
            ranks[1].kill()
        _wait_gone(ranks[0])
        detected_s = time.monotonic() - stopped_s
        ready_again_s = _wait_answered(server)
        request.join(TIMEOUT_S)
        return RankFault(
            signal=signum.name,
            detected_s=detected_s,
            ready_again_s=ready_again_s,
            outcome=request.outcome,
            num_orphans=sum(map(_runs, ranks)),
        )


class _Request(threading.Thread):
    """A request with a long prompt and a few tokens of output, or the other way round."""

    def __init__(self, server: Server, *, decodes: bool) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._decodes = decodes
        self.outcome = "none"

    def run(self) -> None:
        """Send it."""
        text, num_tokens = ("Mira", NUM_DECODES) if self._decodes else (self._long_text(), 4)
        messages = [{"role": "user", "content": text}]
        sizes = {"max_tokens": num_tokens, "min_tokens": num_tokens}
        body = {"model": self._server.model, "messages": messages, **sizes}
        self.outcome = stream_once(self._server.url, body).outcome.value

    def _long_text(self) -> str:
        answer = httpx.post(
            f"{self._server.url}/tokenize", json={"inputs": "Mira and the brass lantern. " * 2000}
        )
        token_ids = [token["id"] for token in answer.json()][:NUM_PROMPT_TOKENS]
        answer = httpx.post(f"{self._server.url}/detokenize", json={"tokens": token_ids[:-64]})
        text: str = answer.json()["text"]
        return text


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _wait_until_busy(process: psutil.Process) -> None:
    """Wait until it has computed for a tenth of a second: it is in the long step."""
    before_s, deadline_s = _cpu_s(process), time.monotonic() + TIMEOUT_S
    while _cpu_s(process) < before_s + 0.1:
        if time.monotonic() > deadline_s:
            raise SystemExit("the request did not start")
        time.sleep(POLL_S)


def _wait_until_quiet(process: psutil.Process) -> None:
    deadline_s = time.monotonic() + MAX_QUIET_WAIT_S
    while time.monotonic() < deadline_s:
        before_s = _cpu_s(process)
        time.sleep(QUIET_S)
        if _cpu_s(process) == before_s:
            return


def _wait_gone(process: psutil.Process) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while _runs(process):
        if time.monotonic() > deadline_s:
            raise SystemExit(f"rank 0 was still there after {TIMEOUT_S:g} s")
        time.sleep(POLL_S)


def _wait_answered(server: Server) -> float:
    start_s = time.monotonic()
    probe = {"model": server.model, "prompt": "Mira", "max_tokens": 1}
    while time.monotonic() < start_s + TIMEOUT_S:
        answer = httpx.post(f"{server.url}/v1/completions", json=probe, timeout=TIMEOUT_S)
        if answer.status_code == 200:
            return time.monotonic() - start_s
        time.sleep(0.01)
    raise SystemExit(f"not ready again after {TIMEOUT_S:g} s")


def print_ranks(results: list[RankFault]) -> None:
    """Print a Markdown table, a row for each signal: medians, and the extremes of detection."""
    names = ("detected (s)", "min … max", "ready again (s)", "the request", "orphans")
    print_head("rank 1 gets", *names)
    for name in dict.fromkeys(result.signal for result in results):
        some = [result for result in results if result.signal == name]
        times = [result.detected_s for result in some]
        outcomes = ", ".join(sorted({result.outcome for result in some}))
        again_s = statistics.median(result.ready_again_s for result in some)
        print_row(
            *(name, f"{statistics.median(times):.3f}", f"{min(times):.3f} … {max(times):.3f}"),
            *(f"{again_s:.2f}", outcomes, sum(result.num_orphans for result in some)),
        )


def ranks() -> None:
    """Run the table; exit code 1 if anything happened that must not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--step-timeout-s", type=float, default=3.0)
    parser.add_argument("--decodes", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = [
        fault_in_all_reduce(
            signum, step_timeout_s=arguments.step_timeout_s, decodes=arguments.decodes
        )
        for signum in (signal.SIGKILL, signal.SIGSTOP)
        for _ in range(arguments.repeats)
    ]
    if arguments.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    else:
        print_ranks(results)
    for result in results:
        if result.num_orphans or result.outcome == Outcome.TORN.value:
            raise SystemExit(1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["ranks"]:
        del sys.argv[1]
        ranks()
    else:
        kills()
