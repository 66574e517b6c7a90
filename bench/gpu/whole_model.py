"""Whole models driven by the worker's own loop: decodes, graphs, checkpoints to the host."""

from __future__ import annotations

import gzip
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from bench.gpu.device import copy_bandwidth, idle_pct, matrix_rate, overlapped_pct, profiled
from bench.gpu.models import (
    GREEDY,
    LLAMA_8B,
    LLAVA_7B,
    QWEN_9B,
    QWEN_HALF_B,
    TINY_HYBRID,
    TINY_LLAMA,
    TINY_LLAVA,
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
from lightserve.messages.images import EncodeOrder, Image, digest_of
from lightserve.messages.router_worker import KVCopies, StepPlan
from lightserve.models.layers import feed_forward, linear
from lightserve.types import SamplingParams
from lightserve.worker.drafts import Proposal, Rows
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
    hybrid: Mapping[str, Any]
    """A model three quarters of whose layers keep states."""
    llava: Mapping[str, Any]
    num_guesses: int


_LARGE = LLAMA_8B, QWEN_HALF_B, 64, 1024, 8192, 8192, 65, 30, 32, (64, 256, 512)
GPU = Scale(*_LARGE, QWEN_9B, LLAVA_7B, 4)
_TINY = TINY_LLAMA, TINY_QWEN, 3, 20, 24, 16, 20, 3, 2, (5,)
REHEARSED = Scale(*_TINY, TINY_HYBRID, TINY_LLAVA, 1)
NUM_PREFILLS = 12
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
    num_steps = scale.num_steps * (1 + flags.get("max_draft_tokens", 0))
    per_row = scale.context + num_steps + model.num_state_slots
    return model.runner(
        bench.machine,
        max_num_seqs=num_rows + 1,
        max_num_batched_tokens=scale.budget,
        max_kv_tokens=max(num_rows * per_row + max(scale.chunks), scale.prefill) + 64,
        **flags,
    )


def _filled(
    runner: ModelRunner,
    model: RandomModel,
    scale: Scale,
    num_rows: int,
    sampling: SamplingParams = GREEDY,
) -> Sequences:
    """Return sequences whose context has been computed."""
    most = scale.num_guesses if runner.max_drafted_tokens else 0
    rows = Sequences(
        num_rows,
        scale.context + scale.num_steps * (1 + most),
        vocab_size=model.config.vocab_size,
        sampling=sampling,
        num_state_slots=model.num_state_slots,
    )
    run_plans(runner, rows.prefills(scale.context, budget=scale.budget))
    return rows


def _floor_s(model: RandomModel, num_rows: int, scale: Scale, bandwidth: float) -> float:
    """Return the seconds in which a decode in the middle of the run could be read."""
    context = scale.context + scale.num_steps // 2
    context += 2 * model.num_state_slots  # states are read and written
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


DRAWN = 7
"""The token that is drawn everywhere, as no other is allowed: no tie of a random model decides."""
ACCEPTANCE = 0.7
MIN_GAIN = 1.5  # between the bars on CPUs with an acceptance of 0.6 and of 0.9: 1.3 and 1.9
MAX_BESIDE = 1.1
NUM_IMAGES = 5


class ScriptedGuesses:
    """Guesses the token that is drawn, or with some chance another; waits for nothing."""

    needs_lengths = needs_slots = False

    def __init__(self, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(0)

    def begin(self, *_: object) -> None:
        """See `Proposer.begin`: nothing of a plan counts."""

    def learn(self, *_: object) -> None:
        """See `Proposer.learn`: the script stays as it is."""

    def propose(self, table: Tensor, rows: Rows) -> Proposal:
        """See `Proposer.propose`; all rows may have as many guesses."""
        shape, most = rows.ids.shape, int(rows.most.max())
        chances = torch.rand(*shape, most, generator=self._generator, device=table.device)
        counts = torch.full_like(rows.ids, most)
        return Proposal(DRAWN + (chances >= ACCEPTANCE).long(), counts, torch.zeros_like(counts))


def guesses(bench: Bench) -> None:
    """Decode with scripted guesses beside decodes without: of Llama's shape, then of a model most
    of whose layers keep states, which move on behind them as graphs, or kernel by kernel."""
    scale = REHEARSED if bench.rehearse else GPU
    with TemporaryDirectory() as directory:
        for name, shape in (("Llama-3-8B", scale.llama), ("Qwen3.5-9B", scale.hybrid)):
            model = RandomModel.make(Path(directory) / name, shape)
            more = {"speculation": "ngram", "max_draft_tokens": scale.num_guesses}
            runner = _runner(bench, model, scale, num_rows=scale.batch, **more)
            drafts, states = runner._table._drafts, runner._draft_states
            assert drafts is not None
            drafts._proposer = ScriptedGuesses(bench.machine.device)
            gain = partial(_gain, bench, runner, model, scale)
            if not model.num_state_slots:
                gain(f"{name} shape, batch 1", at_least=MIN_GAIN)
                continue
            rows = _filled(runner, model, scale, scale.batch)
            for num_rows in (1, scale.batch):
                steps = rows.decodes(scale.context, scale.num_steps, num_rows=num_rows)
                own_s = run_plans(runner, steps).median_s
                floor_s = _floor_s(model, num_rows, scale, copy_bandwidth(bench.machine))
                what = f"{name} shape, batch {num_rows}: to weights, KV and states over the copy"
                bench.rows.figure(what, own_s / floor_s, "x", note=f"{1e3 * own_s:.4g} ms")
            gain(f"{name} shape, batch 1, graphs of states")
            states.graphs = None
            gain(f"{name} shape, batch 1, states kernel by kernel")


def _gain(
    bench: Bench,
    runner: ModelRunner,
    model: RandomModel,
    scale: Scale,
    name: str,
    *,
    at_least: float | None = None,
) -> None:
    """Report how many times as many tokens come in a second with guesses as without."""
    sampling = SamplingParams(temperature=0.0, allowed_token_ids=(DRAWN,))
    one = _filled(runner, model, scale, 1, sampling)
    plain = run_plans(runner, one.decodes(scale.context, scale.num_steps))
    run = run_plans(runner, one.guessed(scale.context, scale.num_steps, scale.num_guesses))
    count = sum(map(len, run.token_ids.values())) / len(run.results)
    note = f"{count:.3g} tokens in {1e3 * run.median_s:.4g} ms, one in {1e3 * plain.median_s:.4g}"
    what = f"{name}: tokens/s with {scale.num_guesses} guesses, {ACCEPTANCE:g} of them right"
    gain = count * plain.median_s / run.median_s
    bench.rows.figure(f"{what}, to without", gain, "x", at_least=at_least, note=note)


def images(bench: Bench) -> None:
    """Encode images alone, and layer by layer beside decodes."""
    scale, name = REHEARSED if bench.rehearse else GPU, "LLaVA-1.5-7B shape"
    with TemporaryDirectory() as directory:
        model = RandomModel.make(Path(directory), scale.llava)
        runner = _runner(bench, model, scale, num_rows=scale.batch)
        steps = _filled(runner, model, scale, scale.batch).decodes(scale.context, scale.num_steps)
        alone, black = run_plans(runner, steps), runner.black_image(scale.context)
        assert model.config.vision is not None and black is not None
        count = model.config.vision.layers.count
        whole = [_encoding(step, black, n, count) for n, step in enumerate(steps[:NUM_IMAGES])]
        last_s = run_plans(runner, whole).results[-1].encode_s
        row = f"{name}, {count} layers of an image of {black.num_tokens} tokens, kernel by kernel"
        bench.rows.figure(row, 1e3 * last_s, "ms")
        beside = [_encoding(step, black, 100 + n // count, 1) for n, step in enumerate(steps)]
        run = run_plans(runner, beside)
        layer_s = statistics.median(result.encode_s for result in run.results)
        both_s, took_s = alone.median_s + layer_s, run.median_s
        note = f"{1e3 * took_s:.4g} ms, of {1e3 * both_s:.4g} ms the layer {1e3 * layer_s:.4g} ms"
        row = f"{name}, {scale.batch} decodes and a layer of an image: to both alone"
        bench.rows.figure(row, took_s / both_s, "x", at_most=MAX_BESIDE, note=note)


def _encoding(step: StepPlan, black: Image, number: int, num_layers: int) -> StepPlan:
    """Return a step that encodes layers of an image of one colour, another for each number."""
    pixels = bytes((number, 0, 0)) * (black.height * black.width)
    image = replace(black, pixels=pixels, digest=digest_of(black.height, black.width, pixels))
    return replace(step, encodes=(EncodeOrder(image, num_layers),))
