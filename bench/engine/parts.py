"""Parts of a step on a CPU, each by itself.

python -m bench.engine.parts host [--rows 1 64 256] [--steps 300] [--profile]
    what a step costs the host of a GPU: decodes, and `mixed` steps whose last row is a new prompt
    of 512 tokens. Graphs do nothing, kernels are compiled and their launches do nothing (see
    `tools.triton_offline`), one thread. While a step runs on a GPU the host has that long for the
    next one; a GPU adds what its driver takes per launch
python -m bench.engine.parts products [--threads 2] [--rows 1,8,32] [--rounds 7] [--cpu-time]
    [--weights core int8 int4]
    how fast the native core multiplies by its own weights, those of 8 and of 4 bits, and torch
    by its packed ones, in turns: GB/s of weights, TFLOP/s. On a machine with other work
    `--cpu-time` with one thread takes that thread's CPU time instead. What the machine can do
    says `ceilings.cpp`
python -m bench.engine.parts steps --model DIR [--threads 2] [--quantization int8] [--cpu-time]
    [--steps 1,32,p512,p512+1536]
    where a step's time goes: decodes, or a prompt's tokens behind as many of its own; ms by
    operation of the native core, what is left for Python and torch, and page faults. Layers are
    not recorded for that; `--recorded` gives only what a step takes as it is served. Behind it
    stands what share of the ceiling products, attention and the whole step reach: the best of
    products of 256 rows by a weight that stays in the cache, in turns with the steps
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import dataclasses
import itertools
import math
import pstats
import sys
import time
from collections.abc import Callable, Sequence
from resource import RUSAGE_SELF, getrusage
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn, cast
from unittest import mock

import msgspec
import torch
from torch import Tensor

from lightserve.config import ServeConfig
from lightserve.kernels.cpu.core import Level, load_core
from lightserve.kernels.cpu.default import TorchKernels
from lightserve.kernels.cpu.native import NativeKernels
from lightserve.kernels.interface import NotRecordableError
from lightserve.messages.common import TokenSegment, pack_int32
from lightserve.messages.router_worker import (
    AddSequence,
    OutputKind,
    PlanRow,
    SlotRange,
    StepPlan,
    pack_decodes,
)
from lightserve.models.base import KVGroup, KVLayout, Model, SingleRank
from lightserve.types import RowId, SamplingParams, StepId
from lightserve.worker.build import build_runner
from lightserve.worker.device import CudaQueue, HostMark, Mark
from lightserve.worker.graphs import DecodeGraphs, MemoryUse, ladder
from lightserve.worker.host_pool import DirectHostPool
from lightserve.worker.memory import KVPool
from lightserve.worker.mixed_graphs import MixedGraphs, mixed_ladder
from lightserve.worker.model_runner import ModelRunner
from lightserve.worker.profiling import Row, StepTimer
from lightserve.worker.sampling import sampler
from lightserve.worker.sampling.device import sample_on_device
from lightserve.worker.sampling.interface import SamplingBatch, Tokens
from lightserve.worker.threads import set_threads
from tools.triton_offline import loading

VOCAB_SIZE = 128_256
CONTEXT_LEN = 4096
PROMPT_LEN = 16
CHUNK_LEN = 512
CAPABILITY = 90
PARTS = ("read plan", "launch", "finish", "write result")
HOST_OPTIONS = {
    "greedy": SamplingParams(temperature=0.0),
    "random": SamplingParams(temperature=1.0, seed=7),
    "top-p": SamplingParams(temperature=1.0, top_p=0.9, seed=7),
}


class NullModel:
    """A model whose pass takes no time."""

    config = SimpleNamespace(vocab_size=VOCAB_SIZE, hidden_size=1)
    context_len = CONTEXT_LEN

    def __init__(self, num_rows: int) -> None:
        self._logits = torch.zeros(num_rows, VOCAB_SIZE)

    def hidden(self, input_ids: Tensor, batch: Any, kv: Any, rows: Tensor | None) -> Tensor:
        return torch.zeros(len(input_ids) if rows is None else len(rows), 1)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return self._logits[: len(hidden)] if out is None else out.zero_()


class PackingQueue(CudaQueue):
    """A GPU's, which packs what goes up and copies what comes down, on memory of any kind."""

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def mark(self) -> Mark:
        return HostMark()


class NullRecorder:
    """Runs what is recorded, and repeats nothing."""

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        function()
        return lambda: None

    def memory(self) -> MemoryUse:
        return MemoryUse(0, 0)


def drawn_as_on_gpu(logits: Tensor, batch: SamplingBatch) -> Tokens:
    """Launch the kernels that draw, which do nothing, and return what they would of finite rows."""
    drawn = sample_on_device(logits, batch)
    return Tokens(drawn.token_ids.zero_(), drawn.is_finite.fill_(True))


def make_runner(num_rows: int) -> ModelRunner:
    device = torch.device("cpu")
    layout = KVLayout((KVGroup(num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32"),))
    pool = KVPool(layout, num_rows * CONTEXT_LEN, device)
    model = cast(Model, NullModel(num_rows))
    runner = ModelRunner(
        model,
        pool,
        SingleRank(),
        host_pool=DirectHostPool(0, pool),
        queue=PackingQueue(device),
        max_num_seqs=num_rows,
    )
    graphs = DecodeGraphs(
        model,
        pool,
        runner.tables,
        sizes=ladder(num_rows),
        recorder=NullRecorder(),
        has_logits=True,
    )
    graphs.capture()
    mixed = MixedGraphs(
        model, pool, runner.tables, sizes=mixed_ladder(1024), recorder=NullRecorder()
    )
    mixed.capture()
    runner.use_graphs(graphs, mixed)
    return runner


def first_plan(num_rows: int, params: SamplingParams) -> StepPlan:
    prompt = TokenSegment(token_ids=pack_int32([3] * PROMPT_LEN))
    rows = [RowId(row) for row in range(num_rows)]
    return StepPlan(
        step_id=StepId(0),
        sequences=[AddSequence(row, [prompt], params, PROMPT_LEN, []) for row in rows],
        slot_ranges=[_slots(row, 0, PROMPT_LEN) for row in rows],
        rows=[PlanRow(row, 0, PROMPT_LEN, OutputKind.SAMPLE) for row in rows],
    )


def decode_plan(num_rows: int, step: int) -> bytes:
    """Return the message: each row has one new token, in a slot that it got just now."""
    at = PROMPT_LEN + step
    rows = range(num_rows)
    slots = [row * CONTEXT_LEN + at for row in rows]
    return msgspec.msgpack.encode(
        StepPlan(
            step_id=StepId(step + 1),
            sequences=[],
            slot_ranges=[],
            rows=[],
            decodes=pack_decodes(rows, [at] * num_rows, slots),
        )
    )


def mixed_plan(num_rows: int, step: int, params: SamplingParams) -> bytes:
    """Return the message of as many rows, the last of which is another prompt in each step."""
    at, prompt = PROMPT_LEN + step, TokenSegment(token_ids=pack_int32([3] * CHUNK_LEN))
    rows, last = range(num_rows - 1), RowId(num_rows - 1)
    return msgspec.msgpack.encode(
        StepPlan(
            step_id=StepId(step + 1),
            sequences=[AddSequence(last, [prompt], params, CHUNK_LEN, [])],
            slot_ranges=[_slots(last, 0, CHUNK_LEN)],
            rows=[PlanRow(last, 0, CHUNK_LEN, OutputKind.SAMPLE)],
            decodes=pack_decodes(rows, [at] * len(rows), [row * CONTEXT_LEN + at for row in rows]),
        )
    )


def _slots(row: RowId, start: int, count: int) -> SlotRange:
    first = row * CONTEXT_LEN + start
    return SlotRange(row, start, pack_int32(range(first, first + count)))


def measure_host(
    num_rows: int, params: SamplingParams, num_steps: int, *, is_mixed: bool
) -> list[float]:
    """Return the median seconds of CPU time of each of `PARTS`."""
    runner = make_runner(num_rows)
    runner.execute(first_plan(num_rows, params))
    plans = [
        mixed_plan(num_rows, step, params) if is_mixed else decode_plan(num_rows, step)
        for step in range(num_steps)
    ]
    decoder = msgspec.msgpack.Decoder(StepPlan)
    encoder = msgspec.msgpack.Encoder()
    times: list[tuple[float, ...]] = []
    for data in plans:
        start_s = time.thread_time()
        plan = decoder.decode(data)
        read_s = time.thread_time()
        pending = runner.launch(plan)
        launched_s = time.thread_time()
        result = runner.finish(pending)
        finished_s = time.thread_time()
        encoder.encode(result)
        end_s = time.thread_time()
        times.append(
            (read_s - start_s, launched_s - read_s, finished_s - launched_s, end_s - finished_s)
        )
    return [median(part) for part in zip(*times[num_steps // 10 :], strict=True)]


def host() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    kinds = [(is_mixed, name) for is_mixed in (False, True) for name in HOST_OPTIONS]
    print(f"{'µs per step':20}" + "".join(f"{part:>14}" for part in (*PARTS, "all")))
    # Tensors are on the host, but rows are drawn as on a GPU.
    as_on_gpu = mock.patch.object(sampler, "_sample", drawn_as_on_gpu)
    with loading(CAPABILITY), as_on_gpu:
        for (is_mixed, name), num_rows in itertools.product(kinds, args.rows):
            profile = cProfile.Profile()
            if args.profile:
                profile.enable()
            parts = measure_host(num_rows, HOST_OPTIONS[name], args.steps, is_mixed=is_mixed)
            profile.disable()
            cells = "".join(f"{1e6 * part:14.0f}" for part in (*parts, sum(parts)))
            label = f"{'mixed ' if is_mixed else ''}{name} {num_rows}"
            print(f"{label:20}{cells}", flush=True)
            if args.profile:
                pstats.Stats(profile).sort_stats("tottime").print_stats(25)


SHAPES = ((1152, 896), (896, 896), (9728, 896), (896, 4864))
"""(outputs, inputs) of a layer's products."""
LAYERS = 8
GROUP_SIZE = 32
"""Of weights of 4 bits."""
KINDS = ("core", "torch", "int8", "int4")


class Product(NamedTuple):
    """One weight, packed by some kernels."""

    call: Callable[[Tensor], object]
    num_inputs: int
    num_bytes: int


def packed(name: str, dtype: torch.dtype, level: Level | None) -> list[Product]:
    """Return the weights of all layers, of one of `KINDS`."""
    return [
        product_of(name, torch.randn(shape).to(dtype) * shape[1] ** -0.5, level)
        for _ in range(LAYERS)
        for shape in SHAPES
    ]


def product_of(name: str, plain: Tensor, level: Level | None) -> Product:
    """Return the product by one weight."""
    num_inputs = plain.shape[1]
    native = NativeKernels(level=level)
    if name == "int8":
        rounded = native.quantize(plain)
        num_bytes = rounded.packed.nbytes + rounded.factors.nbytes
        return Product(lambda x: native.linear(x, rounded, None), num_inputs, num_bytes)
    if name == "int4":
        grouped = native.quantize_groups(plain, GROUP_SIZE)
        num_bytes = sum(part.nbytes for part in (grouped.packed, grouped.factors, grouped.zeros))
        return Product(lambda x: native.linear(x, grouped, None), num_inputs, num_bytes)
    kernels = TorchKernels() if name == "torch" else native
    weight = kernels.pack_weight(plain)
    return Product(lambda x: kernels.linear(x, weight, None), num_inputs, plain.nbytes)


def products() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,128,256,512,2048")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--level", choices=[level.name.lower() for level in Level][1:])
    parser.add_argument("--weights", nargs="+", choices=KINDS, default=["core", "torch"])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock: Callable[[], float] = time.thread_time if options.cpu_time else time.perf_counter
    dtype: torch.dtype = getattr(torch, options.dtype)
    level = Level[options.level.upper()] if options.level else None
    kinds = {name: packed(name, dtype, level) for name in options.weights}
    num_weights = LAYERS * sum(outputs * inputs for outputs, inputs in SHAPES)
    for rows in map(int, options.rows.split(",")):
        inputs = {size: torch.randn(rows, size).to(dtype) for size in {k for _, k in SHAPES}}
        seconds: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(options.rounds + 1):
            for name, products in kinds.items():
                start_s = clock()
                for product in products:
                    product.call(inputs[product.num_inputs])
                seconds[name].append(clock() - start_s)
        cells = []
        for name, products in kinds.items():
            best_s, median_s = min(seconds[name][1:]), median(seconds[name][1:])
            gb_per_s = 1e-9 * sum(product.num_bytes for product in products) / best_s
            tflop_per_s = 2e-12 * num_weights * rows / best_s
            cells.append(
                f"{name} {1e3 * best_s:7.2f} ms (median {1e3 * median_s:.2f})"
                f" {gb_per_s:5.1f} GB/s {tflop_per_s:5.3f} TFLOP/s"
            )
        print(f"{rows:5d} rows: {' | '.join(cells)}", flush=True)


CONTEXT = 100
"""Of decodes."""


class Timed:
    """A function of the core that notes how long it takes."""

    def __init__(self, name: str, call: Callable[..., int], clock: Callable[[], float]) -> None:
        self.name, self.call, self.clock = name, call, clock
        self.seconds: dict[str, float] = {}
        self.flop = 0.0
        """Of products; of attention for each key that a token sees."""

    def __call__(self, *arguments: Any) -> int:
        start_s = self.clock()
        result = self.call(*arguments)
        name = self.name
        if name == "linear":
            name += f" {arguments[9]} x {arguments[8]}"
            self.flop += 2.0 * arguments[2] * arguments[8] * arguments[9]
        elif name == "attention":
            self.flop += 4.0 * arguments[11] * arguments[13]
        self.seconds[name] = self.seconds.get(name, 0.0) + self.clock() - start_s
        return result


def timed_operations(clock: Callable[[], float]) -> list[Timed]:
    """Put clocks around all functions of the core."""
    core, timed = load_core(), list[Timed]()
    for functions in (core.f32, core.bf16, core.drawing):
        for name, call in list(vars(functions).items()):
            timed.append(Timed(name, call, clock))
            setattr(functions, name, timed[-1])
    return timed


def rows_of(step: str) -> list[Row]:
    """Return what `--steps` names: 8 decodes, p512 or p512+1536."""
    if not step.startswith("p"):
        return [(CONTEXT, 1)] * int(step)
    count, _, start = step[1:].partition("+")
    return [(int(start or 0), int(count))]


def make_ceiling(clock: Callable[[], float]) -> Callable[[], float]:
    """Return what measures how many TFLOP/s of products this machine reaches at best."""
    core = load_core()
    native = NativeKernels(dataclasses.replace(core, bf16=copy.copy(core.bf16)))  # has no clocks
    weight = native.pack_weight(torch.randn(512, 512).bfloat16())
    x = torch.randn(256, 512).bfloat16()

    def measure() -> float:
        least_s = math.inf
        for _ in range(5):
            start_s = clock()
            native.linear(x, weight, None)
            least_s = min(least_s, clock() - start_s)
        return 2e-12 * 256 * 512 * 512 / least_s

    return measure


def shares_of(timed: list[Timed], rows: list[Row], step_s: float, ceiling: float) -> str:
    """Return what shares of `ceiling` TFLOP/s parts of steps reach that took `step_s`."""
    keys = sum(count * start + count * (count + 1) // 2 for start, count in rows)
    parts = []
    for name, times in (("linear", 1), ("attention", keys)):
        own = [operation for operation in timed if operation.name == name]
        seconds = sum(sum(operation.seconds.values()) for operation in own)
        parts.append((name, 1e-12 * times * sum(operation.flop for operation in own), seconds))
    parts.append(("step", sum(work for _, work, _ in parts), step_s))
    text = ", ".join(f"{name} {work / s / ceiling:.0%}" for name, work, s in parts if s > 0)
    return f"of {ceiling:.3f} TFLOP/s: {text}"


def _not_recorded(*_: object) -> NoReturn:
    raise NotRecordableError("each operation is timed by itself")


def steps() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", default="1,8,32,64,p128,p512,p512+1536,p2048")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--recorded", action="store_true")
    options = parser.parse_args()
    if not options.recorded:
        NativeKernels.record = _not_recorded  # type: ignore[method-assign, assignment]
    config = ServeConfig(
        model=options.model,
        num_threads=options.threads,
        max_model_len=4096,
        kv_memory="1GiB",
        quantization=options.quantization,
    )
    set_threads(config)
    timer = StepTimer(build_runner(config))
    clock: Callable[[], float] = time.thread_time if options.cpu_time else time.perf_counter
    measure_ceiling = make_ceiling(clock)
    measure_ceiling()
    timed = [] if options.recorded else timed_operations(clock)
    for step in options.steps.split(","):
        rows = rows_of(step)
        timer.prepare(rows)
        timer.run(rows)
        for operation in timed:
            operation.seconds.clear()
            operation.flop = 0.0
        ceiling = 0.0
        faults, seconds = getrusage(RUSAGE_SELF).ru_minflt, list[float]()
        for _ in range(options.rounds):
            start_s = clock()
            timer.run(rows)
            seconds.append(clock() - start_s)
            ceiling = max(ceiling, measure_ceiling())
        faults = getrusage(RUSAGE_SELF).ru_minflt - faults
        parts = {name: s for operation in timed for name, s in operation.seconds.items()}
        parts["rest"] = sum(seconds) - sum(parts.values())
        largest = sorted(parts.items(), key=lambda item: -item[1])
        text = ", ".join(f"{name} {1e3 * s / options.rounds:.2f}" for name, s in largest)
        print(
            f"{step:>10}: median {1e3 * median(seconds):.2f} ms, least {1e3 * min(seconds):.2f},"
            f" {faults // options.rounds} faults: {text}; "
            f"{shares_of(timed, rows, sum(seconds), ceiling)}",
            flush=True,
        )


COMMANDS = {"host": host, "products": products, "steps": steps}

if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in COMMANDS:
        COMMANDS[sys.argv.pop(1)]()
    else:
        raise SystemExit(__doc__)
