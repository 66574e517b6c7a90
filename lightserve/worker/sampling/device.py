"""The sampler of a GPU: Triton kernels; waits for nothing and reads nothing on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from lightserve.kernels.triton import sampling as kernels
from lightserve.kernels.triton.sampling_adjust import Changes, adjust
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
    options, masks, known = batch.rows.adjustments, batch.masks, batch.known_counts
    assert options is not None and known is not None
    changes = Changes(
        indices=options.indices,
        num_prompt_tokens=options.num_prompt_tokens,
        repetition=options.repetition,
        frequency=options.frequency,
        presence=options.presence,
        min_tokens=options.min_tokens,
        eos_token_ids=options.eos_token_ids,
        bias_rows=options.bias_rows,
        bias_token_ids=options.bias_token_ids,
        bias_values=options.bias_values,
        allowed_rows=options.allowed_rows,
        allowed_bits=options.allowed_bits,
        has_penalties=options.has_penalties,
        rows=batch.rows.rows,
        positions=batch.positions,
        token_ids=batch.token_ids,
        counts=known.counts,
        num_counted=known.num_counted,
        mask_rows=None if masks is None else masks.rows,
        mask_bits=None if masks is None else masks.bits,
    )
    adjusted = adjust(logits, changes)
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
