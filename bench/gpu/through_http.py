"""A real server on the device, loaded over HTTP, beside its engine alone.

The model has the shape of Llama 3 8B and random weights, written to a temporary directory with
the bundled tokenizer. Its greedy answers are words: the LM head's other rows are zero, so that
every token is text and every event one token. Several load clients share the streams, as one
would be what is measured.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from bench.gpu.device import Machine
from bench.gpu.models import LLAMA_8B, TINY_LLAMA, RandomModel, RandomReader, Sequences, run_plans
from bench.gpu.table import Bench
from bench.serving.server import Server, running_server
from lightserve.bundled import BUNDLED_MODEL_DIR
from lightserve.loadtest import result
from lightserve.models.weight_files import LM_HEAD, expected_tensors

LOAD_TEST = Path(__file__).parents[1] / "load_test.py"
STREAMS_PER_CLIENT = 32
MIN_RATIO = 0.9
BODY = {"temperature": 0.0, "ignore_eos": True}
"""So every answer has as many tokens as it may; min_tokens would change logits in each step."""
_WORD = re.compile("Ġ?[a-z]+")


@dataclass(frozen=True)
class Scale:
    """Sizes of the measurement."""

    shape: Mapping[str, Any]
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
    shape=LLAMA_8B,
    streams=(64, 256),
    prompt_tokens=(64, 192),
    output_tokens=(128, 512),
    duration_s=14.0,
    skip_first_s=5.0,
    server=("--http-workers", "4", "--host-kv-memory", "1GiB"),
    budget=2048,
    max_model_len=4096,
)
REHEARSED = Scale(
    shape=dict(TINY_LLAMA) | {"vocab_size": 4096, "max_position_embeddings": 512},
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
    """Compare output tokens per second."""
    scale = REHEARSED if bench.rehearse else GPU
    with TemporaryDirectory() as directory:
        model = RandomModel.make(Path(directory), scale.shape)
        write_weights(model, bench.machine)
        bench.machine.release()
        flags = (
            *("--model", directory, "--max-num-seqs", str(max(scale.streams))),
            *("--max-num-batched-tokens", str(scale.budget)),
            *("--max-model-len", str(scale.max_model_len), "--log-level", "warning"),
        )
        with running_server([*flags, *scale.server]) as server:
            served = {number: served_rate(server, scale, number) for number in scale.streams}
        alone = engine_rates(model, bench.machine, scale)
    for number in scale.streams:
        name = f"Llama-3-8B shape, {number} streams"
        bench.rows.figure(f"{name}: engine alone", alone[number], "tokens/s")
        through = served[number]
        note = f"the worker was idle for {through.idle_pct:.3g} % of that time"
        bench.rows.figure(f"{name}: through HTTP", through.tokens_per_s, "tokens/s", note=note)
        ratio = through.tokens_per_s / alone[number]
        bench.rows.figure(f"{name}: HTTP to engine", ratio, "x", at_least=MIN_RATIO)


def write_weights(model: RandomModel, machine: Machine) -> None:
    """Write random weights and the bundled tokenizer beside the model's config.json."""
    reader = RandomReader(model.config, dtype=torch.bfloat16, device=machine.device)
    files: dict[str, str] = {}
    for number, names in enumerate(_shards(model)):
        file = f"model-{number:05}.safetensors"
        tensors = {name: _tensor(reader, model, name).cpu() for name in names}
        save_file(tensors, model.path / file, metadata={"format": "pt"})
        files |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": files}
    (model.path / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_MODEL_DIR / name, model.path)


def _shards(model: RandomModel) -> Iterator[list[str]]:
    """Yield the names of each file's tensors: a layer, or one of the others."""
    by_layer: dict[str, list[str]] = {}
    for name in expected_tensors(model.config):
        parts = name.split(".")
        key = parts[2] if parts[1] == "layers" else name
        by_layer.setdefault(key, []).append(name)
    yield from by_layer.values()


def _tensor(reader: RandomReader, model: RandomModel, name: str) -> Tensor:
    shape = expected_tensors(model.config)[name]
    tensor = torch.empty(shape, dtype=reader.dtype, device=reader.device)
    reader.read_into(tensor, name)
    if name == LM_HEAD:
        vocab = json.loads((BUNDLED_MODEL_DIR / "tokenizer.json").read_text())["model"]["vocab"]
        words = [number for piece, number in vocab.items() if _WORD.fullmatch(piece)]
        is_word = torch.zeros(shape[0], 1, dtype=tensor.dtype)
        is_word[words] = 1
        tensor *= is_word.to(tensor.device)
    return tensor


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


def engine_rates(model: RandomModel, machine: Machine, scale: Scale) -> dict[int, float]:
    """Return the output tokens per second of the worker's loop with as many requests at once.

    All are prefilled, then all decode; the time is that of both.
    """
    length = scale.mean_prompt + scale.mean_output
    most = max(scale.streams)
    runner = model.runner(
        machine,
        max_num_seqs=most,
        max_num_batched_tokens=scale.budget,
        max_kv_tokens=most * length + 64,
        max_model_len=scale.max_model_len,
    )
    rates = {}
    for number in scale.streams:
        rows = Sequences(number, length, vocab_size=model.config.vocab_size)
        prefills = rows.prefills(scale.mean_prompt, budget=scale.budget)
        decodes = rows.decodes(scale.mean_prompt, scale.mean_output - 1)
        run_plans(runner, [*prefills, *decodes[:3]])
        run = run_plans(runner, [*prefills, *decodes])
        rates[number] = number * scale.mean_output / run.whole_s
    return rates
