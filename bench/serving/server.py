"""Starts a real server for a benchmark and looks at its processes from outside.

For figures over time the server is pinned: the worker has one core to itself (`--num-threads 1`:
two OpenMP threads that wait for each other measure whatever else the cores do). The load client is
pinned to the other core, which it shares with the frontend and the router; its CPU is part of every
result.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx
import psutil

from lightserve.bundled import BUNDLED_MODEL_DIR
from lightserve.child import end_with_parent
from lightserve.loadtest import result
from lightserve.loadtest.result import Run

READY_PREFIX = "lightserve: ready on "


@dataclass(frozen=True)
class Server:
    """A running `lightserve serve`."""

    url: str
    model: str
    process: subprocess.Popen[str]

    def tree(self) -> dict[str, psutil.Process]:
        """Return the server's processes by role, such as "router" or "worker-0"."""
        roles = {"supervisor": psutil.Process(self.process.pid)}
        for child in roles["supervisor"].children(recursive=True):
            roles[child.name() if child.name() not in roles else f"{child.name()}-{child.pid}"] = (
                child
            )
        return roles

    def health(self) -> dict[str, float]:
        """Return /health once the router has reported anew (it does so once a second)."""
        time.sleep(1.2)
        answer: dict[str, float] = httpx.get(f"{self.url}/health").json()
        return answer


@contextmanager
def running_server(
    args: Sequence[str] = (), *, prefix: Sequence[str] = (), log: IO[str] | None = None
) -> Iterator[Server]:
    """Start a server with the bundled model on a free port; end it with SIGTERM.

    `prefix` is a command that becomes the server, such as `prlimit`; `log` gets its stderr. A
    program that is killed ends its server as well: the kernel sends SIGTERM in its place.
    """
    own = ["--port", "0", "--metrics-port", "0", "--batch-store", "none"]
    command = [*prefix, sys.executable, "-m", "lightserve.cli.main", "serve", *own, *args]
    own_pid = os.getpid()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env=os.environ.copy(),
        preexec_fn=lambda: end_with_parent(own_pid, signal.SIGTERM),  # noqa: PLW1509 - one system call
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(READY_PREFIX):
                url, model = (
                    line.removeprefix(READY_PREFIX).strip().removesuffix(")").split(" (model ")
                )
                yield Server(url, model, process)
                return
        raise SystemExit(f"the server did not start: exit code {process.wait()}")
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


LAYERS = 17
"""With the vocabulary of the bundled tokenizer: 150 M parameters."""
ONE_THREAD = ("--num-threads", "1")
QUIET = ("--log-level", "warning")
_WORD = re.compile("Ġ?[a-z]+")
_BODY = json.dumps({"temperature": 0.0})


def worker_core() -> int:
    """Return the core of the workers: the first one."""
    return min(os.sched_getaffinity(0))


def other_cores() -> set[int]:
    """Return the cores of everything else; the same one if there is no other."""
    cores = os.sched_getaffinity(0)
    return cores - {worker_core()} or cores


def load_average() -> str:
    """Return the system's load averages over 1, 5 and 15 minutes."""
    return " / ".join(f"{value:.1f}" for value in os.getloadavg())


def write_random_model(path: Path, **sizes: int) -> None:
    """Write a random Llama, of 150 M parameters or `sizes`, whose greedy answers are words.

    The sizes are fields of its configuration. It has the bundled tokenizer. The logits of all
    tokens but words are 0, so that the largest one is a word's, every token has text, and every
    event is one token.
    """
    import torch  # noqa: PLC0415 - most benchmarks need no model of their own
    import transformers  # noqa: PLC0415

    from bench.engine.throughput import (  # noqa: PLC0415
        HEADS,
        HIDDEN,
        INTERMEDIATE,
        KV_HEADS,
        MAX_LEN,
    )

    torch.manual_seed(0)
    vocab = json.loads((BUNDLED_MODEL_DIR / "tokenizer.json").read_text())["model"]["vocab"]
    config = transformers.LlamaConfig(
        vocab_size=json.loads((BUNDLED_MODEL_DIR / "config.json").read_text())["vocab_size"],
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
        dtype="bfloat16",
        **{  # type: ignore[arg-type]
            "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "max_position_embeddings": MAX_LEN,
            **sizes,
        },
    )
    model = transformers.LlamaForCausalLM(config).bfloat16()
    words = [number for piece, number in vocab.items() if _WORD.fullmatch(piece)]
    is_word = torch.zeros(config.vocab_size, 1, dtype=torch.bfloat16)
    is_word[words] = 1
    with torch.no_grad():
        model.lm_head.weight *= is_word
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_MODEL_DIR / name, path)


def write_profile(path: Path, args: Sequence[str], *, seconds: float) -> None:
    """Measure step times on the workers' core; `args` are the server's that matter for them."""
    subprocess.run(
        [
            *(sys.executable, "-m", "lightserve.cli.main", "profile", *ONE_THREAD, *args),
            *("--seconds", str(seconds), "--output", str(path)),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: os.sched_setaffinity(0, {worker_core()}),
    )


@contextmanager
def pinned_server(args: Sequence[str] = ()) -> Iterator[Server]:
    """Start a server whose worker has a core to itself, as far as there are several."""
    with running_server([*ONE_THREAD, *QUIET, *args]) as server:
        for role, process in server.tree().items():
            cores = {worker_core()} if role.startswith("worker") else other_cores()
            for thread in Path(f"/proc/{process.pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), cores)
        yield server


def load(server: Server, *args: str, forced: bool = True) -> Run:
    """Run the load client, pinned.

    Answers are greedy and exactly as long as drawn, unless not `forced`: then they are chats that
    end by themselves.
    """
    exact = ("--endpoint", "completions", "--force-lengths", "--body", _BODY)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        finished = subprocess.run(
            [
                *(
                    sys.executable,
                    "-m",
                    "lightserve",
                    "bench",
                    "--url",
                    server.url,
                    "--model",
                    server.model,
                ),
                *(exact if forced else ()),
                "--quiet",
                *("--output", file.name, *args),
            ],
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, other_cores()),
        )
        if finished.returncode == 2 or not Path(file.name).stat().st_size:
            raise SystemExit(f"the load client failed: {finished.stdout[-2000:]}")
        return result.load(Path(file.name))[0]
