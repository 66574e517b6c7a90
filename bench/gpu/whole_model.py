"""Whole models driven by the worker's own loop: decodes, graphs, checkpoints to the host."""

from __future__ import annotations

import gzip
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from msgspec.structs import replace
from support.graph_recorders import TapeRecorder
from support.tensor_kernels import TensorKernels
from torch import Tensor

from bench.gpu.device import copy_bandwidth, idle_pct, matrix_rate, overlapped_pct, profiled
from bench.gpu.models import (
    LLAMA_8B,
    QWEN_HALF_B,
    TINY_LLAMA,
    TINY_QWEN,
    WARM_STEPS,
    RandomModel,
    Run,
    Sequences,
    device_busy_s,
    graphs_in_use,
    run_plans,
)
from bench.gpu.table import Bench
from lightserve.messages.common import pack_int32
from lightserve.messages.router_worker import KVCopies, StepPlan
from lightserve.models.layers import feed_forward, linear
from lightserve.types import SamplingParams
from lightserve.worker.graphs import DecodeGraphs, ladder
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
    mixed_rows: int
    """Decodes of a step that has a prompt as well …"""
    chunks: Sequence[int]
    """… of so many tokens."""


GPU = Scale(LLAMA_8B, QWEN_HALF_B, 64, 1024, 8192, 8192, 65, 30, 32, (64, 256, 512))
REHEARSED = Scale(TINY_LLAMA, TINY_QWEN, 3, 20, 24, 16, 20, 3, 2, (5,))
NUM_PREFILLS = 12
LADDER_STEPS = 20
_GRAPHS = {True: "graphs on", False: "graphs off"}
MAX_SMALL_RATIO = 2.5
MAX_RATIO_ONE, MAX_RATIO_BATCH = 1.17, 1.22
MAX_MIXED_RATIO = 1.03
MAX_EIGHT_BITS = 0.62
MIN_PREFILL_PCT = 78.0


def whole_model(bench: Bench) -> None:
    """Measure both shapes, the large one first."""
    scale = REHEARSED if bench.rehearse else GPU
    bandwidth, rate = copy_bandwidth(bench.machine), matrix_rate(bench.machine)
    bench.rows.figure("copy, read + written", bandwidth / 1e9, "GB/s")
    bench.rows.figure("bf16 matrix product", rate / 1e12, "TFLOP/s")
    with TemporaryDirectory() as directory:
        llama = RandomModel.make(Path(directory) / "llama", scale.llama)
        _large(bench, llama, scale, bandwidth, rate)
        qwen = RandomModel.make(Path(directory) / "qwen", scale.qwen)
        _small(bench, qwen, scale, bandwidth)


def _small(bench: Bench, model: RandomModel, scale: Scale, bandwidth: float) -> None:
    runner = _runner(bench, model, scale, num_rows=1)
    one = _filled(runner, model, scale, 1)
    floor_s = _floor_s(model, 1, scale, bandwidth)
    for graphs in (True, False):
        limit = MAX_SMALL_RATIO if graphs else None
        name = f"Qwen2.5-0.5B shape, batch 1, {_GRAPHS[graphs]}"
        with graphs_in_use(runner, graphs):
            run = run_plans(runner, one.decodes(scale.context, scale.num_steps))
            bench.rows.figure(name, 1e3 * run.median_s, "ms")
            ratio = run.median_s / floor_s
            bench.rows.figure(f"{name}: to weights + KV over the copy", ratio, "x", at_most=limit)
    _idle(bench, runner, one.decodes(scale.context, scale.profiled_steps), name)


def _large(bench: Bench, model: RandomModel, scale: Scale, bandwidth: float, rate: float) -> None:
    runner = _runner(bench, model, scale, num_rows=scale.batch)
    rows = _filled(runner, model, scale, scale.batch)
    for num_rows, limit in ((1, MAX_RATIO_ONE), (scale.batch, MAX_RATIO_BATCH)):
        steps = rows.decodes(scale.context, scale.num_steps, num_rows=num_rows)
        name = f"Llama-3-8B shape, batch {num_rows}, context {scale.context}"
        run = run_plans(runner, steps)
        bench.rows.figure(name, 1e3 * run.median_s, "ms", note=_device_s(run))
        ratio = run.median_s / _floor_s(model, num_rows, scale, bandwidth)
        bench.rows.figure(f"{name}: to weights + KV over the copy", ratio, "x", at_most=limit)
        _idle(bench, runner, steps[: scale.profiled_steps], name)
        with graphs_in_use(runner, False):
            run = run_plans(runner, steps[: scale.profiled_steps])
            bench.rows.figure(f"{name}, {_GRAPHS[False]}", 1e3 * run.median_s, "ms")
    _mixed(bench, runner, rows, model, scale)
    _by_rows(bench, runner, rows, scale)
    _prefill(bench, runner, model, scale, rate)


def eight_bits(bench: Bench) -> None:
    """Time decodes by FP8 weights, with KV of FP8, beside those in bfloat16.

    In blocks, with activations rounded inside norms and gates and apart; and by outputs, with the
    products that the start finds faster, torch's or Triton's, and by Triton's alone.
    """
    scale = REHEARSED if bench.rehearse else GPU
    kv: dict[str, Any] = {"kv_dtype": "fp8" if bench.machine.is_gpu else "int8"}
    blocks, outputs = kv | {"is_fp8": True}, kv | {"quantization": "fp8"}
    apart = _decode_times
    for room in (linear, feed_forward):
        apart = patch.object(room, "rounding_weight", lambda _: None)(apart)
    with TemporaryDirectory() as directory:
        model = RandomModel.make(Path(directory), scale.llama)
        plain = _decode_times(bench, model, scale, {})
        for name, measure, flags, limit in (
            ("in blocks", _decode_times, blocks, MAX_EIGHT_BITS),
            ("in blocks, rounded apart", apart, blocks, None),
            ("by outputs", _decode_times, outputs, MAX_EIGHT_BITS),
            ("by outputs, Triton's alone", _decode_times, outputs | {"kernel_tuning": "off"}, None),
        ):
            for num_rows, own_s in measure(bench, model, scale, flags).items():
                row = f"Llama-3-8B shape in FP8 {name} with FP8 KV, batch {num_rows}: to bfloat16"
                note = f"{1e3 * own_s:.4g} ms, bfloat16 {1e3 * plain[num_rows]:.4g} ms"
                bench.rows.figure(row, own_s / plain[num_rows], "x", at_most=limit, note=note)


def _decode_times(
    bench: Bench, model: RandomModel, scale: Scale, flags: Mapping[str, Any]
) -> dict[int, float]:
    """Return the median seconds of a step of one decode, and of a batch."""
    runner = _runner(bench, model, scale, num_rows=scale.batch, **flags)
    rows = _filled(runner, model, scale, scale.batch)
    return {
        num_rows: run_plans(
            runner, rows.decodes(scale.context, scale.num_steps, num_rows=num_rows)
        ).median_s
        for num_rows in (1, scale.batch)
    }


def _mixed(
    bench: Bench, runner: ModelRunner, rows: Sequences, model: RandomModel, scale: Scale
) -> None:
    """Time steps of decodes and a whole prompt beside what the device is busy with them."""
    for num_tokens in scale.chunks:
        chunk = Sequences(
            1,
            num_tokens,
            vocab_size=model.config.vocab_size,
            first_row=rows.num_rows,
            first_slot=rows.num_rows * rows.length,
        )
        [prompt] = chunk.prefills(num_tokens, budget=num_tokens)
        plans = [
            replace(
                plan,
                sequences=prompt.sequences,
                slot_ranges=prompt.slot_ranges,
                rows=prompt.rows,
            )
            for plan in rows.decodes(scale.context, scale.profiled_steps, num_rows=scale.mixed_rows)
        ]
        name = f"Llama-3-8B shape, {scale.mixed_rows} decodes and a prompt of {num_tokens}"
        run = run_plans(runner, plans)
        bench.rows.figure(name, 1e3 * run.median_s, "ms", note=_device_s(run))
        busy_s = device_busy_s(bench, runner, plans)
        if busy_s is None:
            bench.rows.skip(f"{name}: to device busy", "nothing ran on a device")
            continue
        bench.rows.figure(
            f"{name}: to device busy",
            run.median_s / busy_s,
            "x",
            at_most=MAX_MIXED_RATIO,
            note=f"busy {1e3 * busy_s:.4g} ms",
        )


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
    bench.rows.figure(
        f"{name}: of the matrix rate", 100 * achieved / rate, "%", at_least=MIN_PREFILL_PCT
    )


def _runner(
    bench: Bench, model: RandomModel, scale: Scale, *, num_rows: int, **flags: Any
) -> ModelRunner:
    """Return a runner whose pool holds the rows, and the long prompt."""
    per_row = scale.context + scale.num_steps
    return model.runner(
        bench.machine,
        max_num_seqs=num_rows + 1,
        max_num_batched_tokens=scale.budget,
        max_kv_tokens=max(num_rows * per_row + max(scale.chunks), scale.prefill) + 64,
        **flags,
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


MAX_RATIO = 1.2
REPEATS = 3
TRACE = "checkpoint.trace.json.gz"


@dataclass(frozen=True)
class CheckpointScale:
    """Sizes of the scene."""

    shape: Mapping[str, Any]
    num_rows: int
    context: int
    long_tokens: int
    piece: int
    budget: int
    host_memory: str
    quiet_steps: int
    """Without copies, before the first and behind the last."""

    @property
    def num_steps(self) -> int:
        """Steps of one way, to the host or back."""
        return WARM_STEPS + self.long_tokens // self.piece + 2 * self.quiet_steps


CHECKPOINTS_GPU = CheckpointScale(LLAMA_8B, 64, 1024, 8192, 1024, 8192, "1280MiB", 8)
CHECKPOINTS_REHEARSED = CheckpointScale(TINY_LLAMA, 2, 12, 24, 8, 16, "1MiB", 1)


def checkpoints(bench: Bench) -> None:
    """Measure both ways of copying, and write a trace."""
    scale = CHECKPOINTS_REHEARSED if bench.rehearse else CHECKPOINTS_GPU
    with TemporaryDirectory() as directory:
        model = RandomModel.make(Path(directory), scale.shape)
        scene = Scene(bench, model, scale)
        pieces = [
            range(start, start + scale.piece) for start in range(0, scale.long_tokens, scale.piece)
        ]
        for name, ranges, limit in (
            (f"{scale.piece} tokens per step", pieces, MAX_RATIO),
            ("all at once", [range(scale.long_tokens)], None),
        ):
            ratios = [scene.longest_ratio(ranges) for _ in range(REPEATS)]
            bench.rows.figure(
                f"{scale.long_tokens} tokens out and back, {name}: longest step to median",
                statistics.median(ratios),
                "x",
                at_most=limit,
                note=", ".join(f"{ratio:.3g}" for ratio in ratios),
            )
        gigabytes = scale.long_tokens * model.kv_bytes_per_token / 1e9
        bench.rows.claim(
            f"KV bytes are the same, {gigabytes:.3g} GB", scene.is_equal, "old slots poisoned"
        )
        bench.rows.claim("the decodes' tokens are those without copies", scene.is_undisturbed, "")
        bench.rows.claim("the long request goes on with the same token", scene.is_resumed, "")
        _trace(bench, scene, pieces)


class Scene:
    """Decodes, and beside them one long request that does not run."""

    def __init__(self, bench: Bench, model: RandomModel, scale: CheckpointScale) -> None:
        self._machine, self._scale = bench.machine, scale
        length = scale.context + scale.num_steps
        num_short = scale.num_rows * length
        self._runner = self._make_runner(model, num_short + 2 * scale.long_tokens)
        vocab_size = model.config.vocab_size
        self._rows = Sequences(scale.num_rows, length, vocab_size=vocab_size)
        self._long = Sequences(
            1,
            scale.long_tokens,
            vocab_size=vocab_size,
            first_row=scale.num_rows,
            first_slot=num_short,
        )
        run_plans(self._runner, self._rows.prefills(scale.context, budget=scale.budget))
        run_plans(self._runner, self._long.prefills(scale.long_tokens, budget=scale.budget))
        self._slots = self._long.slots[0].copy()
        self._spare = np.arange(num_short + scale.long_tokens, num_short + 2 * scale.long_tokens)
        self._expected = run_plans(self._runner, self._decodes()).token_ids
        self._next = self._resume()
        self._kv = self._read()
        self.is_equal = self.is_undisturbed = self.is_resumed = True

    def longest_ratio(self, ranges: Sequence[range]) -> float:
        """Save and load the long request's ranges of tokens; the longest step over the median."""
        there = self._note(run_plans(self._runner, self.plans("saves", ranges)))
        self._poison()
        self._slots, self._spare = self._spare, self._slots
        back = self._note(run_plans(self._runner, self.plans("ahead_loads", ranges)))
        self.is_equal &= all(
            torch.equal(before, now) for before, now in zip(self._kv, self._read(), strict=True)
        )
        self.is_resumed &= self._resume() == self._next
        gaps_s = there.gaps_s + back.gaps_s
        return max(gaps_s) / statistics.median(gaps_s)

    def plans(self, kind: str, ranges: Sequence[range]) -> list[StepPlan]:
        """Return decodes, some of which copy a range of the long request's tokens each."""
        plans = self._decodes()
        for number, tokens in enumerate(ranges, WARM_STEPS + self._scale.quiet_steps):
            slots = self._slots[tokens.start : tokens.stop]
            copies = KVCopies(pack_int32(slots), pack_int32(tokens))
            plans[number] = replace(plans[number], **{kind: copies})
        return plans

    def run(self, plans: Sequence[StepPlan]) -> None:
        """Execute plans."""
        run_plans(self._runner, plans)

    def _decodes(self) -> list[StepPlan]:
        return self._rows.decodes(self._scale.context, self._scale.num_steps)

    def _note(self, run: Run) -> Run:
        self.is_undisturbed &= run.token_ids == self._expected
        return run

    def _make_runner(self, model: RandomModel, num_slots: int) -> ModelRunner:
        scale = self._scale
        return model.runner(
            self._machine,
            max_num_seqs=scale.num_rows + 1,
            max_num_batched_tokens=scale.budget,
            max_kv_tokens=num_slots,
            host_kv_memory=scale.host_memory,
        )

    def _resume(self) -> list[int]:
        """Compute the long request's last token where its KV is now; return what follows it."""
        moved = self._long.move(0, self._slots)
        last = self._long.plan([(0, self._scale.long_tokens - 1, 1)], self._scale.long_tokens)
        [tokens] = run_plans(self._runner, [replace(last, slot_ranges=[moved])]).token_ids.values()
        return tokens

    def _read(self) -> list[Tensor]:
        """Return the long request's KV, on the host."""
        slots = torch.from_numpy(self._slots.astype(np.int64)).to(self._machine.device)
        return [tensor.index_select(3, slots).cpu() for tensor in self._runner.pool.tensors]

    def _poison(self) -> None:
        self._machine.synchronize()
        for places in (self._slots, self._spare):
            slots = torch.from_numpy(places.astype(np.int64)).to(self._machine.device)
            for tensor in self._runner.pool.tensors:
                tensor.index_fill_(3, slots, torch.nan)


def _trace(bench: Bench, scene: Scene, ranges: Sequence[range]) -> None:
    """Write the trace of both ways, and report how much of the copies passes ran beside."""
    plain = bench.out / TRACE.removesuffix(".gz")
    with profiled(bench.machine, plain):
        scene.run(scene.plans("saves", ranges))
        scene.run(scene.plans("ahead_loads", ranges))
    (bench.out / TRACE).write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    share = overlapped_pct(bench.out / TRACE)
    if share is None:
        bench.rows.skip("copies beside passes", "copies have no stream of their own here")
    else:
        bench.rows.figure("copies beside passes", share, "%", note=f"trace: {TRACE}")


@dataclass(frozen=True)
class GraphScale:
    """Sizes of the comparison."""

    shape: Mapping[str, Any]
    max_rows: int
    captured: Sequence[int]
    """Numbers of rows that there is a graph for."""
    between: Sequence[int]
    """And that there is none for."""
    context: int
    num_steps: int


GRAPHS_GPU = GraphScale(QWEN_HALF_B, 64, (1, 8, 64), (3, 50), 256, 64)
BUDGET = 4096
"""Most tokens of a prefill."""
GRAPHS_REHEARSED = GraphScale(TINY_QWEN, 4, (1, 4), (3,), 5, 3)


def graphs(bench: Bench) -> None:
    """Compare tokens, greedy and drawn."""
    scale = GRAPHS_REHEARSED if bench.rehearse else GRAPHS_GPU
    assert set(scale.captured) <= set(ladder(scale.max_rows))
    assert not set(scale.between) & set(ladder(scale.max_rows))
    with TemporaryDirectory() as directory:
        model = RandomModel.make(Path(directory), scale.shape)
        runner = _graph_runner(bench, model, scale)
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


def _graph_runner(bench: Bench, model: RandomModel, scale: GraphScale) -> ModelRunner:
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
            runner.pool,
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
    scale: GraphScale,
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
