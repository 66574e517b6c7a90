"""Decodes as graphs and one kernel after the other: the same tokens.

With as many rows as a graph was captured for, both run the same kernels on the same shapes, so
the tokens are equal. In between, products are those of a larger batch, whose rounding may differ:
those tokens are counted, not judged (contract N3). Times are in the part whole-model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from support.graph_recorders import TapeRecorder
from support.tensor_kernels import TensorKernels

from bench.gpu.context import Bench
from bench.gpu.driver import Run, Sequences, run_plans
from bench.gpu.models import QWEN_HALF_B, TINY_QWEN, RandomModel, graphs_in_use
from lightserve.types import SamplingParams
from lightserve.worker.graph_ladder import ladder
from lightserve.worker.graphs import DecodeGraphs
from lightserve.worker.model_runner import ModelRunner


@dataclass(frozen=True)
class Scale:
    """Sizes of the comparison."""

    shape: Mapping[str, Any]
    max_rows: int
    captured: Sequence[int]
    """Numbers of rows that there is a graph for."""
    between: Sequence[int]
    """And that there is none for."""
    context: int
    num_steps: int


GPU = Scale(QWEN_HALF_B, 64, (1, 8, 64), (3, 50), 256, 64)
BUDGET = 4096
"""Most tokens of a prefill."""
REHEARSED = Scale(TINY_QWEN, 4, (1, 4), (3,), 5, 3)


def run(bench: Bench) -> None:
    """Compare tokens, greedy and drawn."""
    scale = REHEARSED if bench.rehearse else GPU
    assert set(scale.captured) <= set(ladder(scale.max_rows))
    assert not set(scale.between) & set(ladder(scale.max_rows))
    with TemporaryDirectory() as directory:
        model = RandomModel.make(Path(directory), scale.shape)
        runner = _runner(bench, model, scale)
        for temperature in (0.0, 1.0):
            sampling = SamplingParams(temperature=temperature, seed=3)
            for num_rows in (*scale.captured, *scale.between):
                runs = [
                    _run(runner, model, scale, num_rows, sampling, graphs=graphs)
                    for graphs in (True, False)
                ]
                total = num_rows * scale.num_steps
                different = _num_different(*runs)
                name = f"{num_rows} rows, temperature {temperature:g}: graphs on against off"
                note = f"{different} of {total} tokens differ"
                if num_rows in scale.captured:
                    bench.rows.claim(name, different == 0, note)
                else:
                    bench.rows.figure(name, float(different), f"of {total} tokens differ")


def _runner(bench: Bench, model: RandomModel, scale: Scale) -> ModelRunner:
    """Return a runner; on the CPU a tape of torch operations stands for a graph."""
    runner = model.runner(
        bench.machine,
        max_num_seqs=scale.max_rows,
        max_num_batched_tokens=BUDGET,
        max_kv_tokens=scale.max_rows * (scale.context + scale.num_steps) + 16,
        kernels=None if bench.machine.is_gpu else TensorKernels(),
        **({"kernel_tuning": "off"} if bench.machine.is_gpu else {}),  # others run beside it
    )
    if not bench.machine.is_gpu:
        recorded = DecodeGraphs(
            runner._model,
            runner._pool,
            runner.tables,
            sizes=ladder(scale.max_rows),
            recorder=TapeRecorder(),
            has_logits=True,
        )
        recorded.capture()
        runner.use_graphs(recorded)
    return runner


def _run(
    runner: ModelRunner,
    model: RandomModel,
    scale: Scale,
    num_rows: int,
    sampling: SamplingParams,
    *,
    graphs: bool,
) -> Run:
    length = scale.context + scale.num_steps
    rows = Sequences(num_rows, length, vocab_size=model.config.vocab_size, sampling=sampling)
    run_plans(runner, rows.prefills(scale.context, budget=BUDGET))
    with graphs_in_use(runner, graphs):
        return run_plans(runner, rows.decodes(scale.context, scale.num_steps))


def _num_different(run: Run, other: Run) -> int:
    """Return the number of tokens that differ, row by row and step by step."""
    pairs = zip(run.token_ids.values(), other.token_ids.values(), strict=True)
    return sum(a != b for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))
