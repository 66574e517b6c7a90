"""Triton's norms, gating, rotary embedding and KV writes against the reference, over a grid.

Types, widths that are no power of two and no whole number of accesses, rows of larger tensors,
none at all; and kernels that are wrong in one place, which must show.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.grids import choose, more_when_long
from support.immediate_copies import TorchCopies
from torch import Tensor

from lightserve.kernels.interface import WORD_BYTES, Kernels, QKNorm
from lightserve.kernels.reference import ReferenceKernels
from lightserve.kernels.triton import copies, norms
from lightserve.kernels.triton.copies import TritonCopies
from lightserve.kernels.triton.kernels import TritonKernels
from lightserve.worker.staged_host_pool import CopyKernels

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
EPS = 1e-6
REFERENCE, TRITON = ReferenceKernels(), TritonKernels()


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype)


def strided(rows: int, width: int, dtype: torch.dtype, *, is_part: bool) -> Tensor:
    """Rows of their own, or columns out of wider ones."""
    return (
        random(rows, width + 8, dtype=dtype)[:, 3 : 3 + width]
        if is_part
        else random(rows, width, dtype=dtype)
    )


def error(result: Tensor, truth: Tensor) -> float:
    assert result.dtype is truth.dtype and result.shape == truth.shape
    if not truth.numel():
        return 0.0
    return float((result.float() - truth.float()).norm() / truth.float().norm())


WIDTHS = [1, 24, 64, 100, 128, 896, 1030]
CASES = [
    (dtype, width, rows, part)
    for (width, rows), (dtype, part) in zip(
        itertools.product(WIDTHS, (0, 1, 5, 17)),
        itertools.cycle(itertools.product(LIMITS, (False, True))),
        strict=False,
    )
]


@pytest.mark.parametrize(("dtype", "width", "num_rows", "is_part"), CASES)
def test_norms_and_gating(dtype: torch.dtype, width: int, num_rows: int, is_part: bool) -> None:
    torch.manual_seed(width)
    x = strided(num_rows, width, dtype, is_part=is_part)
    residual = strided(num_rows, width, dtype, is_part=not is_part)
    weight, limit = (torch.rand(width) + 0.5).to(dtype), LIMITS[dtype]
    truth = REFERENCE.rms_norm(x, weight, EPS)
    assert error(TRITON.rms_norm(x, weight, EPS), truth) <= limit
    truths = REFERENCE.add_rms_norm(x, residual.clone(), weight, EPS)
    results = TRITON.add_rms_norm(x, residual, weight, EPS)
    assert all(error(r, t) <= limit for r, t in zip(results, truths, strict=True))
    if dtype is not torch.bfloat16:  # to which the interpreter rounds towards zero
        assert torch.equal(results[1], truths[1]), "one addition, rounded once"
    gate_up = strided(num_rows, 2 * width, dtype, is_part=is_part)
    assert error(TRITON.silu_and_mul(gate_up), REFERENCE.silu_and_mul(gate_up)) <= limit


@pytest.mark.parametrize("dtype", LIMITS)
def test_norms_of_heads(dtype: torch.dtype) -> None:
    """Several rows share a program; the last program has fewer, and the input more dimensions."""
    x, weight = random(7, 5, 3, 48, dtype=dtype), (torch.rand(48) + 0.5).to(dtype)
    heads = x[:, 1:4]
    truth = REFERENCE.rms_norm(heads, weight, EPS)
    assert error(TRITON.rms_norm(heads, weight, EPS), truth) <= LIMITS[dtype]


HEADS = [
    (4, 2, 16, 8),
    (14, 2, 64, 32),
    (3, 3, 80, 40),
    (5, 1, 24, 7),
    (9, 9, 128, 64),
    (2, 1, 6, 3),
]
"""Query heads, KV heads, head_dim, rotated pairs."""
NUM_SLOTS = 23


class Scene:
    """Tokens of one layer: heads as views of one product, pools of poison, random slots."""

    def __init__(
        self, heads: tuple[int, int, int, int], dtype: torch.dtype, num_tokens: int, *, norm: bool
    ) -> None:
        torch.manual_seed(sum(heads) + num_tokens)
        num_heads, num_kv_heads, head_dim, half = heads
        qkv = random(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
        self.q, self.k, self.v = qkv.split((num_heads, num_kv_heads, num_kv_heads), 1)
        angles = torch.rand(num_tokens, half) * 6
        self.cos, self.sin = angles.cos(), angles.sin()
        pools = torch.full((2, num_kv_heads, NUM_SLOTS, head_dim), torch.nan, dtype=dtype)
        self.k_pool, self.v_pool = pools.transpose(1, 2)
        self.slots = torch.randperm(NUM_SLOTS)[:num_tokens]
        self.norm = None
        if norm:
            weights = (torch.rand(2, head_dim) + 0.5).to(dtype)
            self.norm = QKNorm(weights[0], weights[1], EPS)

    def run(self, kernels: ReferenceKernels | TritonKernels) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries, and pools after the write; nothing of the scene changes."""
        qkv = torch.cat([self.q, self.k, self.v], dim=1)
        sizes = (self.q.shape[1], self.k.shape[1], self.v.shape[1])
        q, k, v = qkv.split(sizes, 1)
        pools = [
            pool.transpose(0, 1).clone().transpose(0, 1) for pool in (self.k_pool, self.v_pool)
        ]
        q = kernels.rotate_and_write(
            q,
            k,
            v,
            cos=self.cos,
            sin=self.sin,
            k_pool=pools[0],
            v_pool=pools[1],
            slot_mapping=self.slots,
            qk_norm=self.norm,
        )
        return q, pools[0], pools[1]


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_rotate_and_write(
    heads: tuple[int, int, int, int], dtype: torch.dtype, has_norm: bool
) -> None:
    for num_tokens in (0, 1, 4):
        scene = Scene(heads, dtype, num_tokens, norm=has_norm)
        q, k_pool, v_pool = scene.run(TRITON)
        true_q, true_k_pool, true_v_pool = scene.run(REFERENCE)
        assert error(q, true_q) <= LIMITS[dtype]
        slots = scene.slots
        assert error(k_pool[slots], true_k_pool[slots]) <= LIMITS[dtype]
        assert torch.equal(v_pool[slots], true_v_pool[slots]), "values are not touched"
        for pool in (k_pool, v_pool):
            assert int(pool.isnan().all(dim=2).all(dim=1).sum()) == NUM_SLOTS - num_tokens


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("dtype", LIMITS)
def test_fused_is_what_the_single_operations_give(dtype: torch.dtype, has_norm: bool) -> None:
    """Bit by bit: it rounds wherever they do."""
    for heads in (HEADS[0], HEADS[3]):
        scene = Scene(heads, dtype, 3, norm=has_norm)
        single = Scene(heads, dtype, 3, norm=has_norm)
        q = Kernels.rotate_and_write(
            TRITON,
            single.q,
            single.k,
            single.v,
            cos=single.cos,
            sin=single.sin,
            k_pool=single.k_pool,
            v_pool=single.v_pool,
            slot_mapping=single.slots,
            qk_norm=single.norm,
        )
        fused = scene.run(TRITON)
        limit = 1e-6 if dtype is torch.float32 else 0.0
        assert error(fused[0], q) <= limit
        assert error(fused[1][scene.slots], single.k_pool[scene.slots]) <= limit
        assert torch.equal(fused[2][scene.slots], single.v_pool[scene.slots])


def test_heads_may_lie_apart_by_more_than_32_bits_count() -> None:
    """In bytes: the numbers that a launch is given have fewer. Memory is taken where written."""
    scene, size = Scene((2, 2, 64, 32), torch.float32, 3, norm=False), 64 + WORD_BYTES
    room = torch.empty(2**32 + 2 * NUM_SLOTS * size, dtype=torch.int8)
    near = torch.zeros(2, 2, NUM_SLOTS, size, dtype=torch.int8).transpose(1, 2).unbind()
    far = [
        room.as_strided((NUM_SLOTS, 2, size), (size, 2**31, 1), 2**31 + part * NUM_SLOTS * size)
        for part in range(2)
    ]
    for pools in (near, far):
        TRITON.rotate_and_write(
            scene.q.clone(),
            scene.k,
            scene.v,
            cos=scene.cos,
            sin=scene.sin,
            k_pool=pools[0],
            v_pool=pools[1],
            slot_mapping=scene.slots,
            qk_norm=None,
        )
    for expected, found in zip(near, far, strict=True):
        written = expected[scene.slots]
        assert torch.equal(found[scene.slots][..., :68], written[..., :68]) and written.any()


@pytest.mark.parametrize("fault", ["sin", "norm", "slot", "head", "epsilon"])
def test_a_wrong_rotation_or_write_shows(fault: str) -> None:
    scene = Scene((4, 2, 32, 16), torch.float32, 6, norm=True)
    slots = scene.slots.clone()
    truth = scene.run(REFERENCE)
    if fault == "sin":
        scene.sin = -scene.sin
    elif fault == "norm":
        assert scene.norm is not None
        scene.norm = QKNorm(scene.norm.k_weight, scene.norm.q_weight, EPS)
    elif fault == "slot":
        scene.slots = scene.slots.roll(1)
    elif fault == "head":
        scene.k = scene.k.flip(1)
    else:
        assert scene.norm is not None
        scene.norm = scene.norm._replace(eps=0.1)
    q, k_pool, v_pool = scene.run(TRITON)
    errors = [
        error(q, truth[0]),
        error(k_pool[slots], truth[1][slots]),
        error(v_pool[slots], truth[2][slots]),
    ]
    assert max(errors) > 1e-2


@pytest.mark.parametrize("fault", ["row", "weight", "gate"])
def test_a_wrong_norm_or_gate_shows(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = random(9, 64, dtype=torch.float32), torch.rand(64) + 0.5
    if fault == "row":  # a program that has fewer rows than it believes
        launch = norms._norm_launch
        monkeypatch.setattr(
            norms, "_norm_launch", lambda width: launch(width) | {"ROWS": 4, "BLOCK": 32}
        )
        result = TRITON.rms_norm(x, weight, EPS)
        assert not error(result.nan_to_num(0.0), REFERENCE.rms_norm(x, weight, EPS)) <= 1e-3
    elif fault == "weight":
        result = TRITON.rms_norm(x, weight.roll(1), EPS)
        assert error(result, REFERENCE.rms_norm(x, weight, EPS)) > 1e-2
    else:
        swapped = torch.cat([x[:, 32:], x[:, :32]], dim=1)
        assert error(TRITON.silu_and_mul(swapped), REFERENCE.silu_and_mul(x)) > 1e-2


# Triton's copies of KV slots against plain torch: not a bit differs, nothing else is touched.

SHAPES = [(2, 3, 128), (3, 1, 64), (1, 2, 80), (1, 1, 3), (4, 1, 12)]
"""Layers, KV heads and head_dim; with 3, heads are no whole words of 4 bytes."""
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
COPY_SLOTS, NUM_ROWS = 19, 23


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


@more_when_long
@settings(max_examples=choose(15, 40), deadline=None)
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
    pool = random_bits(2, num_layers, num_heads, COPY_SLOTS, head_dim, dtype=dtype)
    rows = random_bits(NUM_ROWS, 2 * num_layers * num_heads, head_dim, dtype=dtype)
    slots = torch.randperm(COPY_SLOTS)[:count].int()
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
    others = [slot for slot in range(COPY_SLOTS) if slot not in slots]
    assert same(pool[:, :, :, others], moved[:, :, :, others])


def test_few_programs_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As over the bus: each program has several tiles, the last of which are not whole."""
    torch.manual_seed(1)
    pool = random_bits(2, 3, 5, COPY_SLOTS, 16, dtype=torch.bfloat16)
    rows = random_bits(NUM_ROWS, 30, 16, dtype=torch.bfloat16)
    slots, row_ids = torch.randperm(COPY_SLOTS).int(), torch.randperm(NUM_ROWS)[:COPY_SLOTS].int()
    expected = round_trip(TorchCopies(), pool, slots, rows, row_ids)
    monkeypatch.setattr(copies, "MAX_PROGRAMS", 3)
    monkeypatch.setattr(copies, "TILE_BYTES", 256)
    found = round_trip(TritonCopies(), pool, slots, rows, row_ids)
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))


def test_a_wrong_copy_is_seen() -> None:
    """Teeth: one slot taken for another."""
    torch.manual_seed(2)
    pool = random_bits(2, 1, 1, COPY_SLOTS, 8, dtype=torch.float16)
    rows = random_bits(NUM_ROWS, 2, 8, dtype=torch.float16)
    slots, row_ids = torch.arange(5).int(), torch.arange(5).int()
    right = round_trip(TritonCopies(), pool, slots, rows, row_ids)
    wrong = round_trip(TritonCopies(), pool, slots.roll(1), rows, row_ids)
    assert not any(same(a, b) for a, b in zip(right, wrong, strict=True))
