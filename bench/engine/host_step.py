"""What a step of decodes costs the host: everything in a worker that is not the device's work.

    python -m bench.engine.host_step [--rows 1 64 256] [--steps 300] [--profile]

A runner with graphs that do nothing, a vocabulary of few tokens, one thread: what is left is
reading the plan, tables, upload, sampling's launches, download and the result. While a step
runs on a GPU the host has that long for the next one; a GPU then adds to these figures what its
driver takes per launch. --profile prints where the time goes.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable, Sequence
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import torch
from torch import Tensor

from lightserve.messages.common import TokenSegment, pack_int32
from lightserve.messages.router_worker import (
    AddSequence,
    OutputKind,
    PlanRow,
    SlotRange,
    StepPlan,
    pack_decodes,
)
from lightserve.models.base import Model
from lightserve.models.kv_layout import KVGroup, KVLayout
from lightserve.models.parallel import SingleRank
from lightserve.types import RowId, SamplingParams, StepId
from lightserve.worker.device_queue import CudaQueue, HostMark, Mark
from lightserve.worker.graph_ladder import ladder
from lightserve.worker.graph_recorder import MemoryUse
from lightserve.worker.graphs import DecodeGraphs
from lightserve.worker.host_pool import DirectHostPool
from lightserve.worker.kv_pool import KVPool
from lightserve.worker.model_runner import ModelRunner

VOCAB_SIZE = 64
CONTEXT_LEN = 4096
PROMPT_LEN = 16
PARTS = ("read plan", "launch", "finish", "write result")
OPTIONS = {
    "greedy": SamplingParams(temperature=0.0),
    "random": SamplingParams(temperature=1.0, seed=7),
    "top-p": SamplingParams(temperature=1.0, top_p=0.9, seed=7),
}


class NullModel:
    """A model whose pass takes no time."""

    config = SimpleNamespace(vocab_size=VOCAB_SIZE)
    context_len = CONTEXT_LEN

    def hidden(self, input_ids: Tensor, batch: Any, kv: Any, rows: Tensor | None) -> Tensor:
        return torch.zeros(len(input_ids) if rows is None else len(rows), 1)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.zeros(len(hidden), VOCAB_SIZE) if out is None else out.zero_()


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


def make_runner(num_rows: int) -> ModelRunner:
    device = torch.device("cpu")
    layout = KVLayout((KVGroup(num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32"),))
    pool = KVPool(layout, num_rows * CONTEXT_LEN, device)
    model = cast(Model, NullModel())
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
    runner.use_graphs(graphs)
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


def _slots(row: RowId, start: int, count: int) -> SlotRange:
    first = row * CONTEXT_LEN + start
    return SlotRange(row, start, pack_int32(range(first, first + count)))


def measure(num_rows: int, params: SamplingParams, num_steps: int) -> list[float]:
    """Return the median seconds of CPU time of each of `PARTS`."""
    runner = make_runner(num_rows)
    runner.execute(first_plan(num_rows, params))
    plans = [decode_plan(num_rows, step) for step in range(num_steps)]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("µs per step " + "".join(f"{part:>14}" for part in (*PARTS, "all")))
    for name, params in OPTIONS.items():
        for num_rows in args.rows:
            profile = cProfile.Profile()
            if args.profile:
                profile.enable()
            parts = measure(num_rows, params, args.steps)
            profile.disable()
            cells = "".join(f"{1e6 * part:14.0f}" for part in (*parts, sum(parts)))
            print(f"{name} {num_rows:<{11 - len(name)}}{cells}", flush=True)
            if args.profile:
                pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
