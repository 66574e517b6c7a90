"""Parts that say right or wrong: kernels, the check at start, ranks, samplers."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from support.kernel_grid import (
    LIMITS,
    AttentionCase,
    GridReport,
    attention_cases,
    attention_error,
    dense_comparisons,
    relative_error,
)
from support.model_runs import LENGTHS
from support.parity import TokenSequence, compare_all, make_sequences
from support.tiny_models import TINY_MODELS, find_tiny_model, load_reference, write_tiny_model
from support.tp_run import Job, run_ranks
from torch import Tensor

from bench.faults.recovery import fault_in_all_reduce
from bench.gpu.table import Bench
from lightserve.errors import StartupError
from lightserve.kernels.self_check import check_kernels, check_quantized
from lightserve.kernels.triton.kernels import TritonKernels
from lightserve.kernels.weights import BlockActivation, KernelShapes, Packed
from lightserve.messages.common import TokenSegment, pack_int32
from lightserve.messages.router_worker import AddSequence
from lightserve.types import Activation, RowId, SamplingParams
from lightserve.worker.device import make_queue
from lightserve.worker.sampling.interface import KnownCounts, Sampled, SamplingBatch
from lightserve.worker.sampling.sampler import sample
from lightserve.worker.sampling.table import SamplingTable


def _shapes(
    sizes: tuple[int, ...], *, windows: tuple[int | None, ...], **more: Any
) -> KernelShapes:
    """`sizes`: hidden, intermediate, query heads, KV heads, head size, longest context."""
    hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, context_len = sizes
    return KernelShapes(
        dtype=torch.bfloat16,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=head_dim,
        sliding_windows=windows,
        rms_norm_eps=1e-5,
        qk_norm=more.get("qk_norm", False),
        qkv_bias=more.get("qkv_bias", False),
        context_len=context_len,
    )


SHAPES = {
    "Llama-3-8B": _shapes((4096, 14_336, 32, 8, 128, 8192), windows=(None,)),
    "Mistral-7B": _shapes((4096, 14_336, 32, 8, 128, 32_768), windows=(4096,)),
    "Qwen2.5-0.5B": _shapes((896, 4864, 14, 2, 64, 32_768), windows=(None,), qkv_bias=True),
    "Qwen3-8B": _shapes((4096, 12_288, 32, 8, 128, 32_768), windows=(None,), qk_norm=True),
    "BLOOM-7B1, ALiBi": replace(
        _shapes((4096, 16_384, 32, 32, 128, 2048), windows=(None,)), has_alibi=True
    ),
    "Gemma-2-9B, soft caps": replace(
        _shapes((3584, 14_336, 16, 8, 256, 8192), windows=(4096, None)), soft_cap=50.0
    ),
    "gpt-oss-20b, sinks and experts": replace(
        _shapes((2880, 2880, 64, 8, 64, 32_768), windows=(128, None), qkv_bias=True),
        num_experts=32,
        num_chosen_experts=4,
        expert_size=2880,
        expert_activation=BlockActivation(Activation.CLAMPED_SILU, alpha=1.702, limit=7.0),
        has_expert_biases=True,
        has_sinks=True,
    ),
    "DeepSeek-V2-Lite, latents and experts": replace(
        _shapes((2048, 10_944, 16, 1, 576, 32_768), windows=(None,)),
        value_dim=512,
        rotary_dim=64,
        num_experts=64,
        num_chosen_experts=6,
        expert_size=1408,
    ),
}
TINY = _shapes((64, 96, 4, 2, 16, 20), windows=(None,))
REHEARSED_SHAPES = {
    "tiny": TINY,
    "tiny, sinks and experts": replace(
        TINY, has_sinks=True, num_experts=4, num_chosen_experts=2, expert_size=24
    ),
    "tiny, latents": replace(TINY, num_kv_heads=1, head_dim=40, value_dim=32, rotary_dim=8),
}


class WrongScale(TritonKernels):
    """Scores that are a tenth too large: no shape and no type shows it."""

    def attention(self, *args: Any, scale: float, **options: Any) -> Tensor:
        """See `Kernels.attention`."""
        return super().attention(*args, scale=1.1 * scale, **options)


def self_check(bench: Bench) -> None:
    """Check the shapes of well-known models."""
    for name, shapes in (REHEARSED_SHAPES if bench.rehearse else SHAPES).items():
        first_s, error = _timed(bench, TritonKernels(), shapes)
        again_s, _ = _timed(bench, TritonKernels(), shapes)
        note = error or f"{first_s:.2g} s with compilation, {again_s:.2g} s without"
        bench.rows.claim(f"{name} shape: kernels agree with the reference", not error, note)
        _, error = _timed(bench, WrongScale(), shapes)
        bench.rows.claim(f"{name} shape: a wrong scale is refused", "attention" in error, error)
    packed = ("tiny, sinks and experts",)
    if not bench.rehearse:
        packed = ("Llama-3-8B", "gpt-oss-20b, sinks and experts")
    for name in packed:
        shapes, found = (REHEARSED_SHAPES if bench.rehearse else SHAPES)[name], ""
        try:
            check_quantized(TritonKernels(), shapes, bench.machine.device, ~Packed.NONE)
        except StartupError as wrong:
            found = str(wrong)[:120]
        bench.rows.claim(f"{name} shape: products by packed weights agree", not found, found)


def _timed(bench: Bench, kernels: TritonKernels, shapes: KernelShapes) -> tuple[float, str]:
    """Return the seconds of a check, and what it found wrong or nothing."""
    start_s, found = time.perf_counter(), ""
    try:
        check_kernels(kernels, shapes, bench.machine.device)
    except StartupError as error:
        found = str(error)[:120]
    return time.perf_counter() - start_s, found


PROCESSES = 12
"""Each compiles and has the device to itself for moments."""
TYPES = (torch.bfloat16, torch.float32, torch.float16)
REHEARSED_EVERY = 30
"""A rehearsal takes one case of so many of the small grid."""
KERNEL_TEETH = AttentionCase("mixed", "scattered", (4, 2, 32), 24, torch.float32)


def kernels(bench: Bench) -> None:
    """Run the grid; a part of the small one in a rehearsal."""
    device = bench.machine.device
    cases = attention_cases(large=not bench.rehearse)
    whole = GridReport()
    chosen = cases[::REHEARSED_EVERY] if bench.rehearse else cases
    # The types by their worth, each reported when it is done: a part that is ended keeps them.
    for dtype, report in in_processes(chosen, device):
        limit, errors = LIMITS[dtype], worst_of(report)
        is_right = all(error <= limit for error in errors.values())
        note = ", ".join(f"{operation} {error:.2g}" for operation, error in errors.items())
        name = f"{str(dtype).removeprefix('torch.')}, relative errors below {limit:g}"
        bench.rows.claim(name, is_right, f"{report.num_cases} comparisons: {note}")
        whole = merged([whole, report])
    report = whole
    note = "; ".join(report.failures[:3]).replace("|", "/")
    bench.rows.claim(f"{report.num_cases} comparisons", not report.failures, note)
    error = attention_error(WrongScale(), KERNEL_TEETH, device)
    bench.rows.claim("a wrong scale is noticed", error > LIMITS[KERNEL_TEETH.dtype], f"{error:.2g}")


def attention(cases: Sequence[AttentionCase], device: str) -> GridReport:
    """Compare attention on some cases."""
    report, kernels = GridReport(), TritonKernels()
    for case in cases:
        error = attention_error(kernels, case, torch.device(device))
        report.add("attention", case, error, case.dtype)
    return report


def dense(dtype: torch.dtype, device: torch.device) -> GridReport:
    """Compare everything else in one type."""
    report = GridReport()
    for operation, case, result, truth in dense_comparisons(TritonKernels(), dtype, device):
        report.add(operation, case, relative_error(result, truth), dtype)
    return report


def worst_of(report: GridReport) -> dict[str, float]:
    """Return the largest error of each operation, of a report on one type."""
    return {key.rpartition(" ")[0]: error for key, error in sorted(report.worst.items())}


def in_processes(
    cases: Sequence[AttentionCase], device: torch.device
) -> Iterator[tuple[torch.dtype, GridReport]]:
    """Yield what each type comes to, compared in several processes, which compile meanwhile."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(PROCESSES, mp_context=spawn) as pool:
        found: dict[torch.dtype, list[Future[GridReport]]] = {}
        for dtype in TYPES:
            # Those of the same heads in one process: they share most of their kernels.
            shares: dict[tuple[int, int, int], list[AttentionCase]] = {}
            for case in cases:
                if case.dtype == dtype:
                    shares.setdefault(case.heads, []).append(case)
            found[dtype] = [pool.submit(dense, dtype, device)]
            found[dtype] += [pool.submit(attention, s, str(device)) for s in shares.values()]
        for dtype, reports in found.items():
            yield dtype, merged([report.result() for report in reports])


def merged(reports: Sequence[GridReport]) -> GridReport:
    """Return what several reports say together."""
    whole = GridReport()
    for report in reports:
        whole.num_cases += report.num_cases
        whole.failures += report.failures
        for name, error in report.worst.items():
            whole.worst[name] = max(error, whole.worst.get(name, 0.0))
    return whole


TP_SIZE = 2


@dataclass(frozen=True)
class RankScale:
    """What is compared."""

    models: Sequence[str]
    lengths: Sequence[tuple[int, int]]
    chunk: int
    kernels: str


RANKS_GPU = RankScale([tiny.name for tiny in TINY_MODELS], LENGTHS, 37, "triton")
RANKS_REHEARSED = RankScale(["llama-mha"], ((9, 9), (5, 9)), 4, "torch")


class Case(NamedTuple):
    """A model in one type, and what transformers says."""

    name: str
    dtype: torch.dtype
    sequences: list[TokenSequence]
    job: Job


def tensor_parallel(bench: Bench) -> None:
    """Compare every tiny model in both types, all in one start of the ranks."""
    if bench.machine.is_gpu and torch.cuda.device_count() < TP_SIZE:
        bench.rows.skip("two ranks over NCCL", f"{torch.cuda.device_count()} GPU")
        return
    scale = RANKS_REHEARSED if bench.rehearse else RANKS_GPU
    with TemporaryDirectory() as directory:
        cases = [
            _case(name, dtype, scale, Path(directory))
            for name in scale.models
            for dtype in (torch.float32, torch.bfloat16)
        ]
        jobs = [case.job for case in cases]
        found = run_ranks(jobs, TP_SIZE, Path(directory), device=bench.machine.device.type)
    for case, logits in zip(cases, found, strict=True):
        report = compare_all(case.sequences, logits, case.dtype)
        note = (
            f"{report.num_positions} positions, {report.num_excused} excused,"
            f" largest log-probability difference {report.max_logprob_delta:.2g}"
        )
        name = f"{case.name}, {case.job['dtype']}, {TP_SIZE} ranks: tokens that differ"
        bench.rows.claim(name, report.holds(case.dtype), note)


def _case(name: str, dtype: torch.dtype, scale: RankScale, directory: Path) -> Case:
    """Write a model and let the reference speak."""
    text = str(dtype).removeprefix("torch.")
    path = write_tiny_model(find_tiny_model(name), directory / f"{name}-{text}", dtype=dtype)
    sequences = make_sequences(load_reference(path, torch.float32), scale.lengths, seed=0)
    job = Job(
        path=str(path),
        dtype=text,
        kernels=scale.kernels,
        chunk=scale.chunk,
        tokens=[one.tokens for one in sequences],
    )
    return Case(name, dtype, sequences, job)


STEP_TIMEOUT_S = 5.0
SECONDS = {signal.SIGKILL: 3.0, signal.SIGSTOP: STEP_TIMEOUT_S + 3.0}
"""Most seconds until the other rank is gone: who dies is seen at once, who hangs after the step's
time limit; the router looks once a second."""


def dead_rank(bench: Bench) -> None:
    """Kill a rank, stop another."""
    if bench.rehearse:
        bench.rows.skip("a rank that dies", "its rehearsal is bench/faults/recovery.py")
        return
    if torch.cuda.device_count() < 2:
        bench.rows.skip("a rank that dies", f"{torch.cuda.device_count()} GPU")
        return
    for signum, most_s in SECONDS.items():
        fault = fault_in_all_reduce(signum, step_timeout_s=STEP_TIMEOUT_S, decodes=True)
        name = f"{signum.name} to a rank of 2 in an all-reduce"
        note = f"ready again {fault.ready_again_s:.1f} s later, the request: {fault.outcome}"
        bench.rows.figure(f"{name}: detected", fault.detected_s, "s", at_most=most_s, note=note)
        bench.rows.claim(f"{name}: nothing left", fault.num_orphans == 0, "")


OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 0.8": {"temperature": 0.8},
    "top-k 40, top-p 0.9": {"top_k": 40, "top_p": 0.9},
    "min-p 0.05": {"min_p": 0.05},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    "1000 allowed tokens": {"allowed_token_ids": tuple(range(0, 2000, 2))},
    "20 log-probabilities": {"temperature": 0.0, "num_logprobs": 20},
}
ROWS, VOCAB, KNOWN = (64, 256), 128_256, 1000
REHEARSED_ROWS, REHEARSED_VOCAB, REHEARSED_KNOWN = (3,), 4000, 9
MAX_DIFFERENT_PCT = 0.5


def sampling(bench: Bench) -> None:
    """Compare and time every option, on rows that all have it."""
    sizes = (ROWS, VOCAB, KNOWN)
    rehearsed = (REHEARSED_ROWS, REHEARSED_VOCAB, REHEARSED_KNOWN)
    rows, vocab_size, known = rehearsed if bench.rehearse else sizes
    for num_rows in rows:
        logits = 3 * bench.machine.random(num_rows, vocab_size, dtype=torch.float32)
        rounded = logits.bfloat16().float()
        rng = np.random.default_rng(num_rows)
        token_ids = torch.from_numpy(
            rng.integers(0, vocab_size, (num_rows, known + 1), dtype=np.int32)
        )
        for name, options in OPTIONS.items():
            chosen = logits if "top_k" in options else rounded
            _compare(bench, f"{name}, {num_rows} rows of {vocab_size}", options, chosen, token_ids)


def _compare(
    bench: Bench, name: str, options: Mapping[str, Any], logits: Tensor, token_ids: Tensor
) -> None:
    vocab_size = logits.shape[1]
    batch = _batch(options, token_ids, vocab_size, logits.device)
    on_device, seconds = (
        sample(logits, batch),
        bench.machine.median_s(lambda _: sample(logits, batch)),
    )
    on_host = sample(logits.cpu(), _batch(options, token_ids, vocab_size, torch.device("cpu")))
    same = on_device.token_ids.cpu() == on_host.token_ids
    different = 100 * float((~same).float().mean())
    error = _logprob_error(on_device, on_host)
    is_right = different <= MAX_DIFFERENT_PCT and error <= 1e-4
    note = f"{different:.2g} % of the tokens differ, log-probabilities by {error:.2g}"
    bench.rows.claim(f"{name}: as on the CPU", is_right, note)
    bench.rows.figure(name, 1e3 * seconds, "ms")


def _batch(
    options: Mapping[str, Any], token_ids: Tensor, vocab_size: int, device: torch.device
) -> SamplingBatch:
    """Return what a step whose rows all have `options` samples by."""
    num_rows, length = token_ids.shape
    table, queue = SamplingTable(num_rows), make_queue(device)
    table.update(
        [
            AddSequence(
                RowId(row),
                [TokenSegment(token_ids=pack_int32(token_ids[row, :1].numpy()))],
                SamplingParams(**({"seed": row} | dict(options))),
                length // 2,
                [],
            )
            for row in range(num_rows)
        ]
    )
    rows = table.rows([RowId(row) for row in range(num_rows)], queue.upload)
    positions, known = queue.upload(
        [np.full(num_rows, length - 1, dtype=np.int64), token_ids.numpy()]
    )
    counts = None if device.type == "cpu" else KnownCounts(num_rows, vocab_size, device)
    return SamplingBatch(rows, positions, known, known_counts=counts)


def _logprob_error(one: Sampled, other: Sampled) -> float:
    if one.logprobs is None or other.logprobs is None:
        return 0.0
    return float((one.logprobs.top.cpu() - other.logprobs.top).abs().max())
