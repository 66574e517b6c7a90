"""A real server on the device, loaded over HTTP, beside its engine alone.

Several load clients share the streams, as one would be what is measured.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import httpx
import numpy as np

from bench.gpu.device import Machine
from bench.gpu.models import WARM_STEPS, RandomModel, Sequences, device_busy_s, run_plans
from bench.gpu.table import Bench
from bench.gpu.weights import served_model
from bench.serving.server import Server, running_server
from lightserve.loadtest import result
from lightserve.worker.model_runner import ModelRunner

LOAD_TEST = Path(__file__).parents[1] / "load_test.py"
STREAMS_PER_CLIENT = 32
MIN_RATIO = 0.95
MAX_SHORT_RATIO = 1.7
SHORT_PROMPT, NUM_SHORT = 41, 30
NAME = "Llama-3-8B shape"
SHORT_NAME = f"{NAME}, {SHORT_PROMPT} tokens through HTTP, one token"
BODY = {"temperature": 0.0, "ignore_eos": True}
"""So every answer has as many tokens as it may; min_tokens would change logits in each step."""


@dataclass(frozen=True)
class Scale:
    """Sizes of the measurement."""

    streams: Sequence[int]
    prompt_tokens: tuple[int, int]
    """Uniform between these; so are outputs."""
    output_tokens: tuple[int, int]
    duration_s: float
    skip_first_s: float
    server: Sequence[str]
    budget: int
    """--max-num-batched-tokens, of the engine alone as well."""
    max_model_len: int
    """--max-model-len, of both."""

    @property
    def mean_prompt(self) -> int:
        """Tokens."""
        return sum(self.prompt_tokens) // 2

    @property
    def mean_output(self) -> int:
        """Tokens."""
        return sum(self.output_tokens) // 2


GPU = Scale(
    streams=(64, 256),
    prompt_tokens=(64, 192),
    output_tokens=(128, 512),
    duration_s=11.0,
    skip_first_s=4.0,
    server=("--http-workers", "4", "--host-kv-memory", "1GiB", "--prefix-host-memory=0"),
    budget=2048,
    max_model_len=4096,
)
REHEARSED = Scale(
    streams=(2,),
    prompt_tokens=(8, 12),
    output_tokens=(8, 16),
    duration_s=1.5,
    skip_first_s=0.5,
    server=("--num-threads", "1", "--kv-memory", "8MiB", "--profile", "off"),
    budget=64,
    max_model_len=256,
)


def through_http(bench: Bench) -> None:
    """Compare output tokens per second, and what a short prompt takes on an idle server."""
    scale = REHEARSED if bench.rehearse else GPU
    model = served_model(bench)
    flags = (
        *("--model", str(model.path), "--max-num-seqs", str(max(scale.streams))),
        *("--max-num-batched-tokens", str(scale.budget)),
        *("--max-model-len", str(scale.max_model_len), "--log-level", "warning"),
    )
    # Rows are written as they come: a part that is ended keeps them.
    with running_server([*flags, *scale.server]) as server:
        short_s = short_prompts(server, vocab_size=model.config.vocab_size)
        bench.rows.figure(SHORT_NAME, 1e3 * short_s, "ms")
        served = {}
        for number in scale.streams:
            through = served[number] = served_rate(server, scale, number)
            note = f"the worker was idle for {through.idle_pct:.3g} % of that time"
            name = f"{NAME}, {number} streams: through HTTP"
            bench.rows.figure(name, through.tokens_per_s, "tokens/s", note=note)
    runner = engine(model, bench.machine, scale)
    for number in scale.streams:
        alone = engine_rate(runner, model, scale, number)
        bench.rows.figure(f"{NAME}, {number} streams: engine alone", alone, "tokens/s")
        ratio = served[number].tokens_per_s / alone
        name = f"{NAME}, {number} streams: HTTP to engine"
        bench.rows.figure(name, ratio, "x", at_least=MIN_RATIO)
    _report_short(bench, runner, model, short_s)


def short_prompts(server: Server, *, vocab_size: int) -> float:
    """Return the median seconds of a request for one token, one after the other."""
    rng = np.random.default_rng(0)
    seconds = []
    with httpx.Client(timeout=60.0) as client:
        for _ in range(WARM_STEPS + NUM_SHORT):
            prompt = rng.integers(0, vocab_size, SHORT_PROMPT).tolist()
            body = {"model": server.model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
            start_s = time.perf_counter()
            client.post(f"{server.url}/v1/completions", json=body).raise_for_status()
            seconds.append(time.perf_counter() - start_s)
            time.sleep(0.02)  # the server is idle again
    return statistics.median(seconds[WARM_STEPS:])


def _report_short(bench: Bench, runner: ModelRunner, model: RandomModel, short_s: float) -> None:
    """Report a short prompt over HTTP by the device's time of its pass."""
    row = Sequences(1, SHORT_PROMPT + 1, vocab_size=model.config.vocab_size)
    plans = row.prefills(SHORT_PROMPT, budget=SHORT_PROMPT) * NUM_SHORT
    run_plans(runner, plans)
    name = f"{SHORT_NAME}: to the pass on the device"
    busy_s = device_busy_s(bench, runner, plans)
    if busy_s is None:
        bench.rows.skip(name, "nothing ran on a device")
        return
    note = f"the pass {1e3 * busy_s:.4g} ms"
    bench.rows.figure(name, short_s / busy_s, "x", at_most=MAX_SHORT_RATIO, note=note)


class Served(NamedTuple):
    """What a load came to."""

    tokens_per_s: float
    """Output tokens, as all clients together saw them in a steady state."""
    idle_pct: float
    """Share of the load's time in which the worker had no step, its first and last seconds too."""


def served_rate(server: Server, scale: Scale, num_streams: int) -> Served:
    """Load the server with so many streams.

    Raises:
        RuntimeError: a client failed, or requests did.
    """
    before = server.health()
    per_client = min(num_streams, STREAMS_PER_CLIENT)
    with TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        paths = [Path(directory) / f"{n}.json" for n in range(num_streams // per_client)]
        clients = [stack.enter_context(_client(server, scale, per_client, path)) for path in paths]
        outputs = [client.communicate()[0] for client in clients]
        if failed := [out for out, path in zip(outputs, paths, strict=True) if not path.exists()]:
            raise RuntimeError(f"the load client failed: {failed[0][-300:]}")
        classes = [result.load(path)[0].classes["rt"] for path in paths]
    if errors := [one.errors for one in classes if one.errors]:
        raise RuntimeError(f"requests failed: {errors[0]}")
    after = server.health()
    busy_s, idle_s = (after[key] - before[key] for key in ("worker_busy_s", "worker_idle_s"))
    rate = sum(one.output_tokens_per_s for one in classes)
    return Served(rate, 100 * idle_s / (busy_s + idle_s))


@contextlib.contextmanager
def _client(
    server: Server, scale: Scale, num_streams: int, path: Path
) -> Iterator[subprocess.Popen[str]]:
    """Run a load client with `num_streams` requests in flight; it writes its result to `path`."""
    lengths = (":".join(map(str, bounds)) for bounds in (scale.prompt_tokens, scale.output_tokens))
    prompt_tokens, output_tokens = lengths
    command = (
        *(sys.executable, str(LOAD_TEST), "--url", server.url, "--model", server.model),
        *("--endpoint", "completions", "--body", json.dumps(BODY), "--quiet"),
        *("--prompt-tokens", prompt_tokens, "--output-tokens", output_tokens),
        *("--concurrency", str(num_streams), "--duration-s", str(scale.duration_s)),
        *("--skip-first-s", str(scale.skip_first_s), "--skip-last-s", "0.2"),
        *("--output", str(path)),
    )
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def engine(model: RandomModel, machine: Machine, scale: Scale) -> ModelRunner:
    """Return the worker's runner alone, with room for as many requests as the server had."""
    length = scale.mean_prompt + scale.mean_output
    most = max(scale.streams)
    return model.runner(
        machine,
        max_num_seqs=most,
        max_num_batched_tokens=scale.budget,
        max_kv_tokens=most * length + 64,
        max_model_len=scale.max_model_len,
    )


def engine_rate(runner: ModelRunner, model: RandomModel, scale: Scale, number: int) -> float:
    """Return the output tokens per second of the worker's loop with as many requests at once.

    All are prefilled, then all decode; the time is that of both.
    """
    length = scale.mean_prompt + scale.mean_output
    rows = Sequences(number, length, vocab_size=model.config.vocab_size)
    prefills = rows.prefills(scale.mean_prompt, budget=scale.budget)
    decodes = rows.decodes(scale.mean_prompt, scale.mean_output - 1)
    run_plans(runner, [*prefills, *decodes[:3]])
    run = run_plans(runner, [*prefills, *decodes])
    return number * scale.mean_output / run.whole_s
