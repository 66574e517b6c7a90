"""Layers whose states are matrices: the gated delta rule, with a decay for each head or for each
channel of keys, and Mamba-2.

Rows of one token take one step. Of longer ones, whatever a chunk's tokens say of each other is
found for all chunks at once; then a program has some columns of a head's state and walks over a
row's chunks:

    tokens of a chunk ─► scores, inverse [CHUNK, CHUNK] ─┐  all chunks beside each other
    state ─► products with keys and queries ─────────────┴► results ─► next chunk's state

Mamba-2 adds values as they are, and needs no inverse: CORRECTS says which it is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.kernels.interface import AttentionBatch, Kernels
from lightserve.kernels.triton.launch import cdiv, launched, next_power_of_2
from lightserve.kernels.triton.recurrent import (
    CHUNK,
    convolve,
    held_of,
    places_of,
    state_of,
    walk_of,
)
from lightserve.kernels.weights import DeltaRule, MambaRule, StateBank

COLUMNS = 16
"""Columns of a state that a program has; fewer spill no registers."""


@triton.jit
def _vectors(
    ptr, tokens, is_token, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, IS_UNIT: tl.constexpr
):
    """Return queries or keys of a head, [T, BLOCK]; zeros where there are none.

    IS_UNIT: they are divided by their lengths.
    """
    columns = tl.arange(0, BLOCK)[None, :]
    mask = is_token[:, None] & (columns < SIZE)
    x = tl.load(ptr + tokens[:, None] * stride + columns, mask=mask, other=0.0).to(tl.float32)
    if IS_UNIT:
        x *= tl.rsqrt(tl.sum(x * x, axis=1) + 1e-6)[:, None]
    return x


@triton.jit
def _biases(ptr, head, KEY_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BY_CHANNEL: tl.constexpr):
    """Return what is added to a head's rates: a number, or [1, BLOCK_K]."""
    if BY_CHANNEL:
        keys = tl.arange(0, BLOCK_K)[None, :]
        bias = tl.load(ptr + head * KEY_DIM + keys, mask=keys < KEY_DIM, other=0.0)
    else:
        bias = tl.load(ptr + head)
    return bias


@triton.jit
def _rates(
    ptr, tokens, is_token, stride, head, decay, bias, HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr, CORRECTS: tl.constexpr, BY_CHANNEL: tl.constexpr,
    BETA_SCALE: tl.constexpr,
):  # fmt: skip
    """Return factors of a head's values, [T], and logarithms of decays, [T] or [T, BLOCK_K].

    Factors are betas if CORRECTS, else rates. Zeros where there are no tokens.
    """
    gates = ptr + tokens * stride
    if CORRECTS:
        factor = BETA_SCALE / (1.0 + tl.exp(-tl.load(gates + head, mask=is_token, other=0.0)))
        gates += HEADS
    if BY_CHANNEL:
        keys = tl.arange(0, BLOCK_K)[None, :]
        mask = is_token[:, None] & (keys < KEY_DIM)
        rate = tl.load(gates[:, None] + head * KEY_DIM + keys, mask=mask, other=0.0) + bias
    else:
        mask = is_token
        rate = tl.load(gates + head, mask=mask, other=0.0) + bias
    power = tl.exp(rate)
    # Of a number beside 1 little is left: there the logarithm's first terms.
    small = power * (1.0 - power * (0.5 - power * (1.0 / 3.0)))
    large = tl.where(rate > 20.0, rate, tl.log(1.0 + power))
    rate = tl.where(power < 0.01, small, large)
    if not CORRECTS:
        factor = rate
    return tl.where(is_token, factor, 0.0), tl.where(mask, decay * rate, 0.0)


@triton.jit
def _pairs_by_channel(q, k, total, CHUNK: tl.constexpr):
    """Return products of queries, and of keys, with the keys of a chunk, [CHUNK, CHUNK] each.

    Each channel has decayed since by its own factor; where keys come later results mean nothing.
    """
    places = tl.arange(0, CHUNK)
    scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    system = tl.zeros([CHUNK, CHUNK], tl.float32)
    for line in range(CHUNK):
        is_line = places[:, None] == line
        key = tl.sum(tl.where(is_line, k, 0.0), axis=0)[None, :]
        then = tl.sum(tl.where(is_line, total, 0.0), axis=0)[None, :]
        left = key * tl.exp(tl.where(places[:, None] >= line, total - then, 0.0))
        is_column = places[None, :] == line
        scores = tl.where(is_column, tl.sum(q * left, axis=1)[:, None], scores)
        system = tl.where(is_column, tl.sum(k * left, axis=1)[:, None], system)
    return scores, system


# fmt: off
@launched
@triton.jit(do_not_specialize=["num_rows"])
def _pairs_kernel(
    mixed_ptr, gates_ptr, decay_ptr, rate_bias_ptr, inverse_ptr, scores_ptr, starts_ptr, owners_ptr,
    chunk_starts_ptr, num_rows, mixed_stride, gates_stride, scale, KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr, KEY_DIM: tl.constexpr, Q_PLACE: tl.constexpr, K_PLACE: tl.constexpr,
    CORRECTS: tl.constexpr, BY_CHANNEL: tl.constexpr, BETA_SCALE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    """Write a chunk's queries' scores of its keys, and the inverse of its triangular system."""
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(owners_ptr + chunk)
    if row >= num_rows:
        return
    places = tl.arange(0, CHUNK)
    first = tl.load(starts_ptr + row) + (chunk - tl.load(chunk_starts_ptr + row)) * CHUNK
    tokens = (first + places).to(tl.int64)
    is_token = tokens < tl.load(starts_ptr + row + 1)
    head_ptr = mixed_ptr + head // (HEADS // KEY_HEADS) * KEY_DIM
    q = _vectors(
        head_ptr + Q_PLACE, tokens, is_token, mixed_stride, KEY_DIM, BLOCK_K, CORRECTS
    ) * scale  # fmt: skip
    k = _vectors(head_ptr + K_PLACE, tokens, is_token, mixed_stride, KEY_DIM, BLOCK_K, CORRECTS)
    factor, decay = _rates(
        gates_ptr, tokens, is_token, gates_stride, head, tl.load(decay_ptr + head),
        _biases(rate_bias_ptr, head, KEY_DIM, BLOCK_K, BY_CHANNEL),
        HEADS, KEY_DIM, BLOCK_K, CORRECTS, BY_CHANNEL, BETA_SCALE,
    )  # fmt: skip
    total = tl.cumsum(decay, axis=0)
    is_before = places[:, None] >= places[None, :]
    if BY_CHANNEL:
        scores, system = _pairs_by_channel(q, k, total, CHUNK)
    else:
        between = total[:, None] - total[None, :]
        weights = tl.exp(tl.where(is_before, between, float("-inf")))
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * weights
        if CORRECTS:
            system = tl.dot(k, tl.trans(k), input_precision=PRECISION) * weights
    out = (tokens[:, None] * HEADS + head) * CHUNK + places[None, :]
    tl.store(scores_ptr + out, tl.where(is_before, scores, 0.0), mask=is_token[:, None])
    if CORRECTS:
        system = tl.where(places[:, None] > places[None, :], system * factor[:, None], 0.0)
        inverse = tl.where(places[:, None] == places[None, :], 1.0, 0.0)
        for line in range(1, CHUNK):
            is_line = places[:, None] == line
            own = tl.sum(tl.where(is_line, system, 0.0), axis=0)
            known = tl.sum(own[:, None] * inverse, axis=0)
            inverse = tl.where(is_line, inverse - known[None, :], inverse)
        tl.store(inverse_ptr + out, inverse, mask=is_token[:, None])


@triton.jit
def _step(
    state, q, k, v, factor, decay, CORRECTS: tl.constexpr, BY_CHANNEL: tl.constexpr
):
    """Return a state behind one token, and what it says to the query, [1, columns]."""
    if BY_CHANNEL:
        state *= tl.trans(tl.exp(decay))
    else:
        state *= tl.exp(tl.sum(decay))
    key = tl.trans(k)
    if CORRECTS:
        v -= tl.sum(state * key, axis=0)[None, :]
    state += key * (v * factor[:, None])
    return state, tl.sum(state * tl.trans(q), axis=0)[None, :]


@triton.jit
def _step_over(
    state, q, k, v, factor, decay, inverse_ptrs, scores, is_token, CORRECTS: tl.constexpr,
    BY_CHANNEL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return a state behind a chunk, and what states say to its queries, [CHUNK, columns]."""
    total = tl.cumsum(decay, axis=0)
    last = tl.sum(decay, axis=0)
    if BY_CHANNEL:
        grown, left, kept = tl.exp(total), tl.exp(last[None, :] - total), tl.exp(last)[:, None]
    else:
        grown, left = tl.exp(total)[:, None], tl.exp(last - total)[:, None]
        kept = tl.exp(last)
    if CORRECTS:
        v -= tl.dot(k * grown, state, input_precision=PRECISION)
        inverse = tl.load(inverse_ptrs, mask=is_token[:, None], other=0.0)
        added = tl.dot(inverse, v * factor[:, None], input_precision=PRECISION)
    else:
        added = v * factor[:, None]
    said = tl.dot(q * grown, state, input_precision=PRECISION)
    said = tl.dot(scores, added, said, input_precision=PRECISION)
    state = tl.dot(tl.trans(k * left), added, state * kept, input_precision=PRECISION)
    return state, said


# fmt: off
@launched
@triton.jit
def _scan_kernel(
    mixed_ptr, gates_ptr, decay_ptr, rate_bias_ptr, inverse_ptr, scores_ptr, out_ptr, pieces_ptr,
    table_ptr, held_ptr, rows_ptr, starts_ptr, lengths_ptr, mixed_stride, gates_stride, part_stride,
    head_stride, slot_stride, table_stride, first_slot, scale, NUM_HEADS: tl.constexpr,
    NUM_SLOTS: tl.constexpr, PIECE: tl.constexpr, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, Q_PLACE: tl.constexpr, K_PLACE: tl.constexpr, CORRECTS: tl.constexpr,
    BY_CHANNEL: tl.constexpr, BETA_SCALE: tl.constexpr, V_PLACE: tl.constexpr,
    VALUE_DIM: tl.constexpr, HOLDS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
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
    table_row = tl.load(rows_ptr + row)
    keys = tl.arange(0, BLOCK_K)[:, None]
    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (keys < KEY_DIM) & (columns < VALUE_DIM)
    state_places = places_of(
        pieces_ptr, table_ptr + table_row * table_stride + first_slot, part_stride, head_stride,
        slot_stride, (head * KEY_DIM + keys) * VALUE_DIM + columns,
        NUM_HEADS, NUM_SLOTS, PIECE, mask,
    )  # fmt: skip
    state = tl.load(state_places, mask=mask & (known > 0 * keys), other=0.0)
    own_decay = tl.load(decay_ptr + head)
    bias = _biases(rate_bias_ptr, head, KEY_DIM, BLOCK_K, BY_CHANNEL)
    head_ptr = mixed_ptr + head // (HEADS // KEY_HEADS) * KEY_DIM
    v_ptr = mixed_ptr + V_PLACE + head * VALUE_DIM + columns
    places = tl.arange(0, CHUNK)
    for done in range(0, num_new, CHUNK):
        tokens = start + done + places
        is_token = done + places < num_new
        is_value = is_token[:, None] & (columns < VALUE_DIM)
        q = _vectors(
            head_ptr + Q_PLACE, tokens, is_token, mixed_stride, KEY_DIM, BLOCK_K, CORRECTS
        ) * scale  # fmt: skip
        k = _vectors(
            head_ptr + K_PLACE, tokens, is_token, mixed_stride, KEY_DIM, BLOCK_K, CORRECTS
        )  # fmt: skip
        factor, decay = _rates(
            gates_ptr, tokens, is_token, gates_stride, head, own_decay, bias, HEADS, KEY_DIM,
            BLOCK_K, CORRECTS, BY_CHANNEL, BETA_SCALE,
        )  # fmt: skip
        v = tl.load(v_ptr + tokens[:, None] * mixed_stride, mask=is_value, other=0.0)
        v = v.to(tl.float32)
        if CHUNK == 1:
            state, said = _step(state, q, k, v, factor, decay, CORRECTS, BY_CHANNEL)
        else:
            pair = (tokens[:, None] * HEADS + head) * CHUNK + places[None, :]
            scores = tl.load(scores_ptr + pair, mask=is_token[:, None], other=0.0)
            state, said = _step_over(
                state, q, k, v, factor, decay, inverse_ptr + pair, scores, is_token,
                CORRECTS, BY_CHANNEL, PRECISION,
            )  # fmt: skip
        out = (tokens[:, None] * HEADS + head) * VALUE_DIM + columns
        tl.store(out_ptr + out, said, mask=is_value)
    if HOLDS:
        mask &= tl.load(held_ptr + table_row) + 0 * keys == 0
    tl.store(state_places, state, mask=mask)


@launched
@triton.jit(do_not_specialize=["num_rows"])
def _gate_kernel(
    x_ptr, z_ptr, weight_ptr, own_ptr, out_ptr, owners_ptr, num_rows, eps, z_stride, own_stride,
    HEADS: tl.constexpr, SIZE: tl.constexpr, CORRECTS: tl.constexpr, BY_SIGMOID: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Gate a head's result, normalised; without CORRECTS with the token's own numbers instead."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    place = (token * HEADS + head) * SIZE + columns
    is_said = mask & (tl.load(owners_ptr + token) + 0 * columns < num_rows)  # else padding
    x = tl.load(x_ptr + place, mask=is_said, other=0.0)
    z = tl.load(z_ptr + token * z_stride + head * SIZE + columns, mask=mask, other=0.0)
    z = z.to(tl.float32)
    if CORRECTS:
        weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
        x *= tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps) * weight
    else:
        own = tl.load(own_ptr + token * own_stride + head * SIZE + columns, mask=is_said, other=0.0)
        x += tl.load(weight_ptr + head) * own.to(tl.float32)
    gate = 1.0 / (1.0 + tl.exp(-z))
    if not BY_SIGMOID:
        gate *= z
    tl.store(out_ptr + place, (x * gate).to(out_ptr.dtype.element_ty), mask=mask)


class _Layer(NamedTuple):
    """A layer's numbers, of whichever kind."""

    mixed: Tensor
    """[T, n], queries, keys and values."""
    gates: Tensor
    """float32 [T, n]."""
    decay: Tensor
    """float32 [H]."""
    rate_bias: Tensor
    """float32 [H], or of each channel of keys."""
    value_dim: int
    v_place: int
    """Where values begin in `mixed`."""
    scale: float
    """Factor of queries."""
    heads: dict[str, Any]
    """Sizes of heads, and kinds of rules, as the kernels name them."""


class RecurrentKernels(Kernels):
    """The operations of recurrent layers."""

    convolve = staticmethod(convolve)

    def delta_rule(
        self,
        mixed: Tensor,
        z: Tensor,
        gates: Tensor,
        *,
        rule: DeltaRule,
        bank: StateBank,
        batch: AttentionBatch,
    ) -> Tensor:
        """See `Kernels.delta_rule`."""
        size = rule.num_key_heads * rule.key_dim
        heads = {
            "KEY_HEADS": rule.num_key_heads,
            "HEADS": len(rule.decay),
            "KEY_DIM": rule.key_dim,
            "Q_PLACE": 0,
            "K_PLACE": size,
            "CORRECTS": True,
            "BY_CHANNEL": rule.decays_channels,
            "BETA_SCALE": rule.beta_scale,
        }
        inputs = mixed, gates, rule.decay, rule.rate_bias
        layer = _Layer(*inputs, rule.value_dim, 2 * size, rule.key_dim**-0.5, heads)
        return _gated(
            layer, z, rule.norm, rule.eps, bank, batch, is_by_sigmoid=rule.gates_by_sigmoid
        )

    def mamba(
        self,
        mixed: Tensor,
        z: Tensor,
        rates: Tensor,
        *,
        rule: MambaRule,
        bank: StateBank,
        batch: AttentionBatch,
    ) -> Tensor:
        """See `Kernels.mamba`."""
        size = len(rule.decay) * rule.head_dim
        heads = {
            "KEY_HEADS": rule.num_groups,
            "HEADS": len(rule.decay),
            "KEY_DIM": rule.state_size,
            "Q_PLACE": size + rule.num_groups * rule.state_size,
            "K_PLACE": size,
            "CORRECTS": False,
            "BY_CHANNEL": False,
            "BETA_SCALE": 1.0,
        }
        layer = _Layer(mixed, rates, rule.decay, rule.rate_bias, rule.head_dim, 0, 1.0, heads)
        return _gated(layer, z, rule.skip, 0.0, bank, batch, is_by_sigmoid=False)


def _gated(
    layer: _Layer,
    z: Tensor,
    weight: Tensor,
    eps: float,
    bank: StateBank,
    batch: AttentionBatch,
    *,
    is_by_sigmoid: bool,
) -> Tensor:
    """Update states, and return the gated results; `weight` is that of a norm, or a skip's."""
    mixed, num_heads, size = layer.mixed, len(layer.decay), layer.value_dim
    out = torch.empty(len(mixed), num_heads * size, dtype=mixed.dtype, device=mixed.device)
    if not len(mixed):
        return out
    said = torch.empty(out.shape, dtype=torch.float32, device=mixed.device)
    _update_states(layer, said, bank, batch)
    owners = walk_of(batch).owners
    _gate_kernel[len(mixed), num_heads](
        *(said, z, weight, mixed, out, owners, len(batch.rows), eps, z.stride(0), mixed.stride(0)),
        HEADS=num_heads,
        SIZE=size,
        CORRECTS=layer.heads["CORRECTS"],
        BY_SIGMOID=is_by_sigmoid,
        BLOCK=next_power_of_2(size),
        enable_fp_fusion=True,
    )
    return out


def _update_states(layer: _Layer, said: Tensor, bank: StateBank, batch: AttentionBatch) -> None:
    """Write the states behind all new tokens, and what they say to queries."""
    mixed, gates, heads = layer.mixed, layer.gates, layer.heads
    num_heads, walk, num_rows = len(layer.decay), walk_of(batch), len(batch.rows)
    pieces, strides, sizes = state_of(bank, batch, torch.float32)
    inputs, own = layer[:4], (mixed.stride(0), gates.stride(0))
    options = {
        "BLOCK_K": max(16, next_power_of_2(heads["KEY_DIM"])),
        "PRECISION": "ieee" if mixed.dtype == torch.float32 else "tf32",
        # Decays of all keys take registers: more warps, and one chunk at a time. So do states of
        # more than 128: with 4 warps the scan of chunks spills on sm_89 and 90.
        "num_stages": 1 if heads["BY_CHANNEL"] else 2,
        "num_warps": 8 if heads["BY_CHANNEL"] or heads["KEY_DIM"] > 128 else 4,
    }
    num_chunks, held = len(walk.chunk_owners), held_of(batch)
    pairs = said.new_empty(2, len(mixed) if num_chunks else 0, num_heads, CHUNK)
    if num_chunks:
        _pairs_kernel[num_chunks, num_heads](
            *(*inputs, *pairs, batch.cu_seqlens_q, walk.chunk_owners, walk.chunk_starts),
            *(num_rows, *own, layer.scale),
            **heads,
            CHUNK=CHUNK,
            **options,
            enable_fp_fusion=True,
        )
    for chunk in walk.chunks:
        _scan_kernel[num_rows, num_heads, cdiv(layer.value_dim, COLUMNS)](
            *(*inputs, *pairs, said, pieces, batch.state_slots, held),
            *(batch.rows, batch.cu_seqlens_q, batch.context_lens),
            *(*own, *strides, layer.scale),
            **sizes,
            **heads,
            V_PLACE=layer.v_place,
            VALUE_DIM=layer.value_dim,
            HOLDS=held is not None,
            CHUNK=chunk,
            BLOCK=COLUMNS,
            **options,
            enable_fp_fusion=True,
        )
