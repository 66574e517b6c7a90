"""Bars the last token of a bad word where the output ends with the others, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from lightserve.worker.sampling.interface import Adjustments, SamplingBatch


def bar_words(logits: Tensor, rows: Tensor, options: Adjustments, batch: SamplingBatch) -> None:
    """Bar the ends of bad words in logits, contiguous float32 [rows, vocab], in place.

    `rows`, int64 [A]: where each of the A has its logits. Waits for nothing.
    """
    if not len(options.word_ends):
        return
    owners = options.word_rows
    indices = options.indices[owners]
    width = options.word_starts.shape[1]
    # The last tokens before each new one, [entries, width]; those of a prompt are no output.
    places = torch.arange(-width, 0, device=logits.device) + batch.positions[indices, None]
    known = batch.token_ids[batch.rows.rows[indices, None], places.clamp(min=0)]
    is_output = places >= options.num_prompt_tokens[owners, None]
    fits = (known == options.word_starts) & is_output | (options.word_starts < 0)
    # Added, as words of a row may have the same end: what is barred by one of them is barred.
    added = torch.zeros(len(owners), dtype=logits.dtype, device=logits.device)
    added.masked_fill_(fits.all(dim=1), float("-inf"))
    place = rows[owners] * logits.shape[1] + options.word_ends
    logits.view(-1).scatter_add_(0, place, added)
