"""Recurrent layers: where programs find rows and states, and a short convolution.

How many new tokens a row has is read on the device, so that any pass can be recorded.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.kernels.interface import AttentionBatch
from lightserve.kernels.triton.launch import cdiv, launched, next_power_of_2
from lightserve.kernels.weights import StateBank

CHUNK = 16
"""Tokens whose updates become a few products."""
TOKENS, CHANNELS = 8, 128
"""A program of the convolution has so many."""


@triton.jit
def places_of(
    pieces_ptr, slots_ptr, part_stride, head_stride, slot_stride, numbers, NUM_HEADS: tl.constexpr,
    NUM_SLOTS: tl.constexpr, PIECE: tl.constexpr, mask,
):  # fmt: skip
    """Return where numbers of a state are; strides and PIECE count numbers of its type."""
    piece = numbers // PIECE
    place = piece // NUM_SLOTS
    slot = tl.load(slots_ptr + piece % NUM_SLOTS, mask=mask, other=0).to(tl.int64)
    head = (place % NUM_HEADS).to(tl.int64)
    base = pieces_ptr + place // NUM_HEADS * part_stride + head * head_stride
    return base + slot * slot_stride + numbers % PIECE


@launched
@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _convolve_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, pieces_ptr, table_ptr, rows_ptr, starts_ptr, lengths_ptr,
    owners_ptr, num_tokens, num_rows, x_stride, part_stride, head_stride, slot_stride, table_stride,
    first_slot, NUM_HEADS: tl.constexpr, NUM_SLOTS: tl.constexpr, PIECE: tl.constexpr,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, IS_PLAIN: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the results of some tokens, of any row or none, and leave states as they are."""
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    is_channel = channels < CHANNELS
    owners = tl.load(owners_ptr + tokens, mask=tokens < num_tokens, other=num_rows)
    is_token = owners < num_rows
    start = tl.load(starts_ptr + owners, mask=is_token, other=0)
    num_new = tl.load(starts_ptr + owners + 1, mask=is_token, other=0) - start
    is_old = is_token & (tl.load(lengths_ptr + owners, mask=is_token, other=0) != num_new)
    rows = tl.load(rows_ptr + owners, mask=is_token, other=0)
    slots_ptr = (table_ptr + rows * table_stride + first_slot)[:, None]
    total = tl.zeros([BLOCK_T, BLOCK], tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_ptr + channels, mask=is_channel, other=0.0).to(tl.float32)
    for place in tl.static_range(WIDTH):
        source = tokens - (WIDTH - 1) + place
        is_new = (is_token & (source >= start))[:, None] & is_channel
        x_places = x_ptr + source.to(tl.int64)[:, None] * x_stride + channels
        x = tl.load(x_places, mask=is_new, other=0.0).to(tl.float32)
        if place < WIDTH - 1:
            is_kept = (is_old & (source < start))[:, None] & is_channel
            numbers = (source - start + (WIDTH - 1))[:, None] * CHANNELS + channels
            kept = places_of(
                pieces_ptr, slots_ptr, part_stride, head_stride, slot_stride, numbers,
                NUM_HEADS, NUM_SLOTS, PIECE, is_kept,
            )  # fmt: skip
            x += tl.load(kept, mask=is_kept, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + place * CHANNELS + channels, mask=is_channel, other=0.0)
        total += x * weight.to(tl.float32)
    result = total if IS_PLAIN else total / (1.0 + tl.exp(-total))
    places = out_ptr + tokens.to(tl.int64)[:, None] * CHANNELS + channels
    is_out = (tokens < num_tokens)[:, None] & is_channel
    tl.store(places, result.to(out_ptr.dtype.element_ty), mask=is_out)


@launched
@triton.jit
def _keep_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, pieces_ptr, table_ptr, held_ptr, rows_ptr, starts_ptr,
    lengths_ptr, x_stride, part_stride, head_stride, slot_stride, table_stride, first_slot,
    NUM_HEADS: tl.constexpr, NUM_SLOTS: tl.constexpr, PIECE: tl.constexpr, CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, IS_PLAIN: tl.constexpr, HOLDS: tl.constexpr,
    ALONE: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Keep a row's last inputs; where each row has one token, ALONE, write its result as well."""
    row = tl.program_id(0)
    start = tl.load(starts_ptr + row).to(tl.int64)
    num_new = tl.load(starts_ptr + row + 1) - start
    if num_new == 0:
        return
    known = tl.load(lengths_ptr + row) - num_new
    table_row = tl.load(rows_ptr + row)
    slots_ptr = table_ptr + table_row * table_stride + first_slot
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inputs = tl.arange(0, BLOCK_W)[:, None]
    is_input = (channels < CHANNELS) & (inputs < WIDTH)
    source = num_new - WIDTH + inputs  # among the row's new tokens, the last one last
    new = tl.load(
        x_ptr + (start + source) * x_stride + channels, mask=is_input & (source >= 0), other=0.0
    )
    before = source + (WIDTH - 1)  # among the inputs that were kept
    # Vectors, not scalars: the interpreter makes masks of nothing else.
    is_before = is_input & (source < 0) & (known > 0 * inputs)
    places = places_of(
        pieces_ptr, slots_ptr, part_stride, head_stride, slot_stride, before * CHANNELS + channels,
        NUM_HEADS, NUM_SLOTS, PIECE, is_before,
    )  # fmt: skip
    window = new + tl.load(places, mask=is_before, other=0.0)
    tl.debug_barrier()  # all threads have read what others are about to overwrite
    is_kept = is_input & (inputs > 0)
    if HOLDS:
        is_kept &= tl.load(held_ptr + table_row) + 0 * inputs == 0
    places = places_of(
        pieces_ptr, slots_ptr, part_stride, head_stride, slot_stride,
        (inputs - 1) * CHANNELS + channels, NUM_HEADS, NUM_SLOTS, PIECE, is_kept,
    )  # fmt: skip
    tl.store(places, window, mask=is_kept)
    if ALONE:
        weight = tl.load(weight_ptr + inputs * CHANNELS + channels, mask=is_input, other=0.0)
        total = tl.sum(window.to(tl.float32) * weight.to(tl.float32), axis=0)[None, :]
        is_channel = channels < CHANNELS
        if HAS_BIAS:
            total += tl.load(bias_ptr + channels, mask=is_channel, other=0.0).to(tl.float32)
        result = total if IS_PLAIN else total / (1.0 + tl.exp(-total))
        place = out_ptr + start * CHANNELS + channels
        tl.store(place, result.to(out_ptr.dtype.element_ty), mask=is_channel)


class Walk(NamedTuple):
    """The rows of a batch, as programs find them on the device."""

    chunks: tuple[int, ...]
    """Tokens that a step takes: 1 where there may be rows of one, CHUNK where there may be more."""
    owners: Tensor
    """int32 [T], row of each token; the number of rows where it has none."""
    chunk_owners: Tensor
    """int32 [N], row of each chunk, of those that have more than one token; as `owners`."""
    chunk_starts: Tensor
    """int64 [R + 1], number of each row's first chunk."""


def walk_of(batch: AttentionBatch) -> Walk:
    """Return it, worked out once for all layers."""
    found: Walk | None = batch.prepared.get(Walk)
    if found is None:
        starts, num_tokens = batch.cu_seqlens_q, len(batch.positions)
        if batch.most is None:
            own = [cdiv(count, CHUNK) for count in batch.host_q_lens if count > 1]
            num_chunks, has_single = sum(own), 1 in batch.host_q_lens
        else:
            num_chunks = cdiv(num_tokens, CHUNK) + min(len(batch.rows), num_tokens // 2)
            has_single = True
        sizes = (1,) * has_single + (CHUNK,) * (num_chunks > 0)
        counts = starts.diff()
        chunks = torch.where(counts > 1, (counts + CHUNK - 1) // CHUNK, 0)
        chunk_starts = torch.nn.functional.pad(chunks.cumsum(0), (1, 0))
        owners, chunk_owners = (
            torch.searchsorted(
                ends, torch.arange(size, device=ends.device), right=True, out_int32=True
            )
            for ends, size in ((starts[1:], num_tokens), (chunk_starts[1:], num_chunks))
        )
        found = Walk(sizes, owners, chunk_owners, chunk_starts)
        batch.prepared[Walk] = found
    return found


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    bank: StateBank,
    batch: AttentionBatch,
    *,
    is_plain: bool = False,
) -> Tensor:
    """See `Kernels.convolve`."""
    width, channels = weight.shape
    out = torch.empty((len(x), channels), dtype=x.dtype, device=x.device)
    if not len(x):
        return out
    block = min(CHANNELS, next_power_of_2(channels))
    walk = walk_of(batch)
    is_alone = walk.chunks == (1,)
    pieces, strides, sizes = state_of(bank, batch, x.dtype)
    tensors, held = (x, weight, bias, out, pieces, batch.state_slots), held_of(batch)
    rows = (batch.rows, batch.cu_seqlens_q, batch.context_lens)
    sizes |= {"CHANNELS": channels, "WIDTH": width, "HAS_BIAS": bias is not None}
    sizes["IS_PLAIN"] = is_plain
    if not is_alone:
        _convolve_kernel[cdiv(len(x), TOKENS), cdiv(channels, block)](
            *(*tensors, *rows, walk.owners, len(x), len(batch.rows), x.stride(0), *strides),
            **sizes,
            BLOCK_T=TOKENS,
            BLOCK=block,
            enable_fp_fusion=True,
        )
    _keep_kernel[len(batch.rows), cdiv(channels, block)](
        *(*tensors, held, *rows, x.stride(0), *strides),
        **sizes,
        HOLDS=held is not None,
        ALONE=is_alone,
        BLOCK_W=next_power_of_2(width),
        BLOCK=block,
        enable_fp_fusion=True,
    )
    return out


def state_of(
    bank: StateBank, batch: AttentionBatch, dtype: torch.dtype
) -> tuple[Tensor, tuple[int, ...], dict[str, int]]:
    """Return a bank as numbers of `dtype`, where its slots are, and its sizes."""
    assert batch.state_slots is not None, "a model with states was given none"
    pieces = bank.pieces.view(dtype)
    places = (*pieces.stride()[:3], batch.state_slots.stride(0), bank.first)
    sizes = {"NUM_HEADS": pieces.shape[1], "NUM_SLOTS": bank.num_slots, "PIECE": pieces.shape[3]}
    return pieces, places, sizes


def held_of(batch: AttentionBatch) -> Tensor | None:
    """Return which rows' states stay as they are, see `KeptInputs.is_held`; None: those of none."""
    return None if batch.kept is None else batch.kept.is_held
