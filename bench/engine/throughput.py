"""How fast the engine is, beside what this machine's memory and multipliers can do.

    python -m bench.engine.throughput [--rounds 5] [--only decode,generate] [--json]

A random Llama of 153 M parameters is written to a directory, loaded as the worker loads it, and
driven through `ModelRunner.execute`: tables, forward pass and sampling, with the plans that the
router would send. Ceilings are measured in the same run, everything in turns, several rounds;
figures are medians. On a machine with other work, two threads wait for each other more than they
compute: `--cpu-time` takes one thread's CPU time instead, for ceilings and engine alike.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.nn import functional as F
from transformers.utils import logging as transformers_logging

from lightserve.config import ServeConfig
from lightserve.messages.common import TokenSegment, pack_int32, unpack_int32
from lightserve.messages.router_worker import (
    AddSequence,
    OutputKind,
    PlanRow,
    SlotRange,
    StepPlan,
    pack_decodes,
)
from lightserve.types import RowId, SamplingParams, StepId
from lightserve.worker.build import build_runner
from lightserve.worker.model_runner import ModelRunner
from lightserve.worker.threads import set_threads

LAYERS, HIDDEN, INTERMEDIATE, VOCAB = 12, 768, 3072, 32_000
HEADS, KV_HEADS, HEAD_DIM = 12, 4, 64
MAX_LEN = 2304
PARTS = ("decode", "prefill", "generate", "invariant")

PROMPT, NUM_NEW = 128, 17
"""Tokens of each sequence in the comparison with transformers."""
PREFILL = 512
STEPS = 8
"""Decodes in a row, per measurement."""

Clock = Callable[[], float]
Work = Callable[[], list[float]]
"""Does something a few times and returns the seconds of each."""


def write_model(path: Path) -> None:
    """Write the random model, unless it is there already."""
    if (path / "config.json").exists():
        return
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=MAX_LEN,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)


# What a step reads and computes.

LAYER_LINEARS = (
    HIDDEN * (HEADS + 2 * KV_HEADS) * HEAD_DIM,
    HEADS * HEAD_DIM * HIDDEN,
    3 * HIDDEN * INTERMEDIATE,
)
"""Weights of one layer: qkv; attention output; gate, up and down."""


def decode_bytes(context: int, *, itemsize: int = 2) -> int:
    """Bytes that a decode of one row has to read: every weight but the embedding, and its KV."""
    weights = LAYERS * (sum(LAYER_LINEARS) + 2 * HIDDEN) + (VOCAB + 1) * HIDDEN
    return itemsize * (weights + LAYERS * 2 * KV_HEADS * HEAD_DIM * context)


def prefill_flops(num_tokens: int) -> int:
    """Operations of a prompt, a multiply-add counted as two.

    Attention counts half its square. Past the last layer's attention only the last token is
    computed, and only its logits.
    """
    qkv, out, mlp = LAYER_LINEARS
    linears = num_tokens * (LAYERS * qkv + (LAYERS - 1) * (out + mlp)) + out + mlp + VOCAB * HIDDEN
    scores = LAYERS * HEADS * HEAD_DIM * num_tokens * (num_tokens + 1) // 2
    return 2 * linears + 2 * 2 * scores


# The engine, driven as the router drives it.


class Driver:
    """Sequences of one runner."""

    def __init__(self, runner: ModelRunner, clock: Clock, num_seqs: int, length: int) -> None:
        rng = np.random.default_rng(0)
        self._runner, self._clock = runner, clock
        self._slots = np.arange(num_seqs * length, dtype=np.int32).reshape(num_seqs, length)
        self._prompts = rng.integers(0, VOCAB, (num_seqs, length), dtype=np.int32)
        self._step = 0

    def fill(self, context: int) -> None:
        """Compute the first `context` tokens of every sequence."""
        for row in range(len(self._slots)):
            for start in range(0, context, PREFILL):
                self.chunk(row, start, min(PREFILL, context - start))

    def chunk(self, row: int, start: int, num_tokens: int) -> float:
        """Return the seconds of one prefill chunk that gives a token."""
        tokens = TokenSegment(token_ids=pack_int32(self._prompts[row]))
        sequence = AddSequence(
            RowId(row), [tokens], SamplingParams(temperature=0.0), len(self._prompts[row]), []
        )
        return self._execute([sequence], [(row, start, num_tokens)])

    def decode(self, num_seqs: int, position: int) -> float:
        """Return the seconds of one decode of the first `num_seqs` sequences."""
        return self._execute([], [(row, position, 1) for row in range(num_seqs)])

    def decodes(self, num_seqs: int, context: int, num_steps: int = STEPS) -> list[float]:
        """Return the seconds of successive decodes from `context` cached tokens on."""
        return [self.decode(num_seqs, context + step) for step in range(num_steps)]

    def _execute(self, sequences: list[AddSequence], work: list[tuple[int, int, int]]) -> float:
        decodes = [part[:2] for part in work if part[2] == 1 and not sequences]
        rows, starts = np.array(decodes, dtype=np.int32).reshape(-1, 2).T
        chunks = work if not decodes else [part for part in work if part[2] > 1]
        plan = StepPlan(
            step_id=StepId(self._step),
            sequences=sequences,
            slot_ranges=[
                SlotRange(RowId(row), start, pack_int32(self._slots[row, start : start + count]))
                for row, start, count in chunks
            ],
            rows=[PlanRow(RowId(row), start, n, OutputKind.SAMPLE) for row, start, n in chunks],
            decodes=pack_decodes(rows, starts, self._slots[rows, starts]),
        )
        self._step += 1
        start_s = self._clock()
        result = self._runner.execute(plan)
        seconds = self._clock() - start_s
        assert len(unpack_int32(result.token_ids)) == len(work) and not result.rows
        return seconds


# transformers on the same weights.


class StepClock(transformers.StoppingCriteria):
    """Never stops; notes when each token came."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.times_s: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.times_s.append(self._clock())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def generate(model: Any, clock: Clock, num_seqs: int) -> list[float]:
    """Return the seconds of each greedy decode step of transformers' `generate`."""
    criterion = StepClock(clock)
    with torch.inference_mode():
        model.generate(
            torch.randint(0, VOCAB, (num_seqs, PROMPT)),
            max_new_tokens=NUM_NEW,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=[criterion],
        )
    return np.diff(criterion.times_s).tolist()


# Ceilings.


def read_bandwidth(clock: Clock) -> dict[str, Work]:
    """Return passes over 256 MiB, far more than any cache, by name."""
    wide = torch.ones(2**28 // 4)
    integers = torch.ones(2**28 // 8, dtype=torch.int64)
    matrix, vector = wide.view(-1, 4096), torch.ones(4096)
    return {
        "read: sum of float32": lambda: timed(clock, wide.sum),
        "read: sum of int64": lambda: timed(clock, integers.sum),
        "read: dot": lambda: timed(clock, lambda: torch.dot(wide, wide)),
        "read: matrix by vector": lambda: timed(clock, lambda: torch.mv(matrix, vector)),
    }


def matrix_rate(clock: Clock, dtype: torch.dtype) -> dict[str, Work]:
    """Return products of 2 * 2048^3 operations, by name."""
    a, b = torch.randn(2, 2048, 2048).to(dtype).unbind(0)
    packed = torch.ops.mkldnn._reorder_linear_weight(b)
    name = str(dtype).removeprefix("torch.")
    return {
        f"{name}: matmul": lambda: timed(clock, lambda: a @ b),
        f"{name}: linear": lambda: timed(clock, lambda: F.linear(a, b)),
        f"{name}: packed linear": lambda: timed(
            clock, lambda: torch.ops.mkldnn._linear_pointwise(a, packed, None, "none", [], "")
        ),
    }


def timed(clock: Clock, work: Callable[[], Any], times: int = 3) -> list[float]:
    """Return the seconds of each of several calls."""
    seconds = []
    for _ in range(times):
        start_s = clock()
        work()
        seconds.append(clock() - start_s)
    return seconds


# All together.


@dataclass(frozen=True)
class Figure:
    """A line of the report."""

    name: str
    value: float
    unit: str
    target: str = ""
    met: bool | None = None


class Bench:
    """Works to be timed in turns, and the seconds that they took."""

    def __init__(self, model_dir: Path, parts: Sequence[str], threads: int, clock: Clock) -> None:
        self._model_dir, self._threads, self._clock = model_dir, threads, clock
        self.parts = parts
        self.works: dict[str, Work] = {}
        self.seconds: dict[str, list[float]] = defaultdict(list)
        plain = self._runner()
        ordered = Driver(plain, clock, 33, 640)
        ordered.fill(PROMPT)
        if "decode" in parts or "invariant" in parts:
            self.works |= read_bandwidth(clock)
            self.works["decode 1"] = lambda: ordered.decodes(1, PROMPT)
        if "prefill" in parts:
            self.works |= matrix_rate(clock, torch.bfloat16)
            self.works |= matrix_rate(clock, torch.float32)
            self.works["prefill"] = lambda: [ordered.chunk(32, 0, PREFILL)]
        if "generate" in parts:
            model = transformers.AutoModelForCausalLM.from_pretrained(model_dir)
            for n in (1, 8, 32):
                self.works[f"decode {n}"] = lambda n=n: ordered.decodes(n, PROMPT, NUM_NEW - 1)
                self.works[f"generate {n}"] = lambda n=n: generate(model, clock, n)
        if "invariant" in parts:
            self._add_invariant()

    def _runner(self, **flags: Any) -> ModelRunner:
        config = ServeConfig(
            model=str(self._model_dir), num_threads=self._threads, kv_memory="1GiB", **flags
        )
        set_threads(config)
        return build_runner(config)

    def _add_invariant(self) -> None:
        for name, flag in (("default", False), ("invariant", True)):
            runner = self._runner(dtype="float32", batch_invariant=flag)
            driver = Driver(runner, self._clock, 33, 640)
            driver.fill(PROMPT)
            self.works |= {
                f"float32 {name}: decode 1": lambda d=driver: d.decodes(1, PROMPT),
                f"float32 {name}: decode 32": lambda d=driver: d.decodes(32, PROMPT),
                f"float32 {name}: prefill {PREFILL}": lambda d=driver: [d.chunk(32, 0, PREFILL)],
            }

    def run(self, rounds: int) -> None:
        """Time everything once per round, after a round that does not count."""
        for number in range(rounds + 1):
            for name, work in self.works.items():
                seconds = work()
                if number > 0:
                    self.seconds[name] += seconds


def report(bench: Bench, quantile: float) -> Iterator[Figure]:
    """Turn seconds into figures."""
    time_of = {
        name: float(np.quantile(seconds, quantile)) for name, seconds in bench.seconds.items()
    }

    def best(prefix: str) -> float:
        return min(seconds for name, seconds in time_of.items() if name.startswith(prefix))

    def at_least(name: str, value: float, limit: float, unit: str) -> Figure:
        return Figure(name, value, unit, f">= {limit:g}", value >= limit)

    if "decode" in bench.parts:
        bandwidth = 2**28 / best("read: ")
        rate = decode_bytes(PROMPT + STEPS // 2) / time_of["decode 1"]
        yield Figure("read bandwidth", bandwidth / 1e9, "GB/s")
        yield Figure("decode, batch 1", 1e3 * time_of["decode 1"], "ms")
        yield Figure("decode, batch 1: weights and KV read", rate / 1e9, "GB/s")
        yield at_least("  of the read bandwidth", 100 * rate / bandwidth, 50, "%")
    if "prefill" in bench.parts:
        flops, wide = (2 * 2048**3 / best(f"{name}: ") for name in ("bfloat16", "float32"))
        rate = prefill_flops(PREFILL) / time_of["prefill"]
        yield Figure("matrix rate, float32", wide / 1e9, "GFLOP/s")
        yield Figure("matrix rate, bfloat16", flops / 1e9, "GFLOP/s")
        yield Figure(f"prefill of {PREFILL}", 1e3 * time_of["prefill"], "ms")
        yield Figure(f"prefill of {PREFILL}: rate", rate / 1e9, "GFLOP/s")
        yield at_least("  of the matrix rate", 100 * rate / flops, 40, "%")
    if "generate" in bench.parts:
        for n in (1, 8, 32):
            ours, theirs = time_of[f"decode {n}"], time_of[f"generate {n}"]
            yield Figure(f"decode, batch {n}", n / ours, "tokens/s")
            yield Figure(f"transformers, batch {n}", n / theirs, "tokens/s")
            name, ratio = f"  ratio, batch {n}", theirs / ours
            yield at_least(name, ratio, 2, "x") if n == 32 else Figure(name, ratio, "x")
    for name, seconds in time_of.items():
        kind, _, work = name.partition(": ")
        if kind == "float32 invariant":
            ratio = seconds / time_of[f"float32 default: {work}"]
            yield Figure(f"float32, {work}", 1e3 * (seconds / ratio), "ms")
            yield Figure(f"  --batch-invariant/default, {work}", ratio, "x")


def print_table(figures: Sequence[Figure]) -> None:
    """Print Markdown."""
    print("| figure | value | target | |\n| --- | --- | --- | --- |")
    for figure in figures:
        verdict = {None: "", True: "ok", False: "MISSED"}[figure.met]
        print(f"| {figure.name} | {figure.value:.4g} {figure.unit} | {figure.target} | {verdict} |")


@contextmanager
def model_directory(path: Path | None) -> Iterator[Path]:
    """Yield the directory that was asked for, or a temporary one."""
    if path is not None:
        yield path
        return
    with tempfile.TemporaryDirectory() as temporary:
        yield Path(temporary)


def main() -> None:
    """Run the parts that were asked for; exit code 1 if a target is missed."""
    if "THP_MEM_ALLOC_ENABLE" not in os.environ:  # as the supervisor starts workers
        os.environ["THP_MEM_ALLOC_ENABLE"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two rounds")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--quantile", type=float, default=0.5, help="of each measurement's seconds")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--cpu-time", action="store_true", help="of one thread")
    parser.add_argument("--model-dir", type=Path, help="keep the model here, or find it there")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("lightserve").setLevel(logging.WARNING)
    with model_directory(arguments.model_dir) as path:
        write_model(path)
        threads = 1 if arguments.cpu_time else arguments.threads
        clock = time.thread_time if arguments.cpu_time else time.perf_counter
        bench = Bench(path, arguments.only.split(","), threads, clock)
        gc.collect()
        gc.freeze()
        bench.run(2 if arguments.quick else arguments.rounds)
    figures = list(report(bench, arguments.quantile))
    if arguments.json:
        print(json.dumps([asdict(figure) for figure in figures], indent=2))
    else:
        print_table(figures)
    raise SystemExit(any(figure.met is False for figure in figures))


if __name__ == "__main__":
    main()
