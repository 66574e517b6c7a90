"""Chats beside a batch on three servers, one after the other: `python -m bench.serving.mixed`.

lightserve, and of vLLM and llama.cpp those whose binary is given. Each has the machine to itself
and answers `lightserve bench mixed`: the same model, the same chats, answers of exactly the wanted
lengths, greedy. vLLM has `--scheduling-policy priority` and gets the batch at priority 1; llama.cpp
has no classes. Printed is the table of docs/results/mixed.md and a sentence per server.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import httpx

from bench.serving.server import load_average, running_server
from bench.table import print_head, print_row
from lightserve.loadtest import result
from lightserve.loadtest.mixed import batch_tokens_per_s, makespan_s, ratio, verdict
from lightserve.loadtest.options import BE, RT
from lightserve.loadtest.result import Run, Spread
from lightserve.loadtest.tables import number

HOST = "127.0.0.1"
PEER_PORT = 8721
READY_S = 180.0
PROFILE_S = 60.0
FORCED = ("--force-lengths", "--body", '{"temperature": 0}', "--quiet")
MAX_LEN = 4096
NUM_SLOTS = 16
"""Places of llama.cpp for sequences, each with `MAX_LEN` tokens of KV."""


@contextmanager
def peer(command: Sequence[str], env: dict[str, str], log: IO[str]) -> Iterator[str]:
    """Start a server with its group of processes; yield its URL; end the group with SIGTERM."""
    url = f"http://{HOST}:{PEER_PORT}"
    process = subprocess.Popen(
        [*command, "--host", HOST, "--port", str(PEER_PORT)],
        env=os.environ | env,
        stdout=log,
        stderr=log,
        cwd=tempfile.gettempdir(),
        start_new_session=True,
    )
    try:
        until_s = time.monotonic() + READY_S
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() > until_s:
                raise SystemExit(f"{command[0]} did not start; see {log.name}")
            time.sleep(0.5)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


@contextmanager
def vllm(binary: str, model: str, log: IO[str], *, max_len: int = MAX_LEN) -> Iterator[str]:
    """Start vLLM's CPU build with as many threads as there are cores."""
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
    }
    flags = ("--served-model-name", "m", "--dtype", "bfloat16", "--max-model-len", str(max_len))
    more = ("--scheduling-policy", "priority", "--enforce-eager")
    with peer([binary, "serve", model, *flags, *more], env, log) as url:
        yield url


@contextmanager
def llama(binary: str, gguf: str, log: IO[str], *, max_len: int = MAX_LEN) -> Iterator[str]:
    """Start llama.cpp's server with as many threads as there are cores."""
    flags = ("-t", str(len(os.sched_getaffinity(0))), "-c", str(max_len * NUM_SLOTS))
    with peer([binary, "-m", gguf, *flags, "-np", str(NUM_SLOTS)], {}, log) as url:
        yield url


def wait_for_profile(log: Path) -> None:
    """Wait until lightserve has measured its step times, if it does: a few idle seconds."""
    until_s = time.monotonic() + PROFILE_S
    while time.monotonic() < until_s:
        text = log.read_text()
        if "measuring step times" not in text or "profiled:" in text:
            return
        time.sleep(0.5)
    raise SystemExit(f"lightserve measures step times for longer than {PROFILE_S:g} s; see {log}")


def measure(url: str, output: Path, args: Sequence[str], be_body: str | None) -> list[Run]:
    """Run all scenes; keep the result in `output`."""
    own = () if be_body is None else ("--be-body", be_body)
    command = [sys.executable, "-m", "lightserve", "bench", "mixed", "--url", url]
    done = subprocess.run(
        [*command, *FORCED, *own, *args, "--output", str(output)],
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        print(f"not whole: {done.stdout[-1000:]}", file=sys.stderr)
    return result.load(output)


def show(name: str, runs: Sequence[Run]) -> None:
    """Print a row per scene."""
    base = runs[0].classes[RT]
    for run in runs:
        chats, batch = run.classes[RT], run.classes.get(BE)
        took_s = makespan_s(run)
        count = run.traffic[-1].num_requests
        unfinished = "" if batch is None else f"{batch.num_completed} of {count} done"
        print_row(
            name,
            run.label,
            f"{chats.num_completed}/{chats.num_arrivals}",
            _pair(chats.ttft_ms),
            f"{number(ratio(chats.ttft_ms.p99, base.ttft_ms.p99), 2)}",
            _pair(chats.itl_ms),
            f"{number(ratio(chats.itl_ms.p99, base.itl_ms.p99), 2)}",
            unfinished if took_s is None else number(took_s),
            "" if batch is None else number(batch_tokens_per_s(run)),
        )


def _pair(spread: Spread) -> str:
    return f"{number(spread.p50)}, {number(spread.p99)}"


def main() -> None:
    """Print a row per server and scene, then a sentence per server."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="a directory, for lightserve and vLLM")
    parser.add_argument("--vllm", help="its command, such as /opt/vllm/bin/vllm")
    parser.add_argument("--llama", help="llama.cpp's llama-server")
    parser.add_argument("--gguf", help="the same model for llama.cpp")
    parser.add_argument("--keep", type=Path, help="a directory for results and logs")
    args, scenes = parser.parse_known_args()
    if (args.llama is None) != (args.gguf is None):
        parser.error("--llama and --gguf go together")
    keep = args.keep or Path(tempfile.mkdtemp(prefix="lightserve-mixed-"))
    keep.mkdir(parents=True, exist_ok=True)
    print(f"results and logs: {keep}", file=sys.stderr)
    moment = time.strftime("%Y-%m-%d %H:%M")
    print(
        f"{moment}, {os.cpu_count()} cores, load average {load_average()}: `{' '.join(scenes)}`\n"
    )
    print_head(
        *("server", "scene", "chats", "TTFT p50, p99 (ms)", "p99 of alone"),
        *("ITL p50, p99 (ms)", "p99 of alone", "batch (s)", "its tokens/s"),
    )
    sentences = []

    def one(name: str, url: str, be_body: dict[str, object] | None) -> None:
        said = None if be_body is None else json.dumps(be_body)
        runs = measure(url, keep / f"{name}.json", scenes, said)
        show(name, runs)
        sentences.append(f"- {name}: {verdict(runs)}")

    flags = ["--model", args.model]
    with (keep / "lightserve.log").open("w") as log, running_server(flags, log=log) as server:
        wait_for_profile(Path(log.name))
        one("lightserve", server.url, None)
    if args.vllm is not None:
        with (keep / "vllm.log").open("w") as log, vllm(args.vllm, args.model, log) as url:
            one("vLLM", url, {"priority": 1})
    if args.llama is not None:
        with (keep / "llama.log").open("w") as log, llama(args.llama, args.gguf, log) as url:
            one("llama.cpp", url, {})
    print("\n" + "\n".join(sentences))


if __name__ == "__main__":
    main()
