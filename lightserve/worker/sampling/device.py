"""The sampler of a GPU: Triton kernels; waits for nothing and reads nothing on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from lightserve.kernels.triton import sampling as kernels
from lightserve.kernels.triton.sampling_adjust import adjust
from lightserve.worker.sampling.interface import (
    LogprobTensors,
    SamplingBatch,
    Tokens,
    bar_words,
    keep_typical,
)


def sample_on_device(logits: Tensor, batch: SamplingBatch) -> Tokens:
    """Return the tokens of logits [L, vocab], of the model's type."""
    rows = batch.rows
    found = kernels.Logits(logits)
    if rows.adjustments is not None:
        found = kernels.Logits(logits, _adjusted(logits, batch), rows.source)
    draws = kernels.Draws(
        rows.temperature, rows.min_p, rows.top_p, rows.top_k, rows.states, batch.positions
    )
    looks_twice = rows.has_min_p or bool(rows.truncated)
    scan = kernels.scan(
        found,
        draws.temperature,
        # Greedy rows need none; with options besides it is not worth a variant of the kernel.
        has_totals=looks_twice or bool(rows.drawn) or rows.adjustments is not None,
        has_peaks=looks_twice,
    )
    candidates = kernels.gather(found, draws, scan) if looks_twice else None
    drawn = kernels.draw(found, draws, scan, candidates)
    if candidates is not None and rows.truncated:
        kernels.draw_top(found, draws, scan, candidates, drawn)
    return Tokens(*drawn)


def _adjusted(logits: Tensor, batch: SamplingBatch) -> Tensor:
    options = batch.rows.adjustments
    assert options is not None and batch.known_counts is not None
    adjusted = adjust(logits, batch)
    places = torch.arange(len(adjusted), device=adjusted.device)
    bar_words(adjusted, places, options, batch)
    keep_typical(adjusted, places, options, batch.rows.temperature[options.indices])
    return adjusted


def logprobs_on_device(logits: Tensor, token_ids: Tensor, num_top: int) -> LogprobTensors:
    """See `sampler.logprob_tensors`."""
    num_rows = len(logits)
    ones = logits.new_ones(num_rows, dtype=torch.float32)
    none = logits.new_zeros(num_rows, dtype=torch.int64)
    draws = kernels.Draws(
        temperature=ones,
        min_p=torch.zeros_like(ones),
        top_p=ones.double(),
        top_k=logits.new_full((num_rows,), num_top, dtype=torch.int32),
        states=none,
        positions=none,
    )
    return LogprobTensors(*kernels.logprobs(logits, token_ids, num_top, draws))
