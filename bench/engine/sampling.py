"""What sampling costs per step of a batch: `python -m bench.engine.sampling [--device cuda]`.

Milliseconds of `sample`, log-probabilities included, over logits of random rows: on the CPU the
median of a thread's clock, on a GPU that of device events around it, with the logits of several
steps in turn, so that none are left in a cache. The logits are about as peaked as a model's; the
last two lines have nearly flat ones, whose top-p leaves most of the vocabulary.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from lightserve.messages.router_worker import AddSequence
from lightserve.types import RowId, SamplingParams
from lightserve.worker.device import resolve_device
from lightserve.worker.device_queue import make_queue
from lightserve.worker.sampling.interface import SamplingBatch
from lightserve.worker.sampling.known_counts import KnownCounts
from lightserve.worker.sampling.sampler import sample
from lightserve.worker.sampling.table import SamplingTable

HISTORY = 1000
PEAKED, FLAT = 4.0, 0.1
OPTIONS: dict[str, tuple[float, dict[str, Any]]] = {
    "greedy": (PEAKED, {"temperature": 0.0}),
    "temperature": (PEAKED, {}),
    "top-k 40": (PEAKED, {"top_k": 40}),
    "top-p 0.9, temperature 0.6": (PEAKED, {"top_p": 0.9, "temperature": 0.6}),
    "top-p 0.9": (PEAKED, {"top_p": 0.9}),
    "min-p 0.1": (PEAKED, {"min_p": 0.1}),
    "logit bias, 100 entries": (PEAKED, {"logit_bias": tuple((i, 1.0) for i in range(100))}),
    "frequency and presence penalty": (
        PEAKED,
        {"frequency_penalty": 0.5, "presence_penalty": 0.5},
    ),
    "repetition penalty": (PEAKED, {"repetition_penalty": 1.2}),
    "1000 allowed tokens": (PEAKED, {"allowed_token_ids": tuple(range(1000))}),
    "min_tokens": (PEAKED, {"min_tokens": 10_000}),
    "logprobs, no top": (PEAKED, {"temperature": 0.0, "num_logprobs": 0}),
    "logprobs, top 20": (PEAKED, {"temperature": 0.0, "num_logprobs": 20}),
    "top-k 40, flat": (FLAT, {"top_k": 40}),
    "top-p 0.9, flat": (FLAT, {"top_p": 0.9}),
}
CACHE_BYTES = 256 << 20
"""More than any GPU's cache."""


def make_step(
    device: torch.device, shape: tuple[int, int], spread: float, params: SamplingParams
) -> Callable[[], None]:
    """Return what samples the next step of a batch whose rows all have these parameters."""
    num_rows, vocab_size = shape
    torch.manual_seed(0)
    queue = make_queue(device)
    rows = [RowId(row) for row in range(num_rows)]
    table = SamplingTable(num_rows)
    table.update([AddSequence(row, [], params, HISTORY // 2, [2]) for row in rows])
    known = torch.randint(0, vocab_size, (num_rows, HISTORY + 1), dtype=torch.int32).to(device)
    positions = torch.full((num_rows,), HISTORY, device=device)
    counts = KnownCounts(num_rows, vocab_size, device)
    num_steps = 1
    if device.type != "cpu":
        num_steps += CACHE_BYTES // (4 * num_rows * vocab_size)
    logits = [spread * torch.randn(shape, device=device) for _ in range(num_steps)]
    number = 0

    def step() -> None:
        nonlocal number
        number += 1
        batch = SamplingBatch(table.rows(rows, queue.upload), positions, known, known_counts=counts)
        counts.num_counted.fill_(HISTORY - 1)  # a token more in every step
        sample(logits[number % num_steps], batch)

    return step


def median_ms(device: torch.device, step: Callable[[], None]) -> float:
    """Return the median time of some steps, in milliseconds."""
    queue = make_queue(device)
    num_steps, num_skipped = (9, 2) if device.type == "cpu" else (60, 10)
    times = []
    for _ in range(num_steps):
        start = queue.mark()
        step()
        end = queue.mark()
        end.wait()
        times.append(end.seconds_since(start))
    return 1e3 * statistics.median(times[num_skipped:])


def main() -> None:
    """Print a row per option, a column per shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="cpu")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32_000, 152_000])
    args = parser.parse_args()
    device = resolve_device(args.device, 0)
    torch.set_num_threads(1)
    start_s = time.perf_counter()
    shapes = [(batch, vocab) for vocab in args.vocabularies for batch in args.batches]
    print("| ms per step | " + " | ".join(f"{b} x {v // 1000}k" for b, v in shapes) + " |")
    print("| --- |" + " --- |" * len(shapes))
    for name, (spread, options) in OPTIONS.items():
        cells = []
        for shape in shapes:
            with torch.inference_mode():
                step = make_step(device, shape, spread, SamplingParams(seed=1, **options))
                cells.append(median_ms(device, step))
        print(f"| {name} | " + " | ".join(f"{cell:.3f}" for cell in cells) + " |", flush=True)
    seconds = time.perf_counter() - start_s
    print(f"\n{device}; {HISTORY} tokens of history; {seconds:.0f} s")


if __name__ == "__main__":
    main()
