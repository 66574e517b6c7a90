"""Recurrent layers: where the states of rows are, and what is done with them, in torch.

A state is bytes of the KV pool: a state tensor of a layer has some slots of each row, all of whose
bytes in one attention layer's keys and values are its own.

    slots of a row     s0   s1   s2 …                 anywhere in the pool
    bytes of a state   [part][head][slot][numbers]    pieces: a head's keys, or values, of a slot
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightserve.kernels.interface import AttentionBatch, Kernels, sigmoid
from lightserve.kernels.weights import DeltaRule, MambaRule, StateBank

CHUNK = 64
"""Tokens of a prompt whose updates become a few products."""
CHANNEL_CHUNK = 16
"""Tokens at once where each channel has a decay: pairs of tokens have one for each channel then."""
NORM_EPS = 1e-6
"""Epsilon of the lengths by which queries and keys are divided."""


def read_states(
    bank: StateBank, batch: AttentionBatch, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Return the state of each row, [R, *shape]; zeros where it begins with this pass."""
    slots = _slots(bank, batch)
    parts, heads, _, piece = bank.pieces.shape
    found = bank.pieces.index_select(2, slots.flatten()).view(parts, heads, *slots.shape, piece)
    found = found.movedim(2, 0).flatten(1)
    size = math.prod(shape) * dtype.itemsize
    states: Tensor = found[:, :size].contiguous().view(dtype).view(-1, *shape)
    begins = batch.context_lens == batch.cu_seqlens_q.diff()
    return states.masked_fill(begins.view(-1, *[1] * len(shape)), 0)


def write_states(bank: StateBank, batch: AttentionBatch, states: Tensor) -> None:
    """Store the states [R, ...] of rows that have new tokens and are not held."""
    slots = _slots(bank, batch)
    parts, heads, _, piece = bank.pieces.shape
    flat = states.flatten(1).view(torch.uint8)
    room = parts * heads * bank.num_slots * piece
    flat = torch.nn.functional.pad(flat, (0, room - flat.shape[1]))
    pieces = flat.view(-1, parts, heads, bank.num_slots, piece).movedim(0, 2)
    if batch.kept is not None or not all(batch.host_q_lens):
        is_written = torch.tensor(batch.host_q_lens, device=slots.device) > 0
        if batch.kept is not None:
            is_written &= batch.kept.is_held.index_select(0, batch.rows) == 0
        present = is_written.nonzero()[:, 0]
        slots, pieces = slots[present], pieces.index_select(2, present)
    bank.pieces.index_copy_(2, slots.flatten(), pieces.flatten(2, 3))


def _slots(bank: StateBank, batch: AttentionBatch) -> Tensor:
    """Return the bank's slots of each row, int64 [R, bank.num_slots]."""
    assert batch.state_slots is not None, "a model with states was given none"
    rows = batch.state_slots.index_select(0, batch.rows)
    return rows[:, bank.first : bank.first + bank.num_slots].long()


def _alike(batch: AttentionBatch) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield rows that have as many new tokens each: rows int64 [N], their tokens int64 [N, n]."""
    by_length: dict[int, list[int]] = {}
    for row, count in enumerate(batch.host_q_lens):
        if count:
            by_length.setdefault(count, []).append(row)
    device = batch.rows.device
    for count, members in by_length.items():
        rows = torch.tensor(members, device=device)
        starts = batch.cu_seqlens_q.index_select(0, rows).long()
        yield rows, starts[:, None] + torch.arange(count, device=device)


class RecurrentOperations(Kernels):
    """The operations of recurrent layers, for kernels that have no own ones."""

    chunk_size = CHUNK
    """Tokens of a prompt that are computed at once; 1: one after the other."""

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
        """See `Kernels.convolve`."""
        width, channels = weight.shape
        out = x.new_empty(x.shape)
        states = read_states(bank, batch, (width - 1, channels), x.dtype)
        for rows, tokens in _alike(batch):
            inputs = torch.cat([states[rows], x[tokens]], dim=1)
            num_tokens = tokens.shape[1]
            total = torch.zeros((), device=x.device) if bias is None else bias.float()
            for place in range(width):
                total = total + inputs[:, place : place + num_tokens].float() * weight[place]
            out[tokens] = (total if is_plain else total * sigmoid(total)).to(x.dtype)
            states[rows] = inputs[:, num_tokens:]
        write_states(bank, batch, states)
        return out

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
        key_dim, value_dim, num_heads = rule.key_dim, rule.value_dim, len(rule.decay)
        size = rule.num_key_heads * key_dim
        q, k, v = (
            part.reshape(len(part), -1, dim).float()
            for part, dim in zip(
                mixed.split_with_sizes((size, size, num_heads * value_dim), dim=1),
                (key_dim, key_dim, value_dim),
                strict=True,
            )
        )
        group = num_heads // rule.num_key_heads
        q, k = (
            (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)).repeat_interleave(
                group, dim=1
            )
            for x in (q, k)
        )
        beta = rule.beta_scale * sigmoid(gates[:, :num_heads])
        rates = _softplus(gates[:, num_heads:], rule.rate_bias).view(len(v), num_heads, -1)
        chunk_size = min(self.chunk_size, CHANNEL_CHUNK if rule.decays_channels else CHUNK)
        inputs = (q * key_dim**-0.5, k, v, rule.decay[:, None] * rates, beta)
        out = self._scan(inputs, chunk_size, bank, batch)
        scale = torch.rsqrt(out.square().mean(-1, keepdim=True) + rule.eps)
        gate = z.float().view_as(out)
        gate = sigmoid(gate) if rule.gates_by_sigmoid else gate * sigmoid(gate)
        out = out * scale * rule.norm.float() * gate
        return out.flatten(1).to(mixed.dtype)

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
        num_heads, own = len(rule.decay), rule.num_groups * rule.state_size
        x, k, q = (
            part.reshape(len(part), -1, dim).float()
            for part, dim in zip(
                mixed.split_with_sizes((num_heads * rule.head_dim, own, own), dim=1),
                (rule.head_dim, rule.state_size, rule.state_size),
                strict=True,
            )
        )
        k, q = (part.repeat_interleave(num_heads // rule.num_groups, dim=1) for part in (k, q))
        rates = _softplus(rates, rule.rate_bias)
        out = self._scan(
            (q, k, x * rates[..., None], (rule.decay * rates)[..., None]),
            self.chunk_size,
            bank,
            batch,
        )
        gate = z.float().view_as(out)
        out = (out + rule.skip[:, None] * x) * (gate * sigmoid(gate))
        return out.flatten(1).to(mixed.dtype)

    def _scan(
        self, inputs: Sequence[Tensor], chunk_size: int, bank: StateBank, batch: AttentionBatch
    ) -> Tensor:
        """Return what states say, [T, H, Dv], and store those behind the tokens; see `_chunk`.

        `inputs` are [T, H, ...].
        """
        q, _, v, *_ = inputs
        states = read_states(bank, batch, (*q.shape[1:], v.shape[2]), torch.float32)
        out = torch.empty_like(v)
        for rows, tokens in _alike(batch):
            own, parts = states[rows], []
            for chunk in torch.split(tokens, chunk_size, dim=1):
                result, own = _chunk(own, [x[chunk].transpose(1, 2) for x in inputs])
                parts.append(result.transpose(1, 2))
            out[tokens], states[rows] = torch.cat(parts, dim=1), own
        write_states(bank, batch, states)
        return out


def _softplus(rates: Tensor, bias: Tensor) -> Tensor:
    rates = rates + bias
    return torch.where(rates > 20.0, rates, torch.log1p(torch.exp(rates)))


def _chunk(state: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return results [N, H, n, Dv] of n tokens, and the states [N, H, Dk, Dv] behind them.

    `inputs`: q and k [N, H, n, Dk], v [N, H, n, Dv], logarithms of decays [N, H, n, 1 or Dk] and
    betas [N, H, n]. With betas, what n updates add is found by one triangular system: Yang et al.
    2024, "Gated Delta Networks", section 3.3. Without, values are added as they are: Dao and Gu
    2024, section 6.
    """
    q, k, v, decay, *betas = inputs
    total = decay.cumsum(2)
    grown = total.exp()
    added = betas[0][..., None] * (v - (k * grown) @ state) if betas else v
    between = total[..., :, None, :] - total[..., None, :, :]
    is_before = torch.ones(between.shape[2:4], dtype=torch.bool, device=q.device).tril()[..., None]
    weights = torch.where(is_before, between, 0.0).exp() * is_before
    if betas and q.shape[2] > 1:
        system = (betas[0][..., None] * _weighted(k, k, weights)).tril(-1)
        added = torch.linalg.solve_triangular(system, added, upper=False, unitriangular=True)
    result = (q * grown) @ state + _weighted(q, k, weights) @ added
    last = total[..., -1:, :]
    kept = k * (last - total).exp()
    return result, state * last.exp().mT + kept.mT @ added


def _weighted(a: Tensor, b: Tensor, weights: Tensor) -> Tensor:
    """Return products of rows [N, H, n, n] with weights [N, H, n, n, 1], or of each channel."""
    if weights.shape[-1] == 1:
        return a @ b.mT * weights[..., 0]
    return (a[..., :, None, :] * b[..., None, :, :] * weights).sum(-1)
