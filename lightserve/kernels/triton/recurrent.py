"""Recurrent layers: a short convolution, and the gated delta rule.

How many new tokens a row has is read on the device, so that any pass can be recorded. Rows of one
token take one step. Of longer ones, whatever a chunk's tokens say of each other is found for all
chunks at once; then a program has some columns of a head's state and walks over a row's chunks:

    tokens of a chunk ─► inverse, scores [CHUNK, CHUNK] ─┐  all chunks beside each other
    state ─► products with keys and queries ─────────────┴► results ─► next chunk's state
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.kernels.interface import AttentionBatch
from lightserve.kernels.triton.launch import cdiv, launched, next_power_of_2
from lightserve.kernels.weights import DeltaRule, StateBank

CHUNK = 16
"""Tokens whose updates become a few products."""
TOKENS, CHANNELS = 8, 128
"""A program of the convolution has so many."""
COLUMNS = 16
"""Columns of a state that a program has; fewer spill no registers."""


@triton.jit
def _places(
    pieces_ptr,
    slots_ptr,
    part_stride,
    head_stride,
    slot_stride,
    numbers,
    NUM_HEADS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    PIECE: tl.constexpr,
    mask,
):
    """Return where numbers of a state are; strides and PIECE count numbers of its type."""
    piece = numbers // PIECE
    place = piece // NUM_SLOTS
    slot = tl.load(slots_ptr + piece % NUM_SLOTS, mask=mask, other=0).to(tl.int64)
    head = (place % NUM_HEADS).to(tl.int64)
    base = pieces_ptr + place // NUM_HEADS * part_stride + head * head_stride
    return base + slot * slot_stride + numbers % PIECE


@launched
@triton.jit
def _convolve_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    pieces_ptr,
    table_ptr,
    rows_ptr,
    starts_ptr,
    lengths_ptr,
    owners_ptr,
    num_tokens,
    num_rows,
    x_stride,
    part_stride,
    head_stride,
    slot_stride,
    table_stride,
    first_slot,
    NUM_HEADS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    PIECE: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_PLAIN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
            kept = _places(
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
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    pieces_ptr,
    table_ptr,
    rows_ptr,
    starts_ptr,
    lengths_ptr,
    x_stride,
    part_stride,
    head_stride,
    slot_stride,
    table_stride,
    first_slot,
    NUM_HEADS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    PIECE: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_PLAIN: tl.constexpr,
    ALONE: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Keep a row's last inputs; where each row has one token, ALONE, write its result as well."""
    row = tl.program_id(0)
    start = tl.load(starts_ptr + row).to(tl.int64)
    num_new = tl.load(starts_ptr + row + 1) - start
    if num_new == 0:
        return
    known = tl.load(lengths_ptr + row) - num_new
    slots_ptr = table_ptr + tl.load(rows_ptr + row) * table_stride + first_slot
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
    places = _places(
        pieces_ptr, slots_ptr, part_stride, head_stride, slot_stride, before * CHANNELS + channels,
        NUM_HEADS, NUM_SLOTS, PIECE, is_before,
    )  # fmt: skip
    window = new + tl.load(places, mask=is_before, other=0.0)
    tl.debug_barrier()  # all threads have read what others are about to overwrite
    is_kept = is_input & (inputs > 0)
    places = _places(
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


@triton.jit
def _units(ptr, tokens, is_token, stride, KEY_DIM: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return queries or keys of a head, [T, BLOCK_K], of length 1; zeros where there are none."""
    keys = tl.arange(0, BLOCK_K)[None, :]
    mask = is_token[:, None] & (keys < KEY_DIM)
    x = tl.load(ptr + tokens[:, None] * stride + keys, mask=mask, other=0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, axis=1) + 1e-6)[:, None]


@triton.jit
def _rates(
    ptr, tokens, is_token, stride, decay, rate_bias, HEADS: tl.constexpr, BETA_SCALE: tl.constexpr
):
    """Return a head's betas and logarithms of decays, [T]; zeros where there are none."""
    gates = ptr + tokens * stride
    beta = BETA_SCALE / (1.0 + tl.exp(-tl.load(gates, mask=is_token, other=0.0)))
    rate = tl.load(gates + HEADS, mask=is_token, other=0.0) + rate_bias
    power = tl.exp(rate)
    # Of a number beside 1 little is left: there the logarithm's first terms.
    small = power * (1.0 - power * (0.5 - power * (1.0 / 3.0)))
    large = tl.where(rate > 20.0, rate, tl.log(1.0 + power))
    rate = tl.where(power < 0.01, small, large)
    return tl.where(is_token, beta, 0.0), tl.where(is_token, decay * rate, 0.0)


@launched
@triton.jit
def _inverse_kernel(
    mixed_ptr,
    gates_ptr,
    decay_ptr,
    rate_bias_ptr,
    inverse_ptr,
    scores_ptr,
    starts_ptr,
    owners_ptr,
    chunk_starts_ptr,
    num_rows,
    mixed_stride,
    gates_stride,
    scale,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    BETA_SCALE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the inverse of a chunk's triangular system, and its queries' scores of its keys."""
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(owners_ptr + chunk)
    if row >= num_rows:
        return
    places = tl.arange(0, CHUNK)
    first = tl.load(starts_ptr + row) + (chunk - tl.load(chunk_starts_ptr + row)) * CHUNK
    tokens = (first + places).to(tl.int64)
    is_token = tokens < tl.load(starts_ptr + row + 1)
    q_ptr = mixed_ptr + head // (HEADS // KEY_HEADS) * KEY_DIM
    q = _units(q_ptr, tokens, is_token, mixed_stride, KEY_DIM, BLOCK_K) * scale
    k = _units(q_ptr + KEY_HEADS * KEY_DIM, tokens, is_token, mixed_stride, KEY_DIM, BLOCK_K)
    beta, decay = _rates(
        gates_ptr + head, tokens, is_token, gates_stride, tl.load(decay_ptr + head),
        tl.load(rate_bias_ptr + head), HEADS, BETA_SCALE,
    )  # fmt: skip
    total = tl.cumsum(decay, axis=0)
    between = total[:, None] - total[None, :]
    is_before = places[:, None] >= places[None, :]
    weights = tl.exp(tl.where(is_before, between, float("-inf")))
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * weights
    system = tl.dot(k, tl.trans(k), input_precision=PRECISION) * weights * beta[:, None]
    system = tl.where(places[:, None] > places[None, :], system, 0.0)
    inverse = tl.where(places[:, None] == places[None, :], 1.0, 0.0)
    for line in range(1, CHUNK):
        is_line = places[:, None] == line
        own = tl.sum(tl.where(is_line, system, 0.0), axis=0)
        known = tl.sum(own[:, None] * inverse, axis=0)
        inverse = tl.where(is_line, inverse - known[None, :], inverse)
    out = (tokens[:, None] * HEADS + head) * CHUNK + places[None, :]
    tl.store(inverse_ptr + out, inverse, mask=is_token[:, None])
    tl.store(scores_ptr + out, scores, mask=is_token[:, None])


# fmt: off
@launched
@triton.jit
def _delta_kernel(
    mixed_ptr, gates_ptr, decay_ptr, rate_bias_ptr, inverse_ptr, scores_ptr, out_ptr, pieces_ptr,
    table_ptr, rows_ptr, starts_ptr, lengths_ptr, mixed_stride, gates_stride, part_stride,
    head_stride, slot_stride, table_stride, first_slot, scale, NUM_HEADS: tl.constexpr,
    NUM_SLOTS: tl.constexpr, PIECE: tl.constexpr, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, BETA_SCALE: tl.constexpr, VALUE_DIM: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    """Update some columns of a head's state by all new tokens of a row.

    CHUNK 1: of rows that have one; else of rows that have more.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(starts_ptr + row).to(tl.int64)
    num_new = tl.load(starts_ptr + row + 1) - start
    if (num_new == 0) | ((num_new == 1) != (CHUNK == 1)):
        return
    known = tl.load(lengths_ptr + row) - num_new
    slots_ptr = table_ptr + tl.load(rows_ptr + row) * table_stride + first_slot
    keys = tl.arange(0, BLOCK_K)[:, None]
    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (keys < KEY_DIM) & (columns < VALUE_DIM)
    numbers = (head * KEY_DIM + keys) * VALUE_DIM + columns
    state_places = _places(
        pieces_ptr, slots_ptr, part_stride, head_stride, slot_stride, numbers,
        NUM_HEADS, NUM_SLOTS, PIECE, mask,
    )  # fmt: skip
    state = tl.load(state_places, mask=mask & (known > 0 * keys), other=0.0)
    own_decay, rate_bias = tl.load(decay_ptr + head), tl.load(rate_bias_ptr + head)
    q_ptr = mixed_ptr + head // (HEADS // KEY_HEADS) * KEY_DIM
    k_ptr = q_ptr + KEY_HEADS * KEY_DIM
    v_ptr = mixed_ptr + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + columns
    places = tl.arange(0, CHUNK)
    for done in range(0, num_new, CHUNK):
        tokens = start + done + places
        is_token = done + places < num_new
        is_value = is_token[:, None] & (columns < VALUE_DIM)
        k = _units(k_ptr, tokens, is_token, mixed_stride, KEY_DIM, BLOCK_K)
        beta, decay = _rates(
            gates_ptr + head, tokens, is_token, gates_stride, own_decay, rate_bias, HEADS,
            BETA_SCALE,
        )  # fmt: skip
        v = tl.load(v_ptr + tokens[:, None] * mixed_stride, mask=is_value, other=0.0)
        v = v.to(tl.float32)
        if CHUNK == 1:
            state *= tl.exp(tl.sum(decay))
            key = tl.trans(k)
            added = (v - tl.sum(state * key, axis=0)[None, :]) * beta[:, None]
            state += key * added
            q = _units(q_ptr, tokens, is_token, mixed_stride, KEY_DIM, BLOCK_K) * scale
            said = tl.sum(state * tl.trans(q), axis=0)[None, :]
        else:
            total = tl.cumsum(decay, axis=0)
            grown = tl.exp(total)[:, None]
            pair = (tokens[:, None] * HEADS + head) * CHUNK + places[None, :]
            recalled = tl.dot(k, state, input_precision=PRECISION)
            added = beta[:, None] * (v - grown * recalled)
            inverse = tl.load(inverse_ptr + pair, mask=is_token[:, None], other=0.0)
            added = tl.dot(inverse, added, input_precision=PRECISION)
            q = _units(q_ptr, tokens, is_token, mixed_stride, KEY_DIM, BLOCK_K)
            said = tl.dot(q, state, input_precision=PRECISION) * (grown * scale)
            scores = tl.load(scores_ptr + pair, mask=is_token[:, None], other=0.0)
            said = tl.dot(scores, added, said, input_precision=PRECISION)
            last = tl.sum(decay, axis=0)
            kept = tl.trans(k * tl.exp(last - total)[:, None])
            state = tl.dot(kept, added, state * tl.exp(last), input_precision=PRECISION)
        out = (tokens[:, None] * HEADS + head) * VALUE_DIM + columns
        tl.store(out_ptr + out, said, mask=is_value)
    tl.store(state_places, state, mask=mask)


@launched
@triton.jit
def _gated_norm_kernel(
    x_ptr,
    z_ptr,
    norm_ptr,
    out_ptr,
    owners_ptr,
    num_rows,
    eps,
    z_stride,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    place = (token * HEADS + head) * SIZE + columns
    is_said = mask & (tl.load(owners_ptr + token) + 0 * columns < num_rows)  # else padding
    x = tl.load(x_ptr + place, mask=is_said, other=0.0)
    z = tl.load(z_ptr + token * z_stride + head * SIZE + columns, mask=mask, other=0.0)
    z = z.to(tl.float32)
    weight = tl.load(norm_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps) * weight
    x *= z / (1.0 + tl.exp(-z))
    tl.store(out_ptr + place, x.to(out_ptr.dtype.element_ty), mask=mask)


class _Walk(NamedTuple):
    """The rows of a batch, as programs find them on the device."""

    chunks: tuple[int, ...]
    """Tokens that a step takes: 1 where there may be rows of one, CHUNK where there may be more."""
    owners: Tensor
    """int32 [T], row of each token; the number of rows where it has none."""
    chunk_owners: Tensor
    """int32 [N], row of each chunk, of those that have more than one token; as `owners`."""
    chunk_starts: Tensor
    """int64 [R + 1], number of each row's first chunk."""


def _walk(batch: AttentionBatch) -> _Walk:
    """Return it, worked out once for all layers."""
    found: _Walk | None = batch.prepared.get(_Walk)
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
        found = _Walk(sizes, owners, chunk_owners, chunk_starts)
        batch.prepared[_Walk] = found
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
    walk = _walk(batch)
    is_alone = walk.chunks == (1,)
    pieces, strides, sizes = _state(bank, batch, x.dtype)
    tensors = (x, weight, bias, out, pieces, batch.state_slots)
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
        *(*tensors, *rows, x.stride(0), *strides),
        **sizes,
        ALONE=is_alone,
        BLOCK_W=next_power_of_2(width),
        BLOCK=block,
        enable_fp_fusion=True,
    )
    return out


def delta_rule(
    mixed: Tensor,
    z: Tensor,
    gates: Tensor,
    *,
    rule: DeltaRule,
    bank: StateBank,
    batch: AttentionBatch,
) -> Tensor:
    """See `Kernels.delta_rule`."""
    num_heads, value_dim = len(rule.decay), rule.value_dim
    shape = len(mixed), num_heads * value_dim
    out = torch.empty(shape, dtype=mixed.dtype, device=mixed.device)
    if not len(mixed):
        return out
    said = torch.empty(shape, dtype=torch.float32, device=mixed.device)
    _update_states(mixed, gates, said, rule=rule, bank=bank, batch=batch)
    _gated_norm_kernel[len(mixed), num_heads](
        *(said, z, rule.norm, out, _walk(batch).owners, len(batch.rows), rule.eps, z.stride(0)),
        HEADS=num_heads,
        SIZE=value_dim,
        BLOCK=next_power_of_2(value_dim),
        enable_fp_fusion=True,
    )
    return out


def _update_states(
    mixed: Tensor,
    gates: Tensor,
    said: Tensor,
    *,
    rule: DeltaRule,
    bank: StateBank,
    batch: AttentionBatch,
) -> None:
    """Write the states behind all new tokens, and what they say to queries."""
    num_heads, walk, num_rows = len(rule.decay), _walk(batch), len(batch.rows)
    pieces, strides, sizes = _state(bank, batch, torch.float32)
    inputs = mixed, gates, rule.decay, rule.rate_bias
    heads = {
        "KEY_HEADS": rule.num_key_heads,
        "HEADS": num_heads,
        "KEY_DIM": rule.key_dim,
        "BETA_SCALE": rule.beta_scale,
    }
    options = {
        "BLOCK_K": max(16, next_power_of_2(rule.key_dim)),
        "PRECISION": "ieee" if mixed.dtype == torch.float32 else "tf32",
        "num_stages": 2,
    }
    own, scale = (mixed.stride(0), gates.stride(0)), rule.key_dim**-0.5
    num_chunks = len(walk.chunk_owners)
    pairs = said.new_empty(2, len(mixed) if num_chunks else 0, num_heads, CHUNK)
    if num_chunks:
        _inverse_kernel[num_chunks, num_heads](
            *(*inputs, *pairs, batch.cu_seqlens_q, walk.chunk_owners, walk.chunk_starts),
            *(num_rows, *own, scale),
            **heads,
            CHUNK=CHUNK,
            **options,
            enable_fp_fusion=True,
        )
    for chunk in walk.chunks:
        _delta_kernel[num_rows, num_heads, cdiv(rule.value_dim, COLUMNS)](
            *(*inputs, *pairs, said, pieces, batch.state_slots),
            *(batch.rows, batch.cu_seqlens_q, batch.context_lens),
            *(*own, *strides, scale),
            **sizes,
            **heads,
            VALUE_DIM=rule.value_dim,
            CHUNK=chunk,
            BLOCK=COLUMNS,
            **options,
            enable_fp_fusion=True,
        )


def _state(
    bank: StateBank, batch: AttentionBatch, dtype: torch.dtype
) -> tuple[Tensor, tuple[int, ...], dict[str, int]]:
    """Return a bank as numbers of `dtype`, where its slots are, and its sizes."""
    assert batch.state_slots is not None, "a model with states was given none"
    pieces = bank.pieces.view(dtype)
    places = (*pieces.stride()[:3], batch.state_slots.stride(0), bank.first)
    sizes = {"NUM_HEADS": pieces.shape[1], "NUM_SLOTS": bank.num_slots, "PIECE": pieces.shape[3]}
    return pieces, places, sizes
