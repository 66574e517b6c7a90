"""The slots that attention reads in one pass, worked out once and used by every layer.

Rows with one new token (decodes) are taken together in groups of similar length: each group is
one gather and one call, padded to its longest row. Rows with more new tokens
(prefill chunks) go one by one. How rows are grouped depends on their lengths alone and never on
their slots, so that moving KV to other slots changes no bit of the result.

    decode group, B rows:   slots [B, length]   s s s s s s
                                                s s s s f f     f: the row's first slot again,
                                                s s s f f f        hidden by the mask
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightserve.kernels.interface import AttentionBatch

PADDING_SHARE = 0.25
"""A decode joins a group while its own padding stays below this share of the group's length."""
PADDING_TOKENS = 16
"""…or below this many tokens."""
GROUP_TOKENS = 4096
"""Most gathered tokens of a group with several rows: keys and values should stay in the cache."""

SlotArray = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class KVSource:
    """The slots with the keys and values of one piece of work."""

    length: int
    """Tokens per row."""
    start: int
    """First slot if all are consecutive, otherwise -1."""
    slots: Tensor
    """int32 [rows * length]."""
    places: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """int64 [Hkv * rows * length], indices into a pool seen as [Hkv * S, D]; by (Hkv, S)."""

    def read(self, pool: Tensor) -> Tensor:
        """Return [Hkv, rows * length, D] of a pool [S, Hkv, D]: a view where possible."""
        heads_first = pool.transpose(0, 1)
        if self.start >= 0:
            return heads_first.narrow(1, self.start, self.slots.shape[0])
        if not heads_first.is_contiguous():
            return heads_first.index_select(1, self.slots)
        # torch uses several threads along the first dimension only.
        num_heads, num_slots, head_dim = heads_first.shape
        flat = heads_first.view(-1, head_dim).index_select(0, self._places(num_heads, num_slots))
        return flat.view(num_heads, -1, head_dim)

    def _places(self, num_heads: int, num_slots: int) -> Tensor:
        key = (num_heads, num_slots)
        if key not in self.places:
            first = torch.arange(num_heads, device=self.slots.device)[:, None] * num_slots
            self.places[key] = (first + self.slots).view(-1)
        return self.places[key]


@dataclass(frozen=True, eq=False)
class DecodeGroup:
    """Rows of one new token each."""

    tokens: Tensor | None
    """int64 [B], the rows' places among the T tokens; None: all of them, in order."""
    source: KVSource
    mask: Tensor | None
    """bool [1, B, 1, length], True: seen; None: no row is padded."""
    num_rows: int


@dataclass(frozen=True, eq=False)
class PrefillRow:
    """A row of several new tokens."""

    tokens: slice
    """Its places among the T tokens."""
    source: KVSource
    mask: Tensor | None
    """bool [q_len, length], True: seen; None: plain causal, q_len = length."""


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """All of a pass."""

    decodes: list[DecodeGroup]
    prefills: list[PrefillRow]


def attention_plan(batch: AttentionBatch, sliding_window: int | None) -> AttentionPlan:
    """Return the pass's plan for layers with this window; built in the first such layer."""
    key = (AttentionPlan, sliding_window)
    plan: AttentionPlan | None = batch.prepared.get(key)
    if plan is None:
        plan = batch.prepared[key] = _build(batch, sliding_window)
    return plan


def _build(batch: AttentionBatch, sliding_window: int | None) -> AttentionPlan:
    table: SlotArray = batch.req_to_slot.numpy()
    rows = np.array(batch.host_rows)
    q_lens = np.array(batch.host_q_lens)
    context_lens = np.array(batch.host_context_lens)
    token_starts = np.cumsum(q_lens) - q_lens
    firsts = np.zeros_like(context_lens)
    if sliding_window is not None:
        firsts = np.maximum(0, context_lens - q_lens + 1 - sliding_window)
    decodes = [
        _decode_group(table, rows[some], firsts[some], context_lens[some], token_starts[some])
        for some in groups_of_similar_length(
            np.flatnonzero(q_lens == 1), context_lens - firsts, max_tokens=GROUP_TOKENS
        )
    ]
    if len(decodes) == 1 and len(rows) == decodes[0].num_rows:
        tokens = decodes[0].tokens
        assert tokens is not None
        if bool((tokens == torch.arange(len(rows))).all()):
            only = decodes[0]
            decodes = [DecodeGroup(None, only.source, only.mask, only.num_rows)]
    prefills = [
        _prefill_row(
            table[rows[i], firsts[i] : context_lens[i]],
            int(token_starts[i]),
            int(q_lens[i]),
            sliding_window,
        )
        for i in np.flatnonzero(q_lens > 1)
    ]
    return AttentionPlan(decodes, prefills)


def groups_of_similar_length(
    candidates: npt.NDArray[np.intp], lengths: npt.NDArray[np.int64], *, max_tokens: int
) -> Iterator[npt.NDArray[np.intp]]:
    """Split decode rows into groups of similar length, each in the batch's order.

    A group of several rows gathers at most `max_tokens` tokens.
    """
    if candidates.size == 0:
        return
    longest_first = candidates[np.argsort(-lengths[candidates], kind="stable")]
    begin = 0
    for end in range(1, len(longest_first) + 1):
        if end < len(longest_first) and _fits(
            int(lengths[longest_first[begin]]),
            int(lengths[longest_first[end]]),
            max_rows=max_tokens // int(lengths[longest_first[begin]]),
            num_rows=end - begin + 1,
        ):
            continue
        yield np.sort(longest_first[begin:end])
        begin = end


def _fits(group_len: int, length: int, *, max_rows: int, num_rows: int) -> bool:
    padding = group_len - length
    return num_rows <= max_rows and (
        padding <= PADDING_TOKENS or padding <= PADDING_SHARE * group_len
    )


def _decode_group(
    table: SlotArray,
    rows: npt.NDArray[np.int64],
    firsts: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    tokens: npt.NDArray[np.int64],
) -> DecodeGroup:
    lengths = ends - firsts
    longest = int(lengths.max())
    columns = np.arange(longest)
    is_padding = columns >= lengths[:, None]
    positions = firsts[:, None] + np.where(is_padding, 0, columns)
    slots = table[rows[:, None], positions]
    mask = torch.from_numpy(~is_padding)[None, :, None] if is_padding.any() else None
    return DecodeGroup(torch.from_numpy(tokens), _source(slots), mask, len(rows))


def _prefill_row(
    slots: SlotArray, token_start: int, q_len: int, sliding_window: int | None
) -> PrefillRow:
    mask = _causal_mask(q_len, len(slots), sliding_window)
    return PrefillRow(slice(token_start, token_start + q_len), _source(slots[None]), mask)


def _causal_mask(q_len: int, length: int, sliding_window: int | None) -> Tensor | None:
    """Return the mask of the last `q_len` of `length` positions, see `PrefillRow.mask`."""
    if length == q_len and (sliding_window is None or sliding_window >= length):
        return None
    k_positions = torch.arange(length)
    q_positions = k_positions[length - q_len :, None]
    mask = k_positions <= q_positions
    if sliding_window is not None:
        mask &= k_positions > q_positions - sliding_window
    return mask


def _source(slots: SlotArray) -> KVSource:
    """Return the source of slots [rows, length]."""
    flat = np.ascontiguousarray(slots).reshape(-1)
    is_run = len(slots) == 1 and bool((np.diff(flat) == 1).all())
    return KVSource(slots.shape[1], int(flat[0]) if is_run else -1, torch.from_numpy(flat))
