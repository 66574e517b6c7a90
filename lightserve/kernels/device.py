"""`--attention-backend torch` on a GPU: no kernel of our own, gathers and torch's attention.

For comparison, and where the Triton kernels are at fault. Every row's keys and values are gathered
in every layer, so that it is far from their speed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from lightserve.kernels.cpu.default import TorchKernels, decode_attention, rotate
from lightserve.kernels.cpu.plan import (
    AttentionPlan,
    DecodeGroup,
    KVSource,
    PrefillRow,
    causal_mask,
    groups_of_similar_length,
)
from lightserve.kernels.cpu.score_mod import modified_attention
from lightserve.kernels.interface import AttentionBatch, ScoreMod


class DeviceTorchKernels(TorchKernels):
    """See `Kernels`: like the CPU's, but for packed weights and plans made on the host."""

    def pack_weight(self, weight: Tensor, *, is_gated: bool = False) -> Tensor:
        """See `Kernels.pack_weight`: as it is."""
        return weight

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        """See `Kernels.linear`."""
        return F.linear(x, weight, bias).to(dtype or x.dtype)

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """See `Kernels.rotary`."""
        cos, sin = cos[:, None], sin[:, None]
        return rotate(q, cos, sin), rotate(k, cos, sin)

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
        """See `Kernels.attention`."""
        plan = device_plan(batch, sliding_window)
        if score_mod is not None:
            return modified_attention(q, k_pool, v_pool, plan, scale, mod=score_mod)
        out = q.new_empty(*q.shape[:2], v_pool.shape[2])
        for group in plan.decodes:
            assert group.tokens is not None
            out[group.tokens] = decode_attention(q[group.tokens], k_pool, v_pool, group, scale)
        for row in plan.prefills:
            out[row.tokens] = _prefill(q[row.tokens], k_pool, v_pool, row, scale)
        return out


def _prefill(q: Tensor, k_pool: Tensor, v_pool: Tensor, row: PrefillRow, scale: float) -> Tensor:
    """Attend the new tokens of one row; q [N, Hq, D] -> [N, Hq, D].

    With a mask each query head gets a KV head of its own: of torch's kernels on CUDA that take a
    mask, the one that does not write all scores to memory takes no groups.
    """
    k, v = row.source.read(k_pool), row.source.read(v_pool)
    if row.mask is not None:
        group = q.shape[1] // k.shape[0]
        k, v = (x.repeat_interleave(group, dim=0) for x in (k, v))
    heads = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k[None],
        v[None],
        attn_mask=row.mask,
        is_causal=row.mask is None,
        scale=scale,
        enable_gqa=row.mask is None,
    )
    return heads[0].transpose(0, 1)


# ----------------------------------------------------------------------
# `lightserve.kernels.cpu.plan` for tables that lie on a device: nothing of them is read back.
#
# Groups and lengths come from the host's numbers of the batch, slots are looked up on the device.


GROUP_TOKENS = 65536
"""Most gathered tokens of a group of decodes: some hundred MB of keys and values."""

IntArray = npt.NDArray[np.int64]


def device_plan(batch: AttentionBatch, sliding_window: int | None) -> AttentionPlan:
    """Return the pass's plan for layers with this window; built in the first such layer."""
    key = (device_plan, sliding_window)
    plan: AttentionPlan | None = batch.prepared.get(key)
    if plan is None:
        plan = batch.prepared[key] = _build(batch, sliding_window)
    return plan


def _build(batch: AttentionBatch, sliding_window: int | None) -> AttentionPlan:
    q_lens = np.array(batch.host_q_lens)
    context_lens = np.array(batch.host_context_lens)
    token_starts = np.cumsum(q_lens) - q_lens
    firsts = np.zeros_like(context_lens)
    if sliding_window is not None:
        firsts = np.maximum(0, context_lens - q_lens + 1 - sliding_window)
    groups = groups_of_similar_length(
        np.flatnonzero(q_lens == 1), context_lens - firsts, max_tokens=GROUP_TOKENS
    )
    decodes = [_decode_group(batch, some, firsts, token_starts) for some in groups]
    prefills = [
        _prefill_row(batch, int(i), int(firsts[i]), int(token_starts[i]), sliding_window)
        for i in np.flatnonzero(q_lens > 1)
    ]
    return AttentionPlan(decodes, prefills)


def _decode_group(
    batch: AttentionBatch, some: npt.NDArray[np.intp], firsts: IntArray, token_starts: IntArray
) -> DecodeGroup:
    device = batch.req_to_slot.device
    lengths = np.array(batch.host_context_lens)[some] - firsts[some]
    longest = int(lengths.max())
    index = _to_device(np.stack([some, firsts[some], lengths, token_starts[some]]), device)
    members, starts, ends, tokens = index.unbind()
    columns = torch.arange(longest, device=device)
    is_seen = columns < ends[:, None]
    positions = starts[:, None] + columns * is_seen
    slots = batch.req_to_slot[batch.rows[members][:, None], positions]
    mask = is_seen[None, :, None] if int(lengths.min()) < longest else None
    return DecodeGroup(tokens, KVSource(longest, -1, slots.view(-1)), mask, len(some))


def _prefill_row(
    batch: AttentionBatch, index: int, first: int, token_start: int, sliding_window: int | None
) -> PrefillRow:
    q_len, end = batch.host_q_lens[index], batch.host_context_lens[index]
    slots = batch.req_to_slot[batch.host_rows[index], first:end]
    mask = causal_mask(q_len, len(slots), sliding_window, slots.device)
    tokens = slice(token_start, token_start + q_len)
    return PrefillRow(tokens, KVSource(len(slots), -1, slots), mask)


def _to_device(values: IntArray, device: torch.device) -> Tensor:
    host = torch.from_numpy(values)
    if device.type != "cuda":
        return host.to(device)
    # From pageable memory the copy would wait for all work before it.
    pinned = torch.empty_like(host, pin_memory=True)
    return pinned.copy_(host).to(device, non_blocking=True)
