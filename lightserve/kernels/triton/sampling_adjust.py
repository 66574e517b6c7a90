"""Rows whose options change their logits: copies of them, changed.

    count    what is newly known in rows with penalties, into a count per token of the vocabulary;
             of the draws behind a row's drafts the first alone counts
    adjust   each of the rows: penalties, tokens that are not allowed, no end before min_tokens

Counts alone are kept between steps, and are a function of the known tokens: a recomputed row gets
the same logits. A draw behind drafts adds these to what it reads. A logit_bias is added by torch
before, in a copy of its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.kernels.triton.launch import cdiv, launched

CHUNK = 4096
"""Tokens of a program that changes logits."""
COUNT_PARTS, COUNT_TILE = 8, 256
"""Programs that count one row's known tokens, and how many each of them takes at a time."""

_IN_PROMPT = tl.constexpr(1 << 30)


@launched
@triton.jit
def count_kernel(
    token_ids_ptr, rows_ptr, positions_ptr, indices_ptr, num_prompt_ptr, drafts_before_ptr,
    repetition_ptr, frequency_ptr, presence_ptr, counts_ptr, num_counted_ptr, width, stride,
    TILE: tl.constexpr, NUM_PARTS: tl.constexpr,
):  # fmt: skip
    """NUM_PARTS programs per row: add known tokens that are not counted yet to the row's counts.

    Bits 0 to 29: how often in the output; bit 30: whether in the prompt. `adjust_kernel` notes the
    number of counted tokens, when all programs have read the old one.
    """
    part, changed = tl.program_id(0), tl.program_id(1)
    index = tl.load(indices_ptr + changed)
    is_wanted = tl.load(repetition_ptr + changed) != 1.0
    is_wanted = is_wanted | (tl.load(frequency_ptr + changed) != 0.0)
    is_wanted = is_wanted | (tl.load(presence_ptr + changed) != 0.0)
    if is_wanted & (tl.load(drafts_before_ptr + changed) == 0):
        num_prompt = tl.load(num_prompt_ptr + changed)
        num_known = tl.load(positions_ptr + index).to(tl.int32)
        row = tl.load(rows_ptr + index)
        known = token_ids_ptr + row * width
        counts = counts_ptr + row * stride
        first = tl.load(num_counted_ptr + row) + part * TILE
        for start in range(first, num_known, NUM_PARTS * TILE):
            at = start + tl.arange(0, TILE)
            tokens = tl.load(known + at, mask=at < num_known, other=0)
            tl.atomic_or(counts + tokens, _IN_PROMPT, mask=at < tl.minimum(num_prompt, num_known))
            tl.atomic_add(counts + tokens, 1, mask=(at >= num_prompt) & (at < num_known))


@triton.jit
def _allowed(bits, tokens, num_words):
    """Return whether the bits of a row, `num_words` words, allow the tokens."""
    words = tl.load(bits + tokens // 32, mask=tokens // 32 < num_words, other=0)
    return ((words >> (tokens % 32)) & 1) != 0


# What differs from step to step must not make another variant of the kernel.
@launched
@triton.jit(
    do_not_specialize=[
        "num_eos", "num_allowed_words", "num_mask_words", "has_counts", "has_masks",
    ]
)  # fmt: skip
def adjust_kernel(
    from_ptr, out_ptr, token_ids_ptr, rows_ptr, positions_ptr, indices_ptr, num_prompt_ptr,
    drafts_before_ptr, repetition_ptr, frequency_ptr, presence_ptr, min_tokens_ptr, eos_ptr,
    allowed_rows_ptr, allowed_bits_ptr, mask_rows_ptr, mask_bits_ptr, counts_ptr, num_counted_ptr,
    width, stride, counts_stride, vocab_size, num_eos, num_allowed_words, num_mask_words,
    has_counts, has_masks, IS_OWN: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program per chunk and changed row: everything but the bias, which is in already.

    IS_OWN: rows of `from_ptr` are the step's; otherwise they are the changed ones. Logits of the
    model that are not finite become NaN, which no option can undo.
    """
    chunk, changed = tl.program_id(0), tl.program_id(1)
    index = tl.load(indices_ptr + changed)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = tokens < vocab_size
    source = changed.to(tl.int64)
    if IS_OWN:
        source = index
    x = tl.load(from_ptr + source * stride + tokens, mask=inside, other=0.0).to(tl.float32)
    is_fine = tl.abs(x) < float("inf")
    at = changed.to(tl.int64) * vocab_size + tokens
    position = tl.load(positions_ptr + index)
    if has_counts != 0:
        repetition = tl.load(repetition_ptr + changed)
        frequency = tl.load(frequency_ptr + changed)
        presence = tl.load(presence_ptr + changed)
        if (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0):
            row = tl.load(rows_ptr + index)
            counts = tl.load(counts_ptr + row * counts_stride + tokens, mask=inside, other=0)
            num_drafts = tl.load(drafts_before_ptr + changed)
            drafts = token_ids_ptr + row * width + position - num_drafts
            for number in range(0, num_drafts):
                counts += (tokens == tl.load(drafts + number)).to(tl.int32)
            x = tl.where(counts > 0, tl.where(x > 0.0, x / repetition, x * repetition), x)
            in_output = (counts & (_IN_PROMPT - 1)).to(tl.float32)
            x = tl.where(in_output > 0.0, x - (frequency * in_output + presence), x)
            if (chunk == 0) & (num_drafts == 0):
                tl.store(num_counted_ptr + row, position.to(tl.int32))
    allowed_row = tl.load(allowed_rows_ptr + changed)
    if allowed_row >= 0:
        bits = allowed_bits_ptr + allowed_row.to(tl.int64) * num_allowed_words
        x = tl.where(_allowed(bits, tokens, num_allowed_words), x, -float("inf"))
    if has_masks != 0:
        mask_row = tl.load(mask_rows_ptr + index)
        if mask_row >= 0:
            bits = mask_bits_ptr + mask_row.to(tl.int64) * num_mask_words
            x = tl.where(_allowed(bits, tokens, num_mask_words), x, -float("inf"))
    num_output = position - tl.load(num_prompt_ptr + changed)
    if num_output < tl.load(min_tokens_ptr + changed):
        for number in range(0, num_eos):
            end = tl.load(eos_ptr + changed * num_eos + number)
            x = tl.where(tokens == end, -float("inf"), x)
    tl.store(out_ptr + at, tl.where(is_fine, x, float("nan")), mask=inside)


def adjust(own: Tensor, batch) -> Tensor:
    """Return copies of the changed rows, float32 [A, V]; see `sampling.Logits.adjusted`.

    `batch` is a `SamplingBatch` of `worker.sampling.interface`, with adjustments and known counts,
    which are kept (see `count_kernel`). A logit that was not finite before becomes NaN.
    """
    changes, known = batch.rows.adjustments, batch.known_counts
    vocab_size, num_changed = own.shape[1], len(changes.indices)
    has_bias = len(changes.bias_values) > 0
    if has_bias:
        out = own.index_select(0, changes.indices).float()
        place = changes.bias_rows * vocab_size + changes.bias_token_ids
        out.view(-1).scatter_add_(0, place, changes.bias_values)  # each place once
    else:
        out = own.new_empty(num_changed, vocab_size, dtype=torch.float32)
    if changes.has_penalties:
        _count(batch)
    masks = batch.masks
    adjust_kernel[cdiv(vocab_size, CHUNK), num_changed](
        out if has_bias else own, out, batch.token_ids, batch.rows.rows, batch.positions,
        changes.indices, changes.num_prompt_tokens, changes.drafts_before, changes.repetition,
        changes.frequency, changes.presence, changes.min_tokens, changes.eos_token_ids,
        changes.allowed_rows, changes.allowed_bits,
        changes.allowed_rows if masks is None else masks.rows,
        changes.allowed_bits if masks is None else masks.bits, known.counts, known.num_counted,
        batch.token_ids.stride(0), vocab_size if has_bias else own.stride(0),
        known.counts.stride(0), vocab_size, changes.eos_token_ids.shape[1],
        changes.allowed_bits.shape[1], 0 if masks is None else masks.bits.shape[1],
        int(changes.has_penalties), int(masks is not None),
        IS_OWN=not has_bias,
        CHUNK=CHUNK,
        num_warps=8,
        enable_fp_fusion=True,
    )  # fmt: skip
    return out


def _count(batch) -> None:
    """Count newly known tokens in rows with penalties."""
    changes, known = batch.rows.adjustments, batch.known_counts
    count_kernel[COUNT_PARTS, len(changes.indices)](
        batch.token_ids, batch.rows.rows, batch.positions, changes.indices,
        changes.num_prompt_tokens, changes.drafts_before, changes.repetition, changes.frequency,
        changes.presence, known.counts, known.num_counted, batch.token_ids.stride(0),
        known.counts.stride(0),
        TILE=COUNT_TILE,
        NUM_PARTS=COUNT_PARTS,
        num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip
