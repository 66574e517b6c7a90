"""What requests do to their logits before a token is drawn, on the CPU, over all rows at once.

A row is a function of its own logits, options and known tokens alone: nothing is kept between
steps, so a recomputed row gets the same tokens. Rows without options cost nothing but a copy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightserve.worker.sampling.bad_words import bar_words
from lightserve.worker.sampling.interface import Adjustments, SamplingBatch


def adjust(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Return logits, float32 [L, vocab], as constraints, bias, penalties and bars change them."""
    logits = logits.clone()
    if batch.masks is not None and batch.masks.indices:
        assert batch.masks.allowed is not None, "constraints of the CPU come unpacked"
        rows = torch.tensor(batch.masks.indices)
        logits[rows] = logits[rows].masked_fill_(~batch.masks.allowed, float("-inf"))
    options = batch.rows.adjustments
    if options is not None:
        _add_bias(logits, options)
        lengths = batch.positions[options.indices]
        if options.has_penalties:
            _penalise(logits, batch, options, lengths)
        _allow(logits, options)
        _bar_end(logits, options, lengths - options.num_prompt_tokens)
        bar_words(logits, options.indices, options, batch)
    return logits


def _add_bias(logits: Tensor, options: Adjustments) -> None:
    if len(options.bias_values):
        rows = options.indices[options.bias_rows]
        logits[rows, options.bias_token_ids] += options.bias_values


def _penalise(logits: Tensor, batch: SamplingBatch, options: Adjustments, lengths: Tensor) -> None:
    """Apply the repetition penalty, then those for frequency and presence."""
    starts = torch.zeros_like(lengths)
    if bool((options.repetition != 1).any()):
        some = (options.repetition != 1).nonzero().flatten()
        owner, tokens = _known(batch, options, some, starts[some], lengths[some])
        # A token that is there twice is written twice, with the same value.
        place = options.indices[owner] * logits.shape[1] + tokens
        values, factor = logits.view(-1)[place], options.repetition[owner]
        logits.view(-1)[place] = torch.where(values > 0, values / factor, values * factor)
    counts = (options.frequency != 0) | (options.presence != 0)
    if bool(counts.any()):
        some = counts.nonzero().flatten()
        starts = options.num_prompt_tokens[some].long()
        owner, tokens = _known(batch, options, some, starts, lengths[some])
        keys = owner * logits.shape[1] + tokens
        seen, number = keys.unique(return_counts=True)  # type: ignore[no-untyped-call]
        owner = seen // logits.shape[1]
        place = seen + (options.indices[owner] - owner) * logits.shape[1]
        logits.view(-1)[place] -= options.frequency[owner] * number + options.presence[owner]


def _known(
    batch: SamplingBatch, options: Adjustments, some: Tensor, starts: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (index among the A, token) of the known tokens start … end - 1 of some rows."""
    rows = batch.rows.rows[options.indices[some]].tolist()
    spans = zip(rows, starts.tolist(), ends.tolist(), strict=True)
    tokens = torch.cat([batch.token_ids[row, start:end] for row, start, end in spans])
    return some.repeat_interleave(ends - starts), tokens.long()


def _allow(logits: Tensor, options: Adjustments) -> None:
    """Bar what is not in `allowed_token_ids`."""
    limited = options.indices[options.allowed_rows >= 0].tolist()
    for index, token_ids in zip(limited, options.allowed_token_ids, strict=True):
        row, allowed = logits[index], torch.from_numpy(token_ids)
        kept = row[allowed]
        row.fill_(float("-inf"))
        row[allowed] = kept


def _bar_end(logits: Tensor, options: Adjustments, num_output_tokens: Tensor) -> None:
    """Bar the end before `min_tokens`."""
    barred = (num_output_tokens < options.min_tokens)[:, None] & (options.eos_token_ids >= 0)
    owner, which = barred.nonzero(as_tuple=True)
    if len(owner):
        tokens = options.eos_token_ids[owner, which].long()
        logits[options.indices[owner], tokens] = float("-inf")
