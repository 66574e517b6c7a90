"""Kernels beside the reference, data for both, and how far apart their results are.

Batches are small, and full of borders: rows stand anywhere in the table, their slots are scattered,
and slots of no row hold NaN. The values at the borders of a query's view are large, so that one
position too many or too few is no rounding error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightserve.kernels.interface import AttentionBatch, Kernels, UnknownValues
from lightserve.kernels.reference import ReferenceKernels
from lightserve.kernels.weights import KernelShapes

SEED = 7
LIMITS = {torch.float32: 1e-3, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Largest relative error by type."""
ELEMENT_SHARE = 10.0
"""One element may be off by this many times the limit, in units of its vector's root mean square:
values a few times that size are rounded more than once."""
LINEAR_ROWS = (1, 7, 33)
"""One, few, and so many that kernels go another way."""
PRODUCT_ROWS = (1, 2, 4, 7, 33)
"""Rows of plain products: every few rows may have a kernel of their own."""
CHECKED_GROUP = 32
"""Inputs of a group of 4-bit weights."""
MAX_WEIGHT_NUMBERS = 1 << 22
"""Most numbers of a large weight that are tried: all inputs, fewer outputs."""


class Comparison(NamedTuple):
    """The result of an operation, and the right one."""

    operation: str
    shape: str
    result: Tensor
    truth: Tensor

    def error(self) -> float:
        """Return the largest relative error of a vector along the last dimension."""
        return relative_error(self.result, self.truth)


def relative_error(result: Tensor, truth: Tensor) -> float:
    """Return the largest error of any vector along the last dimension, NaN if there is any.

    Of its length, or of one element as `ELEMENT_SHARE` says, whichever is larger.
    """
    if result.shape != truth.shape:
        return float("inf")
    difference, truth = result.float() - truth.float(), truth.float()
    size = truth.square().mean(dim=-1).sqrt().clamp_min(torch.finfo(torch.float32).tiny)
    lengths = difference.square().mean(dim=-1).sqrt() / size
    elements = difference.abs().amax(dim=-1) / size / ELEMENT_SHARE
    return float(torch.maximum(lengths, elements).max())


class Poison(TorchFunctionMode):
    """Fills with NaN whatever is allocated without a value: results have to be written."""

    _ALLOCATIONS = (torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self._ALLOCATIONS and result.dtype.is_floating_point:
            result.fill_(torch.nan)
        return result


class Pair:
    """The kernels beside the reference, and data for both."""

    def __init__(self, kernels: Kernels, shapes: KernelShapes, device: torch.device) -> None:
        self.kernels = kernels
        self.shapes = shapes
        self.device = device
        self.generator = torch.Generator(device).manual_seed(SEED)

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Return normally distributed numbers of the model's type."""
        numbers = torch.randn(shape, generator=self.generator, device=self.device)
        return (numbers * scale).to(self.shapes.dtype)

    def norm_weight(self, weight: Tensor) -> Tensor:
        """Return a norm's weight in the type that it has in the model."""
        return weight.float() if self.shapes.has_wide_norms else weight

    def compare(
        self,
        operation: str,
        shape: str,
        run: Callable[[Kernels, tuple[Tensor, ...]], tuple[Tensor, ...]],
        inputs: tuple[Tensor, ...],
    ) -> Iterator[Comparison]:
        """Run both on copies of the inputs, the reference in float32."""
        wide = tuple(
            x.to(torch.float32, copy=True) if x.is_floating_point() else x.clone() for x in inputs
        )
        with Poison():
            results = run(self.kernels, tuple(x.clone() for x in inputs))
        for result, truth in zip(results, run(ReferenceKernels(), wide), strict=True):
            yield Comparison(operation, shape, result, truth)


Row = tuple[int, int]
"""New tokens and context of a row."""
CHUNKS: tuple[Row, ...] = ((5, 5), (64, 64), (17, 81), (65, 193), (2, 1030))
DECODES = (1, 2, 15, 63, 64, 65, 128, 129, 257, 1025)
MAX_WINDOW = 4096
MAX_WINDOW_ON_CPU = 512
"""A longer window is tried at this length."""
NUM_PADDING = 2
EDGE_FACTOR = 16.0


@dataclass(frozen=True, eq=False)
class CheckBatch:
    """A batch, and keys and values for it."""

    name: str
    batch: AttentionBatch
    window: int | None
    num_padding: int
    """Last rows that stand for no request; all have the pool's last slot."""
    k_pool: Tensor
    """[Hkv, S, D]: in memory a head's tokens are together, as in `KVPool`."""
    v_pool: Tensor

    def recorded(self) -> AttentionBatch:
        """Return the batch as kernels see it while a graph is captured."""
        num_rows = len(self.batch.host_rows)
        return replace(
            self.batch,
            host_rows=UnknownValues("host_rows", num_rows),
            host_context_lens=UnknownValues("host_context_lens", num_rows),
            prepared={},
        )


def check_batches(
    shapes: KernelShapes, device: torch.device, generator: torch.Generator
) -> list[CheckBatch]:
    """Return, for each window, a batch of chunks and decodes and one as a graph has them."""
    longest = MAX_WINDOW_ON_CPU if device.type == "cpu" else MAX_WINDOW
    batches = []
    for window in shapes.sliding_windows:
        tried = None if window is None else min(window, longest)
        chunks, decodes = _rows(tried, shapes.context_len)
        # Chunks and decodes take turns.
        mixed = [row for pair in zip(chunks, decodes, strict=False) for row in pair]
        mixed += decodes[len(chunks) :] + chunks[len(decodes) :]
        for name, rows, num_padding in (
            ("chunks and decodes", mixed, 0),
            ("decodes of a graph", decodes, NUM_PADDING),
        ):
            num_slots = _num_slots(rows)
            batch = _make_batch(rows, num_padding, device, generator)
            pools = _make_pools(batch, num_slots + 1, tried, shapes, generator)
            batches.append(CheckBatch(name, batch, tried, num_padding, *pools))
    return batches


def _rows(window: int | None, context_len: int) -> tuple[list[Row], list[Row]]:
    chunks, decodes = list(CHUNKS), [(1, context) for context in DECODES]
    if window is not None:
        chunks.append((8, window + 9))
        decodes += [(1, window + offset) for offset in (0, 1, 64) if window + offset > 0]
    return tuple(  # type: ignore[return-value]
        list(
            dict.fromkeys(
                (min(new, context_len), min(context, context_len)) for new, context in rows
            )
        )
        for rows in (chunks, decodes)
    )


def _num_slots(rows: list[Row]) -> int:
    """Return M: a fifth of the slots is no row's."""
    return 5 * sum(context for _, context in rows) // 4 + 1


def _make_batch(
    rows: list[Row], num_padding: int, device: torch.device, generator: torch.Generator
) -> AttentionBatch:
    """Lay out rows, then padding rows: the table's last row, whose one position is slot M.

    table row    0 … 2R-1, half of them used, in any order    2R: padding
    slot         0 … M-1, most of them used, in any order        M: padding
    """
    num_rows, width = len(rows), max(context for _, context in rows)
    num_slots = _num_slots(rows)
    free = torch.randperm(num_slots, generator=generator, device=device)
    table = torch.full((2 * num_rows + 1, width), num_slots, dtype=torch.int32, device=device)
    places = Random(num_rows).sample(range(2 * num_rows), num_rows)
    used = 0
    for place, (_, context) in zip(places, rows, strict=True):
        table[place, :context] = free[used : used + context].int()
        used += context
    rows = rows + [(1, 1)] * num_padding
    places += [2 * num_rows] * num_padding
    new = [row[0] for row in rows]
    index = torch.tensor(places, device=device)
    positions = torch.cat([torch.arange(end - n, end, device=device) for n, end in rows])
    of_token = torch.cat([index[i].expand(n) for i, n in enumerate(new)])
    offsets = torch.tensor([0, *new], device=device).cumsum(0)
    return AttentionBatch(
        positions=positions,
        slot_mapping=table[of_token, positions].long(),
        req_to_slot=table,
        rows=index,
        cu_seqlens_q=offsets.int(),
        context_lens=torch.tensor([end for _, end in rows], dtype=torch.int32, device=device),
        host_rows=tuple(places),
        host_q_lens=tuple(new),
        host_context_lens=tuple(end for _, end in rows),
    )


def _make_pools(
    batch: AttentionBatch,
    num_slots: int,
    window: int | None,
    shapes: KernelShapes,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    device = batch.rows.device
    pools = [
        torch.full(
            (shapes.num_kv_heads, num_slots, shapes.head_dim),
            torch.nan,
            dtype=shapes.dtype,
            device=device,
        )
        for _ in range(2)
    ]
    for row, end in zip(batch.host_rows, batch.host_context_lens, strict=True):
        slots = batch.req_to_slot[row, :end].long()
        shape = (2, shapes.num_kv_heads, end, shapes.head_dim)
        keys, values = torch.randn(shape, generator=generator, device=device)
        first = 0 if window is None else max(0, end - window)
        values[:, max(0, first - 1) : first + 1] *= EDGE_FACTOR
        for pool, numbers in zip(pools, (keys, values), strict=True):
            pool[:, slots] = numbers.to(shapes.dtype)
    return pools[0], pools[1]
