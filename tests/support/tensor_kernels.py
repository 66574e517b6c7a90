"""Kernels as a GPU's are: of a batch they read tensors and the number of rows, and nothing else.

Plain torch on any device, for passes that are recorded on the CPU or run on fake CUDA tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightserve.kernels.interface import AttentionBatch, Can, MostTokens, ScoreMod, sigmoid
from lightserve.kernels.recurrent import _chunk, read_states, write_states
from lightserve.kernels.reference import ReferenceKernels, modified
from lightserve.kernels.weights import StateBank


class TensorKernels(ReferenceKernels):
    """Decodes, and recorded passes, over the whole width of the table, the rest of it masked."""

    name = "tensor"
    can = ReferenceKernels.can | Can.GRAPHS

    def attention(
        self,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        sliding_window: int | None,
        score_mod: ScoreMod | None = None,
    ) -> Tensor:
        last = batch.context_lens[:, None] - 1
        rows = batch.rows
        if batch.most is not None:  # every token is a decode of its row, of a shorter context
            tokens = torch.arange(len(q), device=q.device, dtype=torch.int32)
            ends = batch.cu_seqlens_q[1:]
            owners = torch.searchsorted(ends, tokens, right=True).clamp(max=len(ends) - 1)
            back = ends.index_select(0, owners) - 1 - tokens  # negative: padding
            last = (last[owners, 0] - back.clamp(min=0))[:, None]
            rows = rows.index_select(0, owners)
        elif any(q_len > 1 for q_len in batch.host_q_lens):
            return super().attention(
                q,
                k_pool,
                v_pool,
                batch,
                scale=scale,
                sliding_window=sliding_window,
                score_mod=score_mod,
            )
        group = q.shape[1] // k_pool.shape[1]
        slots = batch.req_to_slot[rows].long()  # [R, width]
        k, v = (pool[slots].float().repeat_interleave(group, dim=2) for pool in (k_pool, v_pool))
        scores = torch.einsum("rhd,rphd->rhp", q.float(), k) * scale
        positions = torch.arange(slots.shape[1], device=q.device)
        if score_mod is not None:
            scores = modified(scores.transpose(0, 1), score_mod, last - positions).transpose(0, 1)
        hidden = positions > last
        if sliding_window is not None:
            hidden |= positions <= last - sliding_window
        # What is hidden may be anything: a weight of zero would not stop a NaN.
        weights = scores.masked_fill(hidden[:, None], float("-inf")).softmax(dim=-1)
        v = v.masked_fill(hidden[:, :, None, None], 0.0)
        return torch.einsum("rhp,rphd->rhd", weights, v).to(q.dtype)

    def convolve(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        bank: StateBank,
        batch: AttentionBatch,
        *,
        is_plain: bool = False,
    ) -> Tensor:
        if batch.most is None:
            return super().convolve(x, weight, bias, bank, batch, is_plain=is_plain)
        width, channels = weight.shape
        tokens, is_token = _of_rows(batch, len(x))
        states = read_states(bank, batch, (width - 1, channels), x.dtype)
        inputs = torch.cat([states, x[tokens]], dim=1)
        total = torch.zeros(*tokens.shape, channels) if bias is None else bias.float()
        for place in range(width):
            total = total + inputs[:, place : place + len(x)].float() * weight[place]
        own = (total if is_plain else total * sigmoid(total)).to(x.dtype)
        last = batch.cu_seqlens_q.diff()[:, None] + torch.arange(width - 1)
        _write(bank, batch, inputs.gather(1, last[..., None].expand(-1, -1, channels).long()))
        return _by_token(own, tokens, is_token)

    def _scan(
        self, inputs: Sequence[Tensor], chunk_size: int, bank: StateBank, batch: AttentionBatch
    ) -> Tensor:
        if batch.most is None:
            return super()._scan(inputs, chunk_size, bank, batch)
        q, _, v, *_ = inputs
        tokens, is_token = _of_rows(batch, len(q))
        own = [x[tokens] * is_token.view(*tokens.shape, *[1] * (x.ndim - 1)) for x in inputs]
        states = read_states(bank, batch, (*q.shape[1:], v.shape[2]), torch.float32)
        # A token of zeros, whose decay is one, leaves a state as it is.
        result, states = _chunk(states, [x.transpose(1, 2) for x in own])
        _write(bank, batch, states)
        return _by_token(result.transpose(1, 2), tokens, is_token)


def _of_rows(batch: AttentionBatch, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the tokens of each row, int64 [R, num_tokens], and which of them there are."""
    starts = batch.cu_seqlens_q.long()
    tokens = starts[:-1, None] + torch.arange(num_tokens)
    return tokens.clamp(max=num_tokens - 1), tokens < starts[1:, None]


def _by_token(of_rows: Tensor, tokens: Tensor, is_token: Tensor) -> Tensor:
    """Return [T, ...] of [R, T, ...]; zeros for the tokens of no row."""
    found = of_rows.new_zeros(1 + tokens.shape[1], *of_rows.shape[2:])
    places = torch.where(is_token, tokens, tokens.shape[1])
    return found.index_copy_(0, places.flatten(), of_rows.flatten(0, 1))[:-1]


def _write(bank: StateBank, batch: AttentionBatch, states: Tensor) -> None:
    """As `write_states`; rows that are held, or have no tokens, write to the scratch slot."""
    assert batch.state_slots is not None
    is_written = batch.cu_seqlens_q.diff() > 0
    if batch.kept is not None:
        is_written = is_written & (batch.kept.is_held.index_select(0, batch.rows) == 0)
    rows = torch.where(is_written, batch.rows, len(batch.state_slots) - 1)
    batch = replace(batch, rows=rows, host_q_lens=(1,) * len(rows), kept=None)
    write_states(bank, batch, states)


class FromTensors(TensorKernels):
    """As a GPU's: where rows are is in tensors alone, whatever the host believes."""

    def attention(
        self, q: Tensor, k_pool: Tensor, v_pool: Tensor, batch: AttentionBatch, **options: Any
    ) -> Tensor:
        return super().attention(q, k_pool, v_pool, _from_tensors(batch, q), **options)

    def convolve(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        *others, batch = args
        return super().convolve(x, *others, _from_tensors(batch, x), **options)

    def _scan(
        self, inputs: Sequence[Tensor], chunk_size: int, bank: StateBank, batch: AttentionBatch
    ) -> Tensor:
        return super()._scan(inputs, chunk_size, bank, _from_tensors(batch, inputs[0]))


def _from_tensors(batch: AttentionBatch, x: Tensor) -> AttentionBatch:
    return replace(batch, most=batch.most or MostTokens(len(x), len(x)))
