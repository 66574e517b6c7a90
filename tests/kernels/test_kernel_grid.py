"""One grid for every implementation, against plain torch in float32."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lightserve.errors import StartupError
from lightserve.kernels.cpu import packed
from lightserve.kernels.cpu.default import TorchKernels
from lightserve.kernels.cpu.invariant import InvariantKernels
from lightserve.kernels.device.kernels import DeviceTorchKernels
from lightserve.kernels.interface import AttentionBatch, Kernels
from lightserve.kernels.reference import ReferenceKernels
from lightserve.kernels.triton.kernels import TritonKernels

MAX_LEN, NUM_SLOTS = 768, 4096
IMPLEMENTATIONS = [
    ReferenceKernels,
    TorchKernels,
    DeviceTorchKernels,
    InvariantKernels,
    TritonKernels,
]

ROWS = {
    "one decode": [(1, 1)],
    "decodes": [(1, 700), (1, 1), (1, 33), (1, 690), (1, 64), (1, 65), (1, 40)],
    "whole prompts": [(5, 5), (64, 64), (2, 2), (130, 130)],
    "chunks": [(16, 300), (16, 17), (33, 64), (128, 700)],
    "mixed": [(1, 50), (17, 17), (1, 51), (40, 90), (1, 700), (3, 20), (1, 2)],
}
"""(new tokens, context) of each row."""
LAYOUTS = ["contiguous", "reversed", "scattered", "shared"]
HEADS = [(4, 4, 16), (4, 2, 32), (6, 1, 64), (2, 2, 128), (3, 3, 80)]
WINDOWS = [None, 1, 24, 64]


def make_batch(rows: list[tuple[int, int]], layout: str) -> AttentionBatch:
    """Give every row's positions slots of their own ("shared": row 0's first ones to all)."""
    generator = torch.Generator().manual_seed(len(rows))
    table = torch.full((len(rows) + 2, MAX_LEN), 0, dtype=torch.int32)
    free = torch.arange(NUM_SLOTS)
    if layout in ("scattered", "shared"):
        free = torch.randperm(NUM_SLOTS, generator=generator)
    used = 0
    for index, (_, context) in enumerate(rows):
        slots = free[used : used + context]
        table[index + 1, :context] = (slots.flip(0) if layout == "reversed" else slots).int()
        used += context
    if layout == "shared":
        common = min(context - new for new, context in rows)
        table[1 : len(rows) + 1, :common] = table[1, :common]
    new = torch.tensor([new for new, _ in rows])
    contexts = torch.tensor([context for _, context in rows], dtype=torch.int32)
    positions = torch.cat([torch.arange(c - n, c) for n, c in rows])
    row_of_token = torch.arange(len(rows)).repeat_interleave(new) + 1
    return AttentionBatch(
        positions=positions,
        slot_mapping=table[row_of_token, positions].long(),
        req_to_slot=table,
        rows=torch.arange(len(rows)) + 1,
        cu_seqlens_q=torch.cat([torch.zeros(1), new.cumsum(0)]).int(),
        context_lens=contexts,
        host_rows=tuple(range(1, len(rows) + 1)),
        host_q_lens=tuple(new.tolist()),
        host_context_lens=tuple(contexts.tolist()),
    )


def make_inputs(
    batch: AttentionBatch,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    *,
    heads_first: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and pools; every slot that no row owns is NaN.

    The pools lie in memory as `KVPool` has them, or slots first.
    """
    num_heads, num_kv_heads, head_dim = heads
    torch.manual_seed(0)
    pools = [torch.full((NUM_SLOTS, num_kv_heads, head_dim), torch.nan) for _ in range(2)]
    for row, context in zip(batch.host_rows, batch.host_context_lens, strict=True):
        slots = batch.req_to_slot[row, :context].long()
        for pool in pools:
            pool[slots] = torch.randn(context, num_kv_heads, head_dim)
    if heads_first:
        pools = [pool.transpose(0, 1).contiguous().transpose(0, 1) for pool in pools]
    q = torch.randn(len(batch.positions), num_heads, head_dim)
    return q.to(dtype), pools[0].to(dtype), pools[1].to(dtype)


def attend(
    kernels: Kernels,
    batch: AttentionBatch,
    inputs: tuple[Tensor, Tensor, Tensor],
    window: int | None,
) -> Tensor:
    q, k_pool, v_pool = inputs
    return kernels.attention(
        q, k_pool, v_pool, batch, scale=q.shape[-1] ** -0.5, sliding_window=window
    )


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def relative_error(result: Tensor, truth: Tensor) -> float:
    return float((result.float() - truth).norm() / truth.norm())


CASES = [
    (rows, LAYOUTS[i % 4], HEADS[i % 5], WINDOWS[i % 3 if i % 7 else 3], i % 2 == 0)
    for i, rows in enumerate(name for name in ROWS for _ in range(12))
]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_attention_grid(implementation: type[Kernels], dtype: torch.dtype, limit: float) -> None:
    if implementation is InvariantKernels and dtype is torch.bfloat16:
        pytest.skip("batch-invariant kernels are float32 only")
    for rows, layout, heads, window, heads_first in CASES:
        batch = make_batch(ROWS[rows], layout)
        inputs = make_inputs(batch, heads, dtype, heads_first=heads_first)
        truth = attend(ReferenceKernels(), batch, tuple(x.float() for x in inputs), window)  # type: ignore[arg-type]
        error = relative_error(attend(implementation(), batch, inputs, window), truth)
        assert error <= limit, (rows, layout, heads, window, error)


@pytest.mark.parametrize("fault", ["window", "scale", "slot", "causal"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:])
def test_a_wrong_kernel_fails_the_grid(implementation: type[Kernels], fault: str) -> None:
    batch = make_batch(ROWS["mixed"], "scattered")
    q, k_pool, v_pool = make_inputs(batch, (4, 2, 32), torch.float32)
    truth = attend(ReferenceKernels(), batch, (q, k_pool, v_pool), 24)
    window, scale = 24, 32**-0.5
    if fault == "window":
        window = 25
    elif fault == "scale":
        scale *= 1.05
    elif fault == "slot":
        k_pool = k_pool.clone()
        k_pool[batch.req_to_slot[4, 80].long()] += 0.5
    else:
        lens = tuple(length - 1 if length > 60 else length for length in batch.host_context_lens)
        device_lens = torch.tensor(lens, dtype=torch.int32)
        batch = replace(batch, host_context_lens=lens, context_lens=device_lens, prepared={})
    wrong = implementation().attention(q, k_pool, v_pool, batch, scale=scale, sliding_window=window)
    assert relative_error(wrong, truth) > 1e-3


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("rows", ROWS)
def test_permuted_slots_change_no_bit(implementation: type[Kernels], rows: str) -> None:
    """Contract N1: attention over any slots is bit-equal to contiguous ones."""
    some_heads = HEADS[1:3] if implementation is TritonKernels else HEADS  # interpreted: slow
    for heads, dtype in zip(some_heads, [torch.float32, torch.bfloat16] * 3, strict=False):
        for window in (None, 64):
            results = []
            for layout in LAYOUTS[:3]:
                batch = make_batch(ROWS[rows], layout)
                inputs = make_inputs(batch, heads, dtype)
                results.append(attend(implementation(), batch, inputs, window))
            assert all(torch.equal(result, results[0]) for result in results), (heads, dtype)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_write_kv_touches_its_slots_only(implementation: type[Kernels]) -> None:
    k, v = torch.randn(2, 5, 2, 8).unbind(0)
    pools = [torch.full((20, 2, 8), torch.nan) for _ in range(2)]
    slots = torch.tensor([7, 3, 19, 0, 11])
    implementation().write_kv(k, v, *pools, slots)
    assert torch.equal(pools[0][slots], k) and torch.equal(pools[1][slots], v)
    assert int(pools[0].isnan().all(dim=(1, 2)).sum()) == 15


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:])
def test_dense_operations(implementation: type[Kernels], dtype: torch.dtype) -> None:
    kernels, reference = implementation(), ReferenceKernels()
    torch.manual_seed(1)
    limit = 1e-5 if dtype is torch.float32 else 2e-2
    for num_tokens, width in itertools.product((0, 1, 2, 3, 33), (24, 64)):
        x, other = torch.randn(2, num_tokens, width).to(dtype).unbind(0)
        weight, bias = torch.randn(40, width).to(dtype), torch.randn(40).to(dtype)
        loaded, wide = kernels.pack_weight(weight), x.repeat_interleave(2, dim=1)
        scale = torch.rand(width).to(dtype) + 0.5
        q, k = torch.randn(2, num_tokens, 4, 16).to(dtype).unbind(0)
        qkv = torch.randn(num_tokens, 7, 16).to(dtype)
        angles = torch.rand(num_tokens, 8) * 6
        pairs = [
            (kernels.linear(x, loaded, bias), reference.linear(x, weight, bias)),
            (kernels.linear(x, loaded, None), reference.linear(x, weight, None)),
            (kernels.linear(wide[:, ::2], loaded, bias), reference.linear(x, weight, bias)),
            (kernels.rms_norm(x, scale, 1e-6), reference.rms_norm(x, scale, 1e-6)),
            (kernels.silu_and_mul(x), reference.silu_and_mul(x)),
            *zip(
                kernels.add_rms_norm(x, other.clone(), scale, 1e-6),
                reference.add_rms_norm(x, other.clone(), scale, 1e-6),
                strict=True,
            ),
        ]
        for heads, half in itertools.product(("own", "views"), (8, 5)):
            cos, sin = angles[:, :half].cos(), angles[:, :half].sin()
            both = [
                (q.clone(), k.clone()) if heads == "own" else qkv.clone().split((3, 2, 2), 1)[:2]
                for _ in range(2)  # each may be overwritten
            ]
            rotated = (kernels.rotary(*both[0], cos, sin), reference.rotary(*both[1], cos, sin))
            pairs.extend(zip(*rotated, strict=True))
        for result, truth in pairs:
            assert result.dtype is dtype and result.shape == truth.shape
            assert num_tokens == 0 or relative_error(result, truth.float()) <= limit


class TestInvariance:
    """A row's bits do not depend on what stands beside it."""

    @pytest.mark.parametrize("num_threads", [1, 2])
    @pytest.mark.parametrize(("width", "size"), [(96, 144), (100, 201), (768, 256), (3072, 768)])
    def test_row_by_row_operations(self, width: int, size: int, num_threads: int) -> None:
        kernels = InvariantKernels()
        torch.manual_seed(2)
        x, bias, scale = torch.randn(77, width), torch.randn(2 * size), torch.rand(width)
        weight = kernels.pack_weight(torch.randn(2 * size, width))

        def run(rows: Tensor) -> Tensor:
            normed, _ = kernels.add_rms_norm(rows, rows.clone(), scale, 1e-5)
            return kernels.silu_and_mul(kernels.linear(normed, weight, bias))

        with threads(num_threads):
            whole = run(x)
            for count in (1, 2, 7, 16, 17, 33, 76):
                order = torch.randperm(77)[:count]
                assert torch.equal(run(x[order]), whole[order]), count

    @pytest.mark.parametrize("num_threads", [1, 2])
    @pytest.mark.parametrize("window", [None, 40])
    @pytest.mark.parametrize("heads", HEADS)
    def test_attention_over_chunks_and_neighbours(
        self, heads: tuple[int, int, int], window: int | None, num_threads: int
    ) -> None:
        """A prompt of 150 alone and whole, in chunks, and beside others."""
        with threads(num_threads):
            chunks = (1, 7, 16, 50, 149) if num_threads == 1 else (7, 50)
            self._compare_chunks(InvariantKernels(), heads, window, chunks)

    def _compare_chunks(
        self,
        kernels: Kernels,
        heads: tuple[int, int, int],
        window: int | None,
        chunks: tuple[int, ...],
    ) -> None:
        batch = make_batch([(150, 150)], "contiguous")
        inputs = make_inputs(batch, heads, torch.float32)
        whole = attend(kernels, batch, inputs, window)
        q, k_pool, v_pool = inputs
        for chunk in chunks:
            pieces = []
            for start in range(0, 150, chunk):
                end = min(150, start + chunk)
                part = make_batch([(end - start, end), (3, 400), (1, 90)], "contiguous")
                table = part.req_to_slot.clone()
                table[1] = batch.req_to_slot[1]
                part = replace(part, req_to_slot=table)
                beside = torch.randn(4, *q.shape[1:])
                # The neighbours read slots 150 …, which hold NaN: their results do not matter.
                both = torch.cat([q[start:end], beside])
                pieces.append(attend(kernels, part, (both, k_pool, v_pool), window)[: end - start])
            assert torch.equal(torch.cat(pieces), whole), chunk

    def test_the_default_kernels_do_differ(self) -> None:
        """Otherwise this class would test nothing."""
        torch.manual_seed(2)
        with pytest.raises(AssertionError), threads(1):
            self._compare_chunks(TorchKernels(), HEADS[1], None, (7,))

    def test_a_machine_that_cannot_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """`pack_weight` notices a product that depends on the row's place."""

        def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return (x @ weight.T) * (1 + 1e-7 * torch.arange(len(x))[:, None])

        monkeypatch.setattr(packed, "pack", lambda weight: weight)
        monkeypatch.setattr(packed, "linear", linear)
        with pytest.raises(StartupError, match="batch-invariant is not possible"):
            InvariantKernels().pack_weight(torch.randn(40, 24))
