"""Three servers on one PostgreSQL behind nginx: what clients see of a death and of restarts.

python -m bench.faults.replicas [--rate 8] [--lines 400] [--quiet-s 8] [--json]
    nginx runs with docker/nginx.conf, in which only addresses and paths are others. Real-time chats
    are streamed at `--rate` per second (Poisson), and a batch is worked off beside them. One server
    is killed, all processes at once, and started again `--quiet-s` later; then each in turn is told
    to end (SIGTERM), and started again when it has. No client asks twice. A request *in flight* on
    the killed server, sent and not answered when that died, cannot be sent again without doubt;
    what it loses is counted by itself, all else that is not a whole answer is an *error*.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import socket
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import psutil
from support.batch_store import jsonl
from support.faulted_batch import lines_of
from support.live_server import LiveServer
from support.nginx import running_nginx
from support.postgres import PostgresServer
from support.processes import wait_for, wait_gone
from support.streams import Outcome, StreamResult, stream_once

from bench.table import print_head, print_row

FLAGS = ("--http-workers=1", "--max-num-seqs=16", "--log-level=warning")
CHAT = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 32}
END_S = 120.0
"""After which a server that was told to end must have ended."""


@dataclass
class Phase:
    """What became of the requests that were sent in one part of the run."""

    name: str
    num_requests: int = 0
    num_whole: int = 0
    num_lost_in_flight: int = 0
    num_errors: int = 0
    seconds: float = 0.0
    what: str = ""


class Load:
    """Sends chats at random moments, whatever has become of those before."""

    def __init__(self, url: str, model: str, rate: float) -> None:
        self._url, self._body, self._rate = url, {"model": model, **CHAT}, rate
        self._random = random.Random(0)
        self._should_end = threading.Event()
        self._clients: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._run)
        self.results: list[StreamResult] = []

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Send nothing more, and wait for all answers."""
        self._should_end.set()
        self._thread.join()
        for client in self._clients:
            client.join()

    def _run(self) -> None:
        while not self._should_end.wait(self._random.expovariate(self._rate)):
            client = threading.Thread(target=self._ask)
            client.start()
            self._clients.append(client)

    def _ask(self) -> None:
        self.results.append(stream_once(self._url, self._body))


class Replica:
    """A server that always has the same port, and may be ended and started again."""

    def __init__(self, location: str, folder: Path) -> None:
        with closing(socket.create_server(("127.0.0.1", 0))) as free:
            self.port = free.getsockname()[1]
        self._flags = (*FLAGS, f"--batch-store={location}", f"--port={self.port}")
        self._folder = folder
        self.server = self._started()

    def _started(self) -> LiveServer:
        return LiveServer(self._flags, Path(tempfile.mkdtemp(dir=self._folder)))

    def start_again(self) -> None:
        """Start a new one in place of one that has ended; returns when it is ready."""
        self.server.close()
        self.server = self._started()
        self.server.wait_ready()

    def kill(self) -> float:
        """Kill all its processes at once; return when (monotonic)."""
        processes = list(self.server.tree().values())
        killed_s = time.monotonic()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.server.process.wait(END_S)
        wait_gone([process.pid for process in processes])
        return killed_s

    def close(self) -> None:
        """Make sure that nothing is left."""
        if self.server.process.poll() is None:
            self.kill()
        self.server.close()

    def end(self) -> None:
        """Tell it to end, as `docker stop` does, and wait until it has."""
        self.server.process.send_signal(signal.SIGTERM)
        if code := self.server.process.wait(END_S):
            raise SystemExit(f"a server that was told to end did so with {code}")


def make_batch(url: str, model: str, num_lines: int) -> str:
    """Upload lines, and return the id of their batch."""
    with httpx.Client(base_url=f"{url}/v1", timeout=60.0) as client:
        files = {"file": ("in.jsonl", jsonl(lines_of(num_lines, model)))}
        file = client.post("/files", files=files, data={"purpose": "batch"}).raise_for_status()
        asked = {"endpoint": "/v1/completions", "completion_window": "7d", "x_accept_late": True}
        answer = client.post("/batches", json={"input_file_id": file.json()["id"], **asked})
        batch_id: str = answer.raise_for_status().json()["id"]
    return batch_id


def results_of(url: str, batch_id: str) -> Counter[str]:
    """Wait for the batch's end; return how many results each line has."""

    def ended() -> httpx.Response | None:
        answer = httpx.get(f"{url}/v1/batches/{batch_id}", timeout=60.0)
        return answer if answer.json().get("status") == "completed" else None

    batch = wait_for(ended, "the batch", timeout_s=600.0).json()
    text = httpx.get(f"{url}/v1/files/{batch['output_file_id']}/content", timeout=60.0).text
    return Counter(json.loads(line)["custom_id"] for line in text.splitlines())


def sort_out(
    results: list[StreamResult], killed_s: float, times: dict[str, tuple[float, float]]
) -> list[Phase]:
    """Count what became of requests, by the phase in which they were sent."""
    phases = []
    for name, (start_s, end_s) in times.items():
        phase, what = Phase(name, seconds=end_s - start_s), Counter[str]()
        for result in results:
            if not start_s <= result.start_s < end_s:
                continue
            phase.num_requests += 1
            if result.outcome is Outcome.WHOLE:
                phase.num_whole += 1
            elif result.start_s <= killed_s <= result.end_s:
                phase.num_lost_in_flight += 1
            else:
                phase.num_errors += 1
                what[f"{result.outcome.value} {result.detail}".strip()[:80]] += 1
        phase.what = "; ".join(f"{count} x {text}" for text, count in what.items())
        phases.append(phase)
    return phases


def measure(arguments: argparse.Namespace) -> tuple[list[Phase], Counter[str]]:
    """Run it all; return the phases, and how many results each line of the batch has."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.chmod(0o711)  # nginx's workers are another user
        postgres = PostgresServer(is_durable=True)
        stack.callback(postgres.close)
        replicas: list[Replica] = []
        for _ in range(3):
            replicas.append(Replica(postgres.database("shared"), folder))
            stack.callback(replicas[-1].close)
            replicas[-1].server.wait_ready()
        url = stack.enter_context(running_nginx(folder, [own.port for own in replicas]))
        model = replicas[0].server.model
        batch_id = make_batch(url, model, arguments.lines)
        load, times = Load(url, model, arguments.rate), {}
        start_s = time.monotonic()
        load.start()
        try:
            time.sleep(arguments.quiet_s)
            now_s = time.monotonic()
            times["before"] = start_s, now_s
            killed_s = replicas[0].kill()
            time.sleep(arguments.quiet_s)
            replicas[0].start_again()
            time.sleep(arguments.quiet_s)
            times["one killed, and started again"] = now_s, time.monotonic()
            now_s = time.monotonic()
            for replica in replicas:
                replica.end()
                replica.start_again()
            time.sleep(arguments.quiet_s)
            times["rolling restart"] = now_s, time.monotonic()
        finally:
            load.stop()
        return sort_out(load.results, killed_s, times), results_of(url, batch_id)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rate", type=float, default=8.0)
    parser.add_argument("--lines", type=int, default=400)
    parser.add_argument("--quiet-s", type=float, default=8.0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    phases, lines = measure(arguments)
    lost, doubled = arguments.lines - len(lines), lines.total() - len(lines)
    if arguments.json:
        found = {"phases": [asdict(phase) for phase in phases], "lost": lost, "doubled": doubled}
        print(json.dumps(found, indent=2))
        return
    print_head("phase", "s", "requests", "whole", "lost in flight on the killed one", "errors", "")
    for phase in phases:
        counts = phase.num_requests, phase.num_whole, phase.num_lost_in_flight, phase.num_errors
        print_row(phase.name, f"{phase.seconds:.0f}", *counts, phase.what)
    print(f"\nbatch of {arguments.lines} lines: {lost} lost, {doubled} doubled")


if __name__ == "__main__":
    main()
