"""Two nodes in two network namespaces, a cable between them, and what happens when it is cut.

python -m bench.faults.nodes [--repeats 3] [--node-timeout-s 5] [--away-s 2] [--json]
    Needs root, `ip netns` and two free addresses, 10.77.0.1 and 10.77.0.2. A server with TP=2 whose
    ranks are on the two nodes answers what one node with TP=2 answers: tokens are compared. Then,
    while a best-effort and a real-time request stream, node 1's end of the cable is taken down, and
    up again `--away-s` after both nodes have noticed. *Detected* is the time from the cut until the
    worker of that node is gone, *ready again* that from the mending until a request is answered
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import psutil
from support.streams import Outcome, StreamResult, stream_once

from bench.serving.server import Server, running_server
from bench.table import print_head, print_row
from lightserve.node_key import write_node_key
from lightserve.supervisor.node import NODE_READY_PREFIX

NAMES = ("lightserve-0", "lightserve-1")
CABLE = ("ls-cable-0", "ls-cable-1")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
COMMON = ("--tp=2", "--kv-memory=64MiB", "--profile=off", "--num-threads=1", "--dtype=float32")
PROMPTS = tuple(
    f"Tell me a story about {who} and the {what}."
    for who in ("Mira", "Tom", "the cobbler", "the king")
    for what in ("brass lantern", "river", "old clock", "road to Foxdale")
)
NUM_TOKENS = 64
TIMEOUT_S = 120.0
POLL_S = 0.005


@dataclass(frozen=True)
class Cut:
    """What one cut led to."""

    detected_by_0_s: float
    detected_by_1_s: float
    ready_again_s: float
    real_time: str
    """What became of the real-time stream that had begun."""
    best_effort: str


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextmanager
def namespaces() -> Iterator[None]:
    """Have two network namespaces with a cable between them; gone afterwards."""
    try:
        for name in NAMES:
            _ip("netns", "add", name)
        _ip("link", "add", CABLE[0], "type", "veth", "peer", "name", CABLE[1])
        for name, end, address in zip(NAMES, CABLE, ADDRESSES, strict=True):
            _ip("link", "set", end, "netns", name)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            _ip("-n", name, "link", "set", end, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], check=False)


def _cable(state: str) -> None:
    _ip("-n", NAMES[1], "link", "set", CABLE[1], state)


def answers(server: Server) -> list[list[int]]:
    """Return the greedy tokens that follow each prompt."""
    tokens = []
    for prompt in PROMPTS:
        asked = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        body = {"model": server.model, "return_token_ids": True, **asked}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=TIMEOUT_S)
        tokens.append(answer.raise_for_status().json()["choices"][0]["token_ids"])
    return tokens


@contextmanager
def two_nodes(node_timeout_s: float) -> Iterator[tuple[Server, psutil.Process]]:
    """Run node 0, in this process's namespace, and node 1 in the other; yields both."""
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder) / "key"
        write_node_key(key)
        flags = [
            *COMMON,
            *("--nnodes=2", f"--master-addr={ADDRESSES[0]}", f"--node-key-file={key}"),
            f"--node-timeout-s={node_timeout_s}",
        ]
        command = ["ip", "netns", "exec", NAMES[1], sys.executable, "-m", "lightserve.cli.main"]
        node = subprocess.Popen(
            [*command, "serve", *flags, "--node-rank=1"], stdout=subprocess.PIPE, text=True
        )
        try:
            with running_server(flags) as server:
                assert node.stdout is not None
                assert node.stdout.readline().startswith(NODE_READY_PREFIX)
                yield server, psutil.Process(node.pid)
            if code := node.wait(TIMEOUT_S):
                raise SystemExit(f"node 1 ended with {code}")
        finally:
            node.kill()
            node.wait()


def _worker(parent: psutil.Process, rank: int) -> psutil.Process:
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        for child in parent.children(recursive=True):
            if child.name() == f"worker-{rank}":
                return child
        time.sleep(POLL_S)
    raise SystemExit(f"there is no worker-{rank}")


class _Watch(threading.Thread):
    """Waits for the end of a process, and tells when it came."""

    def __init__(self, process: psutil.Process) -> None:
        super().__init__(daemon=True)
        self._process = process
        self.gone_s = float("inf")

    def run(self) -> None:
        """Wait."""
        while self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(POLL_S)
        self.gone_s = time.monotonic()


def cut_once(server: Server, node: psutil.Process, away_s: float) -> Cut:
    """Cut the cable under two streams, mend it, and watch."""
    fates: dict[str, StreamResult] = {}
    begun = {tier: threading.Event() for tier in ("priority", "flex")}

    def stream(tier: str) -> None:
        messages = [{"role": "user", "content": PROMPTS[0]}]
        asked = {"max_tokens": 1500, "ignore_eos": True, "service_tier": tier}
        body = {"model": server.model, "messages": messages, **asked}
        fates[tier] = stream_once(server.url, body, lambda *_: begun[tier].set())

    clients = [threading.Thread(target=stream, args=[tier], daemon=True) for tier in begun]
    for client in clients:
        client.start()
    for event in begun.values():
        event.wait(TIMEOUT_S)
    watches = [_Watch(_worker(psutil.Process(server.process.pid), 0)), _Watch(_worker(node, 1))]
    for watch in watches:
        watch.start()
    cut_s = time.monotonic()
    _cable("down")
    for watch in watches:
        watch.join(TIMEOUT_S)
    time.sleep(away_s)
    mended_s = time.monotonic()
    _cable("up")
    probe = {"model": server.model, "prompt": "Mira", "max_tokens": 1}
    while time.monotonic() < mended_s + TIMEOUT_S:
        answer = httpx.post(f"{server.url}/v1/completions", json=probe, timeout=TIMEOUT_S)
        if answer.status_code == 200:
            break
        time.sleep(0.05)
    else:
        raise SystemExit("not ready again")
    again_s = time.monotonic() - mended_s
    for client in clients:
        client.join(TIMEOUT_S)
    return Cut(
        detected_by_0_s=watches[0].gone_s - cut_s,
        detected_by_1_s=watches[1].gone_s - cut_s,
        ready_again_s=again_s,
        real_time=fates["priority"].outcome.value,
        best_effort=fates["flex"].outcome.value,
    )


def inside(arguments: argparse.Namespace) -> None:
    """Measure; runs in node 0's namespace."""
    with running_server(COMMON) as server:
        expected = answers(server)
    with two_nodes(arguments.node_timeout_s) as (server, node):
        found = answers(server)
        num_same = sum(ours == theirs for ours, theirs in zip(found, expected, strict=True))
        cuts = [cut_once(server, node, arguments.away_s) for _ in range(arguments.repeats)]
        processes = [psutil.Process(server.process.pid), node]
        tree = [child for parent in processes for child in parent.children(recursive=True)]
    time.sleep(2.0)
    orphans = sum(child.is_running() for child in tree)
    if arguments.json:
        rows = [asdict(cut) for cut in cuts]
        print(json.dumps({"same": num_same, "of": len(expected), "orphans": orphans, "cuts": rows}))
    else:
        print_table(cuts, num_same, orphans)
    torn = {Outcome.TORN.value, Outcome.BROKEN.value}
    fates = {fate for cut in cuts for fate in (cut.real_time, cut.best_effort)}
    if num_same < len(expected) or orphans or fates & torn:
        raise SystemExit(1)


def print_table(cuts: Sequence[Cut], num_same: int, orphans: int) -> None:
    """Print a line and a Markdown table: medians and extremes of seconds."""
    print(
        f"\nprompts with the tokens of one node: {num_same} of {len(PROMPTS)}; orphans: {orphans}\n"
    )
    print_head("seconds", "median", "min … max")
    for name, times in (
        ("node 0 has noticed", [cut.detected_by_0_s for cut in cuts]),
        ("node 1 has noticed", [cut.detected_by_1_s for cut in cuts]),
        ("ready again", [cut.ready_again_s for cut in cuts]),
    ):
        print_row(name, f"{statistics.median(times):.2f}", f"{min(times):.2f} … {max(times):.2f}")
    for name, fates in (
        ("real-time streams", [cut.real_time for cut in cuts]),
        ("best-effort streams", [cut.best_effort for cut in cuts]),
    ):
        print(f"\n{name}: {', '.join(fates)}")


def main() -> None:
    """Make the namespaces and run this again in the first of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--node-timeout-s", type=float, default=5.0)
    parser.add_argument("--away-s", type=float, default=2.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--is-inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.is_inside:
        inside(arguments)
        return
    if os.geteuid():
        raise SystemExit("network namespaces need root")
    with namespaces():
        command = [sys.executable, "-m", "bench.faults.nodes", *sys.argv[1:], "--is-inside"]
        ended = subprocess.run(["ip", "netns", "exec", NAMES[0], *command], check=False)
    raise SystemExit(ended.returncode)


if __name__ == "__main__":
    main()
