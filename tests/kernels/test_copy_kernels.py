"""Triton's copies of KV slots against plain torch: not a bit differs, nothing else is touched."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.immediate_copies import TorchCopies
from torch import Tensor

from lightserve.kernels.interface import CopyKernels
from lightserve.kernels.triton import copies
from lightserve.kernels.triton.copies import TritonCopies

SHAPES = [(2, 3, 128), (3, 1, 64), (1, 2, 80), (1, 1, 3), (4, 1, 12)]
"""Layers, KV heads and head_dim; with 3, heads are no whole words of 4 bytes."""
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
NUM_SLOTS, NUM_ROWS = 19, 23


def random_bits(*shape: int, dtype: torch.dtype) -> Tensor:
    """Any bits at all, NaN of every kind among them."""
    kind = KINDS[dtype]
    limits = torch.iinfo(kind)
    return torch.randint(limits.min, limits.max, shape, dtype=kind).view(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(KINDS[a.dtype]), b.view(KINDS[b.dtype]))


def round_trip(
    kernels: CopyKernels, pool: Tensor, slots: Tensor, rows: Tensor, row_ids: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return staging, rows and pool after slots went through staging to rows and back, moved."""
    pool, rows = pool.clone(), rows.clone()
    staging, back = torch.zeros_like(rows[: len(slots)]), torch.zeros_like(rows[: len(slots)])
    kernels.gather(pool, slots, staging)
    kernels.put_rows(staging, rows, row_ids)
    kernels.take_rows(rows, row_ids, back)
    kernels.scatter(back, pool, slots.flip(0))
    return staging, rows, pool


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    shape=st.sampled_from(SHAPES),
    dtype=st.sampled_from(DTYPES),
    count=st.sampled_from([0, 1, 2, 7, 16]),
)
def test_random_slots(
    seed: int, shape: tuple[int, int, int], dtype: torch.dtype, count: int
) -> None:
    torch.manual_seed(seed)
    num_layers, num_heads, head_dim = shape
    pool = random_bits(2, num_layers, num_heads, NUM_SLOTS, head_dim, dtype=dtype)
    rows = random_bits(NUM_ROWS, 2 * num_layers * num_heads, head_dim, dtype=dtype)
    slots = torch.randperm(NUM_SLOTS)[:count].int()
    row_ids = torch.randperm(NUM_ROWS)[:count].int()
    found = round_trip(TritonCopies(), pool, slots, rows, row_ids)
    expected = round_trip(TorchCopies(), pool, slots, rows, row_ids)
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))
    staging, written, moved = found
    for index, (slot, row) in enumerate(zip(slots.tolist(), row_ids.tolist(), strict=True)):
        token = pool[:, :, :, slot].flatten(0, 2)
        assert same(token, staging[index]) and same(token, written[row])
        target = int(slots[count - 1 - index])
        assert same(token, moved[:, :, :, target].flatten(0, 2))
    others = [slot for slot in range(NUM_SLOTS) if slot not in slots]
    assert same(pool[:, :, :, others], moved[:, :, :, others])


def test_few_programs_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As over the bus: each program has several tiles, the last of which are not whole."""
    torch.manual_seed(1)
    pool = random_bits(2, 3, 5, NUM_SLOTS, 16, dtype=torch.bfloat16)
    rows = random_bits(NUM_ROWS, 30, 16, dtype=torch.bfloat16)
    slots, row_ids = torch.randperm(NUM_SLOTS).int(), torch.randperm(NUM_ROWS)[:NUM_SLOTS].int()
    expected = round_trip(TorchCopies(), pool, slots, rows, row_ids)
    monkeypatch.setattr(copies, "MAX_PROGRAMS", 3)
    monkeypatch.setattr(copies, "TILE_BYTES", 256)
    found = round_trip(TritonCopies(), pool, slots, rows, row_ids)
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))


def test_a_wrong_copy_is_seen() -> None:
    """Teeth: one slot taken for another."""
    torch.manual_seed(2)
    pool = random_bits(2, 1, 1, NUM_SLOTS, 8, dtype=torch.float16)
    rows = random_bits(NUM_ROWS, 2, 8, dtype=torch.float16)
    slots, row_ids = torch.arange(5).int(), torch.arange(5).int()
    right = round_trip(TritonCopies(), pool, slots, rows, row_ids)
    wrong = round_trip(TritonCopies(), pool, slots.roll(1), rows, row_ids)
    assert not any(same(a, b) for a, b in zip(right, wrong, strict=True))
