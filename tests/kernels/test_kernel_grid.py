"""One grid for every implementation, against plain torch in float32."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import kernel_grid
from support.grids import choose, every_value, long_but
from support.kernel_grid import (
    CPU,
    HEADS,
    LAYOUTS,
    ROWS,
    attend,
    attention_cases,
    make_batch,
    make_inputs,
    relative_error,
    run_grid,
)
from torch import Tensor

from lightserve.errors import StartupError
from lightserve.kernels.cpu import default
from lightserve.kernels.cpu.default import TorchKernels
from lightserve.kernels.cpu.invariant import InvariantKernels
from lightserve.kernels.cpu.native import InvariantNativeKernels, NativeKernels
from lightserve.kernels.interface import Kernels, QKNorm, ScoreMod
from lightserve.kernels.reference import ReferenceKernels
from lightserve.kernels.select import missing_core
from lightserve.kernels.triton.kernels import TritonKernels

IMPLEMENTATIONS = [
    ReferenceKernels,
    TorchKernels,
    *([] if missing_core() else [NativeKernels]),
    InvariantKernels,
    *([] if missing_core() else [InvariantNativeKernels]),
    TritonKernels,
]
INVARIANT: list[type[Kernels]] = [
    InvariantKernels,
    *([] if missing_core() else [InvariantNativeKernels]),
]
INVARIANT_HEADS = [(4, 4, 16), (4, 2, 32), (6, 1, 64), (2, 2, 128), (3, 3, 80)]
MIN_CASES = 250
"""Comparisons of the small grid: attention over all rows, heads, windows, slots; and the rest."""


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("implementation", "every"),
    [
        *((kernels, 1) for kernels in IMPLEMENTATIONS[1:-1]),
        (TritonKernels, 5),  # interpreted: slow
        pytest.param(TritonKernels, 1, marks=pytest.mark.long),
    ],
)
def test_grid(
    implementation: type[Kernels],
    every: int,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    if implementation in INVARIANT:  # batch-invariant kernels are float32 only
        for dtype in (torch.bfloat16, torch.float16):
            monkeypatch.delitem(kernel_grid.LIMITS, dtype)
        cases = [case for case in attention_cases(large=False) if case.dtype is torch.float32]
        monkeypatch.setattr(kernel_grid, "attention_cases", lambda *, large: cases)
    report = run_grid(CPU, large=False, kernels=implementation(), every=every)
    assert not report.failures
    least = 150 if implementation in INVARIANT or every > 1 else MIN_CASES
    assert report.num_cases >= least
    assert all(error <= 1e-5 for name, error in report.worst.items() if "float32" in name)
    record_property("num_cases", report.num_cases)


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


@pytest.mark.parametrize(
    ("implementation", "rows"),
    long_but(
        itertools.product(IMPLEMENTATIONS, ROWS),
        [
            *itertools.product(IMPLEMENTATIONS[:-1], ROWS),
            *itertools.product(
                [TritonKernels], ["decodes", "whole prompts", "rows without tokens"]
            ),
        ],
    ),
)
def test_permuted_slots_change_no_bit(implementation: type[Kernels], rows: str) -> None:
    """Attention over any slots is bit-equal to contiguous ones."""
    few = HEADS[1 : choose(2, 3)]
    some_heads = few if implementation is TritonKernels else HEADS  # interpreted: slow
    for heads, dtype in zip(some_heads, [torch.float32, torch.bfloat16] * 4, strict=False):
        for window in (None, 64):
            results = []
            for layout in LAYOUTS[:3]:
                batch = make_batch(ROWS[rows], layout)
                inputs = make_inputs(batch, heads, dtype)
                results.append(attend(implementation(), batch, inputs, window))
            assert all(torch.equal(result, results[0]) for result in results), (heads, dtype)


@pytest.mark.parametrize("num_before", [0, 300], ids=["whole", "chunk"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_prompts_of_any_length_are_of_few_shapes(
    dtype: torch.dtype, num_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch keeps code for each number of queries and keys in half precision, for ever."""
    shapes = set()
    attention = torch.nn.functional.scaled_dot_product_attention

    def observed(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        shapes.add((q.shape[2], k.shape[2]))
        return attention(q, k, v, **options)

    for num_queries in range(64, 256, 11):
        batch = make_batch([(num_queries, num_before + num_queries)], "contiguous")
        inputs = make_inputs(batch, (4, 2, 32), dtype)
        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.functional, "scaled_dot_product_attention", observed)
            result = attend(TorchKernels(), batch, inputs, None)
        truth = attend(ReferenceKernels(), batch, tuple(part.float() for part in inputs), None)
        assert relative_error(result, truth) <= kernel_grid.LIMITS[dtype], num_queries
    assert len(shapes) <= 10, shapes


@pytest.mark.parametrize(
    "implementation", [ReferenceKernels, TorchKernels, *([] if missing_core() else [NativeKernels])]
)
def test_a_norm_of_wide_weights_rounds_once(implementation: type[Kernels]) -> None:
    torch.manual_seed(4)
    kernels, weight, num_rows = implementation(), 1.0 + torch.randn(48) / 8, 40
    x, other = torch.randn(2, num_rows, 48).bfloat16()

    def truth(rows: Tensor) -> Tensor:
        wide = rows.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight).bfloat16()

    def share(found: Tensor, rows: Tensor) -> float:
        assert found.dtype is torch.bfloat16
        return float((found != truth(rows)).float().mean())

    assert share(kernels.rms_norm(x, weight, 1e-5), x) < 0.01
    assert share(kernels.rms_norm(x, weight.bfloat16(), 1e-5), x) > 0.1, "the test can tell"
    found, sums = kernels.add_rms_norm(x, other.clone(), weight, 1e-5)
    assert share(found, sums) < 0.01
    q, k, v = x[:, None], other[:, None], torch.zeros(num_rows, 1, 48).bfloat16()
    pools = torch.zeros(2, num_rows, 1, 48).bfloat16()
    turned = kernels.rotate_and_write(
        q.clone(), k.clone(), v, cos=torch.ones(num_rows, 24), sin=torch.zeros(num_rows, 24),
        k_pool=pools[0], v_pool=pools[1], slot_mapping=torch.arange(num_rows),
        qk_norm=QKNorm(weight, weight, 1e-5),
    )  # fmt: skip
    assert share(turned[:, 0], x) < 0.01 and share(pools[0, :, 0], other) < 0.01


class TestInvariance:
    """A row's bits do not depend on what stands beside it."""

    @pytest.mark.parametrize("implementation", INVARIANT)
    @pytest.mark.parametrize("num_threads", [1, 2])
    @pytest.mark.parametrize(("width", "size"), [(96, 144), (100, 201), (768, 256), (3072, 768)])
    def test_row_by_row_operations(
        self, width: int, size: int, num_threads: int, implementation: type[Kernels]
    ) -> None:
        kernels = implementation()
        torch.manual_seed(2)
        x, bias, scale = torch.randn(77, width), torch.randn(2 * size), torch.rand(width)
        weight = kernels.pack_weight(torch.randn(2 * size, width), is_gated=True)

        def run(rows: Tensor) -> Tensor:
            normed, _ = kernels.add_rms_norm(rows, rows.clone(), scale, 1e-5)
            return kernels.gated_linear(normed, weight, bias)

        with threads(num_threads):
            whole = run(x)
            for count in (1, 2, 7, 16, 17, 33, 76):
                order = torch.randperm(77)[:count]
                assert torch.equal(run(x[order]), whole[order]), count

    @pytest.mark.parametrize(
        ("heads", "window", "num_threads"), every_value(INVARIANT_HEADS, [None, 40], [1, 2])
    )
    def test_attention_over_chunks_and_neighbours(
        self, heads: tuple[int, int, int], window: int | None, num_threads: int
    ) -> None:
        """A prompt of 150 alone and whole, in chunks, and beside others."""
        with threads(num_threads):
            chunks = (1, 7, 16, 50, 149) if num_threads == 1 else (7, 50)
            for implementation in INVARIANT:
                self._compare_chunks(implementation(), heads, window, chunks)

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

    @pytest.mark.skipif(bool(missing_core()), reason=missing_core())
    def test_long_contexts_are_not_cut(self) -> None:
        """A decode over 1,400 positions is what it is as the last token of a chunk."""
        batch = make_batch([(100, 1400)], "contiguous")
        inputs = make_inputs(batch, (4, 2, 32), torch.float32)

        def differs(kernels: Kernels) -> bool:
            whole = attend(kernels, batch, inputs, None)
            last = replace(make_batch([(1, 1400)], "contiguous"), req_to_slot=batch.req_to_slot)
            last = replace(last, rows=batch.rows, host_rows=batch.host_rows)
            return not torch.equal(
                attend(kernels, last, (inputs[0][-1:], *inputs[1:]), None), whole[-1:]
            )

        assert not differs(InvariantNativeKernels())
        assert differs(NativeKernels()), "the test can tell"

    @pytest.mark.skipif(bool(missing_core()), reason=missing_core())
    def test_the_native_kernels_are_never_mixed_with_others(self) -> None:
        x = torch.randn(4, 6).T  # its rows are not contiguous
        with pytest.raises(AssertionError, match="--batch-invariant"):
            InvariantNativeKernels().rms_norm(x, torch.ones(4), 1e-5)

    def test_the_default_kernels_do_differ(self) -> None:
        """Otherwise this class would test nothing."""
        torch.manual_seed(2)
        with pytest.raises(AssertionError), threads(1):
            self._compare_chunks(TorchKernels(), INVARIANT_HEADS[1], None, (7,))

    def test_a_machine_that_cannot_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """`pack_weight` notices a product that depends on the row's place."""

        def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return (x @ weight.T) * (1 + 1e-7 * torch.arange(len(x))[:, None])

        monkeypatch.setattr(default, "pack", lambda weight: weight)
        monkeypatch.setattr(default, "linear", linear)
        with pytest.raises(StartupError, match="batch-invariant is not possible"):
            InvariantKernels().pack_weight(torch.randn(40, 24))


def test_rows_are_padded_to_few_numbers() -> None:
    # Code is kept for each.
    numbers = {default.padded_rows(num_rows) for num_rows in range(1, 513)}
    assert len(numbers) == 24
    assert all(default.padded_rows(number) == number for number in numbers)
    assert all(0 <= default.padded_rows(n) - n < max(4, n / 4) for n in range(1, 5000))


SINK_HEADS = [(4, 2, 32), (6, 1, 64), (16, 1, 16), (3, 3, 80)]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:])
def test_sinks_are_one_score_more(implementation: type[Kernels]) -> None:
    """Beside the reference, in every way that contexts are cut; other sinks give other heads."""
    dtypes = [torch.float32] if implementation in INVARIANT else [torch.float32, torch.bfloat16]
    rows = [(1, 1400), *ROWS["mixed"], (20, 900)]  # the first part of all is one of several
    quick = implementation is TritonKernels  # interpreted: slow
    for heads, window in list(itertools.product(SINK_HEADS, (None, 24)))[:: 3 if quick else 1]:
        for dtype in dtypes:
            batch = make_batch(rows, "scattered")
            q, k_pool, v_pool = make_inputs(batch, heads, dtype)
            sinks = torch.linspace(-3.0, 6.0, heads[0])
            scale = heads[2] ** -0.5
            truth = ReferenceKernels().attention(
                *(part.float() for part in (q, k_pool, v_pool)),
                batch,
                scale=scale,
                sliding_window=window,
                score_mod=ScoreMod(sinks=sinks),
            )
            for order, is_right in ((sinks, True), (sinks.flip(0), False)):
                mod = ScoreMod(sinks=order)
                found = implementation().attention(
                    q, k_pool, v_pool, batch, scale=scale, sliding_window=window, score_mod=mod
                )
                error = relative_error(found, truth)
                assert (error <= kernel_grid.LIMITS[dtype]) is is_right, (heads, window, error)
