"""Sampling on the device: the CPU's tokens, and the time of a step's.

The same logits, rounded to bfloat16 as a model's are, so that ties happen; but for top-k and top-p,
which have no order of ties on the CPU. A token may differ where the cumulative sums round
differently and the draw falls between: those are counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.gpu.context import Bench
from lightserve.messages.common import TokenSegment, pack_int32
from lightserve.messages.router_worker import AddSequence
from lightserve.types import RowId, SamplingParams
from lightserve.worker.device_queue import make_queue
from lightserve.worker.sampling.interface import Sampled, SamplingBatch
from lightserve.worker.sampling.known_counts import KnownCounts
from lightserve.worker.sampling.sampler import sample
from lightserve.worker.sampling.table import SamplingTable

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


def run(bench: Bench) -> None:
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
