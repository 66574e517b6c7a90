"""What sampling options cost, per step of a batch on one thread: `python bench/sampling.py`.

Median milliseconds of `sample` (and of the log-probabilities) over logits of random rows, beside
plain greedy and plain temperature sampling in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from lightserve.types import SamplingParams
from lightserve.worker.adjustments import RowHistory, is_adjusted
from lightserve.worker.logprobs import token_logprobs
from lightserve.worker.sampler import sample

HISTORY = 1000
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top-k 40": {"top_k": 40},
    "top-p 0.9": {"top_p": 0.9},
    "min-p 0.1": {"min_p": 0.1},
    "logit bias, 100 entries": {"logit_bias": tuple((i, 1.0) for i in range(100))},
    "frequency and presence penalty": {"frequency_penalty": 0.5, "presence_penalty": 0.5},
    "repetition penalty": {"repetition_penalty": 1.2},
    "1000 allowed tokens": {"allowed_token_ids": tuple(range(1000))},
    "min_tokens": {"min_tokens": 10_000},
    "logprobs, no top": {"temperature": 0.0, "num_logprobs": 0},
    "logprobs, top 20": {"temperature": 0.0, "num_logprobs": 20},
}


def step(logits: torch.Tensor, params: SamplingParams, history: RowHistory) -> None:
    """Do what a step does with the logits of a batch whose rows all have these parameters."""
    num_rows = len(logits)
    histories = dict.fromkeys(range(num_rows), history) if is_adjusted(params) else {}
    sampled = sample(logits, [params] * num_rows, list(range(num_rows)), histories)
    if params.num_logprobs is not None:
        token_logprobs(logits, sampled.token_ids, [params.num_logprobs] * num_rows)


def median_ms(logits: torch.Tensor, params: SamplingParams, history: RowHistory) -> float:
    """Return the median of some steps, in milliseconds."""
    times = []
    for _ in range(9):
        start_s = time.perf_counter()
        step(logits, params, history)
        times.append(time.perf_counter() - start_s)
    return 1e3 * statistics.median(times[2:])


def main() -> None:
    """Print a row per option, a column per shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32_000, 152_000])
    args = parser.parse_args()
    torch.set_num_threads(1)
    start_s = time.perf_counter()
    shapes = [(batch, vocab) for vocab in args.vocabularies for batch in args.batches]
    print("| ms per step | " + " | ".join(f"{b} x {v // 1000}k" for b, v in shapes) + " |")
    print("| --- |" + " --- |" * len(shapes))
    for name, options in OPTIONS.items():
        cells = []
        for batch, vocab in shapes:
            torch.manual_seed(0)
            logits = 4 * torch.randn(batch, vocab)  # about as peaked as a model is
            history = RowHistory(torch.randint(0, vocab, (HISTORY,)), HISTORY // 2, [2])
            with torch.inference_mode():
                cells.append(median_ms(logits, SamplingParams(seed=1, **options), history))
        print(f"| {name} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")
    print(f"\n{HISTORY} tokens of history; {time.perf_counter() - start_s:.0f} s")


if __name__ == "__main__":
    main()
