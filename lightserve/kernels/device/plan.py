"""`lightserve.kernels.cpu.plan` for tables that lie on a device: nothing of them is read back.

Groups and lengths come from the host's numbers of the batch, slots are looked up on the device.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightserve.kernels.cpu.plan import (
    AttentionPlan,
    DecodeGroup,
    KVSource,
    PrefillRow,
    causal_mask,
    groups_of_similar_length,
)
from lightserve.kernels.interface import AttentionBatch

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
