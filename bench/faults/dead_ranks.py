"""A rank that dies or hangs while its peer waits for it in an all-reduce, in a long prefill.

    python -m bench.faults.dead_ranks [--repeats 3] [--step-timeout-s 3] [--decodes] [--json]

TP=2. Rank 1 is stopped in the middle of a prefill of thousands of tokens (`--decodes`: of thousands
of decodes, for GPUs, which are through with a prefill too soon), until rank 0 no longer computes:
it waits in the all-reduce. Then rank 1 is killed (SIGKILL), or left as it is (SIGSTOP).
*Detected* is the time until rank 0's process, which waits for what never comes, is gone too: from
the kill, or from the stop (--step-timeout-s is what the router waits for a step). *Ready again*
is the time from then until a new one-token request has been answered.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import threading
import time
from dataclasses import asdict, dataclass

import httpx
import psutil
from support.streams import Outcome, stream_once

from bench.serving.server import Server, running_server

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
        ready_again_s = _wait_ready(server)
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


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _wait_ready(server: Server) -> float:
    start_s = time.monotonic()
    probe = {"model": server.model, "prompt": "Mira", "max_tokens": 1}
    while time.monotonic() < start_s + TIMEOUT_S:
        answer = httpx.post(f"{server.url}/v1/completions", json=probe, timeout=TIMEOUT_S)
        if answer.status_code == 200:
            return time.monotonic() - start_s
        time.sleep(0.01)
    raise SystemExit(f"not ready again after {TIMEOUT_S:g} s")


def print_table(results: list[RankFault]) -> None:
    """Print a Markdown table, a row for each signal: medians, and the extremes of detection."""
    print("| rank 1 gets | detected (s) | min … max | ready again (s) | the request | orphans |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in dict.fromkeys(result.signal for result in results):
        some = [result for result in results if result.signal == name]
        times = [result.detected_s for result in some]
        outcomes = ", ".join(sorted({result.outcome for result in some}))
        print(
            f"| {name} | {statistics.median(times):.3f} | {min(times):.3f} … {max(times):.3f}"
            f" | {statistics.median(result.ready_again_s for result in some):.2f}"
            f" | {outcomes} | {sum(result.num_orphans for result in some)} |"
        )


def main() -> None:
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
        print_table(results)
    for result in results:
        if result.num_orphans or result.outcome == Outcome.TORN.value:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
