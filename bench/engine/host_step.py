"""The time of a step on the host of a GPU: `python -m bench.engine.host_step`.

Steps of decodes, and `mixed` ones whose last row is a new prompt of 512 tokens. Graphs do nothing,
kernels are compiled and their launches do nothing (see `tools.triton_offline`), one thread. While a
step runs on a GPU the host has that long for the next one; a GPU adds the time that its driver
takes per launch.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import pstats
import time
from collections.abc import Callable, Sequence
from statistics import median
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

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
from lightserve.models.base import KVGroup, KVLayout, Model, SingleRank
from lightserve.types import RowId, SamplingParams, StepId
from lightserve.worker.device import CudaQueue, HostMark, Mark
from lightserve.worker.graphs import DecodeGraphs, MemoryUse, ladder
from lightserve.worker.host_pool import DirectHostPool
from lightserve.worker.memory import KVPool
from lightserve.worker.mixed_graphs import MixedGraphs, mixed_ladder
from lightserve.worker.model_runner import ModelRunner
from lightserve.worker.sampling import sampler
from lightserve.worker.sampling.device import sample_on_device
from lightserve.worker.sampling.interface import SamplingBatch, Tokens
from tools.triton_offline import loading

VOCAB_SIZE = 128_256
CONTEXT_LEN = 4096
PROMPT_LEN = 16
CHUNK_LEN = 512
CAPABILITY = 90
PARTS = ("read plan", "launch", "finish", "write result")
OPTIONS = {
    "greedy": SamplingParams(temperature=0.0),
    "random": SamplingParams(temperature=1.0, seed=7),
    "top-p": SamplingParams(temperature=1.0, top_p=0.9, seed=7),
}


class NullModel:
    """A model whose pass takes no time."""

    config = SimpleNamespace(vocab_size=VOCAB_SIZE, hidden_size=1, vision=None)
    context_len, draft_head, recurrent = CONTEXT_LEN, None, ()

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


def measure(
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


def main() -> None:
    """Print a row for each kind of step."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    kinds = [(is_mixed, name) for is_mixed in (False, True) for name in OPTIONS]
    print(f"{'µs per step':20}" + "".join(f"{part:>14}" for part in (*PARTS, "all")))
    # Tensors are on the host, but rows are drawn as on a GPU.
    as_on_gpu = mock.patch.object(sampler, "_sample", drawn_as_on_gpu)
    with loading(CAPABILITY), as_on_gpu:
        for (is_mixed, name), num_rows in itertools.product(kinds, args.rows):
            profile = cProfile.Profile()
            if args.profile:
                profile.enable()
            parts = measure(num_rows, OPTIONS[name], args.steps, is_mixed=is_mixed)
            profile.disable()
            cells = "".join(f"{1e6 * part:14.0f}" for part in (*parts, sum(parts)))
            label = f"{'mixed ' if is_mixed else ''}{name} {num_rows}"
            print(f"{label:20}{cells}", flush=True)
            if args.profile:
                pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
