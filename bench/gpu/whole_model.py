"""Whole models with random weights, driven by the worker's loop: decode, prefill, graphs.

A decode must read every weight but the embedding and the KV of its rows once: that, over the
measured copy bandwidth, is its floor. A prefill's operations over its time stand beside the
measured matrix rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.gpu.ceilings import copy_bandwidth, matrix_rate
from bench.gpu.context import Bench
from bench.gpu.driver import Run, Sequences, run_plans
from bench.gpu.models import (
    LLAMA_8B,
    QWEN_HALF_B,
    TINY_LLAMA,
    TINY_QWEN,
    RandomModel,
    graphs_in_use,
)
from bench.gpu.overlap import idle_pct, profiled
from lightserve.messages.router_worker import StepPlan
from lightserve.worker.graph_ladder import ladder
from lightserve.worker.model_runner import ModelRunner


@dataclass(frozen=True)
class Scale:
    """Sizes of the measurements."""

    llama: Mapping[str, Any]
    qwen: Mapping[str, Any]
    batch: int
    context: int
    prefill: int
    budget: int
    """Most new tokens of a step while contexts are filled."""
    num_steps: int
    profiled_steps: int


GPU = Scale(LLAMA_8B, QWEN_HALF_B, 64, 1024, 8192, 8192, 65, 30)
REHEARSED = Scale(TINY_LLAMA, TINY_QWEN, 3, 20, 24, 16, 20, 3)
NUM_PREFILLS = 12
LADDER_STEPS = 20
_GRAPHS = {True: "graphs on", False: "graphs off"}


def run(bench: Bench) -> None:
    """Measure both shapes, with graphs and without."""
    scale = REHEARSED if bench.rehearse else GPU
    bandwidth, rate = copy_bandwidth(bench.machine), matrix_rate(bench.machine)
    bench.rows.figure("copy, read + written", bandwidth / 1e9, "GB/s")
    bench.rows.figure("bf16 matrix product", rate / 1e12, "TFLOP/s")
    with TemporaryDirectory() as directory:
        qwen = RandomModel.make(Path(directory) / "qwen", scale.qwen)
        _small(bench, qwen, scale, bandwidth)
        llama = RandomModel.make(Path(directory) / "llama", scale.llama)
        _large(bench, llama, scale, bandwidth, rate)


def _small(bench: Bench, model: RandomModel, scale: Scale, bandwidth: float) -> None:
    runner = _runner(bench, model, scale, num_rows=1)
    one = _filled(runner, model, scale, 1)
    floor_s = _floor_s(model, 1, scale, bandwidth)
    for graphs in (True, False):
        name = f"Qwen2.5-0.5B shape, batch 1, {_GRAPHS[graphs]}"
        with graphs_in_use(runner, graphs):
            run = run_plans(runner, one.decodes(scale.context, scale.num_steps))
            bench.rows.figure(name, 1e3 * run.median_s, "ms", at_most=1.5 if graphs else None)
            bench.rows.figure(f"{name}: to its floor", run.median_s / floor_s, "x")
            _idle(bench, runner, one.decodes(scale.context, scale.profiled_steps), name)


def _large(bench: Bench, model: RandomModel, scale: Scale, bandwidth: float, rate: float) -> None:
    runner = _runner(bench, model, scale, num_rows=scale.batch)
    rows = _filled(runner, model, scale, scale.batch)
    for graphs in (True, False):
        for num_rows, limit in ((1, 1.25), (scale.batch, 1.35)):
            steps = rows.decodes(scale.context, scale.num_steps, num_rows=num_rows)
            name = f"Llama-3-8B shape, batch {num_rows}, context {scale.context}, {_GRAPHS[graphs]}"
            with graphs_in_use(runner, graphs):
                run = run_plans(runner, steps)
                bench.rows.figure(name, 1e3 * run.median_s, "ms", note=_device_s(run))
                bench.rows.figure(
                    f"{name}: to weights + KV over the bandwidth",
                    run.median_s / _floor_s(model, num_rows, scale, bandwidth),
                    "x",
                    at_most=limit if graphs else None,
                )
                _idle(bench, runner, steps[: scale.profiled_steps], name)
    _by_rows(bench, runner, rows, scale)
    _prefill(bench, runner, model, scale, rate)


def _by_rows(bench: Bench, runner: ModelRunner, rows: Sequences, scale: Scale) -> None:
    """Report what a step of each captured size takes, in one row."""
    times_ms = {
        number: 1e3
        * run_plans(runner, rows.decodes(scale.context, LADDER_STEPS, num_rows=number)).median_s
        for number in ladder(scale.batch)
    }
    bench.rows.figure(
        f"Llama-3-8B shape, context {scale.context}, graphs on: {scale.batch} rows to one",
        times_ms[scale.batch] / times_ms[1],
        "x",
        note="ms by rows: " + ", ".join(f"{n}: {ms:.3g}" for n, ms in times_ms.items()),
    )


def _prefill(
    bench: Bench, runner: ModelRunner, model: RandomModel, scale: Scale, rate: float
) -> None:
    """Time a prompt as one step; the slots are those of the decodes, whose KV is overwritten."""
    sequence = Sequences(1, scale.prefill, vocab_size=model.config.vocab_size, seed=2)
    plans = sequence.prefills(scale.prefill, budget=scale.prefill) * NUM_PREFILLS
    run = run_plans(runner, plans)
    achieved = model.prefill_operations(scale.prefill) / run.median_s
    name = f"Llama-3-8B shape, prefill of {scale.prefill}"
    bench.rows.figure(name, 1e3 * run.median_s, "ms", note=f"{achieved / 1e12:.4g} TFLOP/s")
    bench.rows.figure(f"{name}: of the matrix rate", 100 * achieved / rate, "%", at_least=55.0)


def _runner(bench: Bench, model: RandomModel, scale: Scale, *, num_rows: int) -> ModelRunner:
    """Return a runner whose pool holds the rows, and the long prompt."""
    per_row = scale.context + scale.num_steps
    return model.runner(
        bench.machine,
        max_num_seqs=max(num_rows, 2),
        max_num_batched_tokens=scale.budget,
        max_kv_tokens=max(num_rows * per_row, scale.prefill) + 64,
    )


def _filled(runner: ModelRunner, model: RandomModel, scale: Scale, num_rows: int) -> Sequences:
    """Return sequences whose context has been computed."""
    length = scale.context + scale.num_steps
    rows = Sequences(num_rows, length, vocab_size=model.config.vocab_size)
    run_plans(runner, rows.prefills(scale.context, budget=scale.budget))
    return rows


def _floor_s(model: RandomModel, num_rows: int, scale: Scale, bandwidth: float) -> float:
    """Return the seconds in which a decode in the middle of the run could be read."""
    context = scale.context + scale.num_steps // 2
    kv_bytes = num_rows * context * model.kv_bytes_per_token
    return (model.decode_weight_bytes + kv_bytes) / bandwidth


def _device_s(run: Run) -> str:
    """Return what the worker itself says of a step."""
    exec_s = sorted(result.exec_s for result in run.results)[len(run.results) // 2]
    return f"the worker says {1e3 * exec_s:.4g} ms"


def _idle(bench: Bench, runner: ModelRunner, steps: Sequence[StepPlan], name: str) -> None:
    """Report how much of a profiled stretch of decodes the device did nothing."""
    path = bench.out / "decode.trace.json"
    with profiled(bench.machine, path):
        run_plans(runner, steps)
    share = idle_pct(path)
    path.unlink()
    if share is None:
        bench.rows.skip(f"{name}: device idle", "nothing ran on a device")
    else:
        bench.rows.figure(f"{name}: device idle", share, "%", note="profiled")
