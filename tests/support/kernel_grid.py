"""Every kernel against the float32 reference, over a grid of shapes: on a CPU or on a GPU.

Slots that no row owns hold NaN, as does whatever a kernel allocates and does not write. The small
grid runs in Triton's interpreter on every change; the large one is for a GPU (`make gpu-check`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightserve.kernels.interface import AttentionBatch, Kernels, QKNorm, ScoreMod
from lightserve.kernels.reference import ReferenceKernels
from lightserve.kernels.weights import KernelShapes

CPU = torch.device("cpu")
Rows = Sequence[tuple[int, int]]
"""(new tokens, context) of each row."""

ROWS: dict[str, Rows] = {
    "nothing": [],
    "one decode": [(1, 1)],
    "decodes": [(1, 700), (1, 1), (1, 33), (1, 690), (1, 64), (1, 65), (1, 40)],
    "whole prompts": [(5, 5), (64, 64), (2, 2), (130, 130)],
    "chunks": [(16, 300), (16, 17), (33, 64), (128, 700)],
    "mixed": [(1, 50), (17, 17), (1, 51), (40, 90), (1, 700), (3, 20), (1, 2)],
    "rows without tokens": [(0, 0), (1, 129), (0, 77), (9, 80), (0, 5)],
    "only rows without tokens": [(0, 3), (0, 0)],
    "short chunks, long contexts": [(16, 420), (1, 90), (0, 40), (3, 270), (40, 41), (2, 2)],
}
LARGE_ROWS: dict[str, Rows] = {
    **ROWS,
    "long decodes": [(1, 9000), (1, 2), (1, 257), (1, 4096), (1, 511), (1, 8191)],
    "long chunks": [(700, 2500), (1, 5000), (257, 257), (2, 9000)],
    "many decodes": [(1, 1 + 37 * row % 700) for row in range(60)],
}
LAYOUTS = ("contiguous", "reversed", "scattered", "shared")
HEADS = [(4, 4, 64), (4, 2, 32), (7, 1, 64), (6, 3, 80), (4, 1, 96), (16, 2, 128), (2, 1, 256)]
"""(query heads, KV heads, head size): groups of 1, 2, 4, 7 and 8."""
LARGE_HEADS = [*HEADS, (32, 8, 128), (14, 2, 64), (32, 32, 80), (24, 1, 128), (3, 3, 16)]
WINDOWS = (None, 1, 24, 64)
MODS = ("cap", "slopes", "both")
LIMITS = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 2e-2}
"""Largest relative error by type."""


SMALL_SHAPES = KernelShapes(
    dtype=torch.bfloat16,
    hidden_size=96,
    intermediate_size=80,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    rotary_dim=16,
    sliding_windows=(None,),
    rms_norm_eps=1e-5,
    qk_norm=False,
    qkv_bias=False,
    context_len=32,
    num_experts=4,
    num_chosen_experts=2,
    expert_size=40,
)
"""Of a model of experts, for the check at the start."""


class AttentionCase(NamedTuple):
    """One batch."""

    rows: str
    layout: str
    heads: tuple[int, int, int]
    window: int | None
    dtype: torch.dtype
    mod: str | None = None
    """What is done to scores, one of `MODS`."""
    heads_first: bool = True
    """Whether the pools lie in memory as `KVPool` has them, or slots first."""


@dataclass
class GridReport:
    """What a grid found."""

    num_cases: int = 0
    worst: dict[str, float] = field(default_factory=dict)
    """Largest relative error by operation and type."""
    failures: list[str] = field(default_factory=list)

    def add(self, operation: str, case: object, error: float, dtype: torch.dtype) -> None:
        """Count one comparison."""
        self.num_cases += 1
        name = f"{operation} {str(dtype).removeprefix('torch.')}"
        self.worst[name] = max(self.worst.get(name, 0.0), error)
        if not error <= LIMITS[dtype]:
            self.failures.append(f"{operation} {case}: {error:.3g}")


class Poisoned(TorchFunctionMode):
    """What is allocated without a value holds NaN, or an integer that means nothing."""

    _ALLOCATIONS = (torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self._ALLOCATIONS:
            integer = 0x5A if result.dtype.itemsize == 1 else -(1 << 20)
            result.fill_(torch.nan if result.dtype.is_floating_point else integer)
        return result


def attention_cases(*, large: bool) -> list[AttentionCase]:
    """Return a selection in which every value meets most others.

    The large one: every set of rows with every kind of heads, each in four layouts and windows.
    bfloat16 throughout, other types for some heads, as each is another kernel to compile.
    """
    if large:
        kinds = [
            *((heads, torch.bfloat16) for heads in LARGE_HEADS),
            *((heads, torch.float32) for heads in HEADS[:5]),
            *((heads, torch.float16) for heads in LARGE_HEADS[5:9]),
        ]
        return [
            AttentionCase(
                rows, layout, heads, WINDOWS[(i + j) % 4], dtype, heads_first=(i + j) % 3 > 0
            )
            for i, (rows, (heads, dtype)) in enumerate(itertools.product(LARGE_ROWS, kinds))
            for j, layout in enumerate(LAYOUTS)
        ] + [*cut_cases(LARGE_HEADS, LAYOUTS), *modified_cases(LARGE_ROWS, LARGE_HEADS)]
    cases = []
    for i, (rows, heads) in enumerate(itertools.product(ROWS, HEADS)):
        dtype = (torch.float32, torch.bfloat16, torch.float32, torch.float16)[i % 4]
        window = WINDOWS[(i // 3) % 4]
        is_even = i % 2 == 0
        cases.append(AttentionCase(rows, LAYOUTS[i % 3], heads, window, dtype, heads_first=is_even))
        if i % 3 == 0:
            shared = AttentionCase(rows, "shared", heads, WINDOWS[i % 4], torch.float32)
            cases.append(shared)
    return [*cases, *cut_cases(HEADS[::2], LAYOUTS[2:]), *modified_cases(ROWS, HEADS)]


def modified_cases(
    batches: dict[str, Rows], kinds: Sequence[tuple[int, int, int]]
) -> list[AttentionCase]:
    """Return each batch with each of `MODS`, some with a window."""
    types = itertools.cycle(LIMITS)
    return [
        AttentionCase(rows, "scattered", kinds[i % len(kinds)], WINDOWS[i % 4], dtype, mod)
        for i, ((rows, mod), dtype) in enumerate(
            zip(itertools.product(batches, MODS), types, strict=False)
        )
    ]


def cut_cases(kinds: Sequence[tuple[int, int, int]], layouts: Sequence[str]) -> list[AttentionCase]:
    """Return chunks whose contexts are cut, with and without a window that is longer than one."""
    rows = "short chunks, long contexts"
    return [
        AttentionCase(rows, layouts[i % len(layouts)], heads, (None, 280)[i % 2], dtype)
        for i, (heads, dtype) in enumerate(zip(kinds, itertools.cycle(LIMITS), strict=False))
    ]


def run_grid(
    device: torch.device, *, large: bool, kernels: Kernels | None = None, every: int = 1
) -> GridReport:
    """Compare Triton's kernels, or others, with the reference on a device.

    `every`: one in so many cases of attention; more than one: all other operations in bfloat16
    alone, which tests of their own try in all types.
    """
    if kernels is None:
        from lightserve.kernels.triton.kernels import TritonKernels

        kernels = TritonKernels()
    report = GridReport()
    for case in attention_cases(large=large)[::every]:
        report.add("attention", case, attention_error(kernels, case, device), case.dtype)
    for dtype in LIMITS if every == 1 else (torch.bfloat16,):
        for operation, case, result, truth in dense_comparisons(kernels, dtype, device):
            assert result.dtype is dtype and result.shape == truth.shape
            report.add(operation, case, relative_error(result, truth), dtype)
    return report


def attention_error(kernels: Kernels, case: AttentionCase, device: torch.device = CPU) -> float:
    """Return the relative error of one batch."""
    batch = make_batch(LARGE_ROWS[case.rows], case.layout, device)
    inputs = make_inputs(batch, case.heads, case.dtype, heads_first=case.heads_first)
    wide = tuple(x.float() for x in inputs)
    truth = attend(ReferenceKernels(), batch, wide, case.window, case.mod)  # type: ignore[arg-type]
    with Poisoned():
        result = attend(kernels, batch, inputs, case.window, case.mod)
    return relative_error(result, truth)


def relative_error(result: Tensor, truth: Tensor) -> float:
    """Return |result - truth| / |truth|; 0 where there is nothing."""
    if not truth.numel():
        return 0.0
    return float((result.float() - truth.float()).norm() / truth.float().norm())


def make_batch(rows: Rows, layout: str, device: torch.device = CPU) -> AttentionBatch:
    """Give every row's positions slots of their own ("shared": row 0's first ones to all)."""
    generator = torch.Generator().manual_seed(len(rows))
    longest = max((context for _, context in rows), default=0)
    num_slots = max(4096, 1000 + sum(context for _, context in rows))
    table = torch.full((len(rows) + 2, max(768, longest + 1)), 0, dtype=torch.int32)
    free = torch.arange(num_slots)
    if layout in ("scattered", "shared"):
        free = torch.randperm(num_slots, generator=generator)
    used = 0
    for index, (_, context) in enumerate(rows):
        slots = free[used : used + context]
        table[index + 1, :context] = (slots.flip(0) if layout == "reversed" else slots).int()
        used += context
    if layout == "shared":
        common = min((context - new for new, context in rows), default=0)
        table[1 : len(rows) + 1, :common] = table[1, :common].clone()
    new = torch.tensor([new for new, _ in rows], dtype=torch.int64)
    contexts = torch.tensor([context for _, context in rows], dtype=torch.int32)
    empty = torch.zeros(0, dtype=torch.int64)
    positions = torch.cat([empty, *(torch.arange(c - n, c) for n, c in rows)])
    row_of_token = torch.arange(len(rows)).repeat_interleave(new) + 1
    return AttentionBatch(
        positions=positions.to(device),
        slot_mapping=table[row_of_token, positions].long().to(device),
        req_to_slot=table.to(device),
        rows=(torch.arange(len(rows)) + 1).to(device),
        cu_seqlens_q=torch.cat([torch.zeros(1), new.cumsum(0)]).int().to(device),
        context_lens=contexts.to(device),
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
    device = batch.rows.device
    generator = torch.Generator(device).manual_seed(0)
    num_slots = max(4096, 1000 + sum(batch.host_context_lens))

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    pools = [
        torch.full((num_slots, num_kv_heads, head_dim), torch.nan, device=device) for _ in range(2)
    ]
    for row, context in zip(batch.host_rows, batch.host_context_lens, strict=True):
        slots = batch.req_to_slot[row, :context].long()
        for pool in pools:
            pool[slots] = normal(context, num_kv_heads, head_dim)
    if heads_first:
        pools = [pool.transpose(0, 1).contiguous().transpose(0, 1) for pool in pools]
    # A view, as the model's queries are: keys and values stand behind them.
    q = normal(len(batch.positions), num_heads + 2, head_dim)[:, :num_heads]
    return q.to(dtype), pools[0].to(dtype), pools[1].to(dtype)


def attend(
    kernels: Kernels,
    batch: AttentionBatch,
    inputs: tuple[Tensor, Tensor, Tensor],
    window: int | None,
    mod: str | None = None,
) -> Tensor:
    """Run attention with the usual scale, and one of `MODS`."""
    q, k_pool, v_pool = inputs
    slopes = 2.0 ** -torch.linspace(0.5, 8.0, q.shape[1], device=q.device)
    score_mod = {
        None: None,
        "cap": ScoreMod(soft_cap=1.5),
        "slopes": ScoreMod(slopes=slopes),
        "both": ScoreMod(1.5, slopes),
    }[mod]
    return kernels.attention(
        q,
        k_pool,
        v_pool,
        batch,
        scale=q.shape[-1] ** -0.5,
        sliding_window=window,
        score_mod=score_mod,
    )


def dense_comparisons(
    kernels: Kernels, dtype: torch.dtype, device: torch.device = CPU
) -> Iterator[tuple[str, object, Tensor, Tensor]]:
    """Yield (operation, case, result, truth) of everything but attention."""
    reference = ReferenceKernels()
    generator = torch.Generator(device).manual_seed(1)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device).to(dtype)

    for num_tokens, width in itertools.product((0, 1, 2, 3, 33), (24, 64)):
        case = (num_tokens, width)
        x, other = normal(2, num_tokens, width).unbind(0)
        weight, bias, scale = normal(40, width), normal(40), normal(width).abs() + 0.5
        loaded, wide = kernels.pack_weight(weight), x.repeat_interleave(2, dim=1)
        yield "linear", case, kernels.linear(x, loaded, bias), reference.linear(x, weight, bias)
        yield "linear", case, kernels.linear(x, loaded, None), reference.linear(x, weight, None)
        gated = kernels.gated_linear(x, kernels.pack_weight(weight, is_gated=True), bias)
        yield "gated_linear", case, gated, reference.gated_linear(x, weight, bias)
        yield (
            "linear of a view", case, kernels.linear(wide[:, ::2], loaded, bias),
            reference.linear(x, weight, bias),
        )  # fmt: skip
        yield (
            "rms_norm", case, _poisoned(lambda: kernels.rms_norm(x, scale, 1e-6)),  # noqa: B023
            reference.rms_norm(x, scale, 1e-6),
        )  # fmt: skip
        small = x * 1e-3  # its mean square is about what is added to it
        for factor in (scale, scale.float()):
            yield (
                "rms_norm",
                case,
                kernels.rms_norm(small, factor, 1e-6),
                reference.rms_norm(small, factor, 1e-6),
            )
        yield (
            "silu_and_mul", case, _poisoned(lambda: kernels.silu_and_mul(x)),  # noqa: B023
            reference.silu_and_mul(x),
        )  # fmt: skip
        for left, right, factor in ((x, other, scale), (small, other * 1e-3, scale.float())):
            both = [k.add_rms_norm(left, right.clone(), factor, 1e-6) for k in (kernels, reference)]
            for result, truth in zip(*both, strict=True):
                yield "add_rms_norm", case, result, truth
    for num_tokens in (0, 1, 2, 3, 33):
        yield from _rotations(kernels, num_tokens, normal, device)
    yield from _writes(kernels, normal, device)


def _rotations(
    kernels: Kernels, num_tokens: int, normal: Callable[..., Tensor], device: torch.device
) -> Iterator[tuple[str, object, Tensor, Tensor]]:
    qkv = normal(num_tokens, 7, 16)
    angles = torch.rand(num_tokens, 8, device=device) * 6
    for half in (8, 5):
        cos, sin = angles[:, :half].cos(), angles[:, :half].sin()
        both = []
        for some in (kernels, ReferenceKernels()):
            q, k, _ = qkv.clone().split((3, 2, 2), 1)  # may be overwritten
            both.append(some.rotary(q, k, cos, sin))
        for result, truth in zip(*both, strict=True):
            yield "rotary", (num_tokens, half), result, truth
    slots = torch.randperm(40, device=device)[:num_tokens]
    weights = normal(2, 16)
    norms = (None, QKNorm(*weights, 1e-6), QKNorm(*weights.float(), 1e-6))
    for half, qk_norm in itertools.product((8, 5), norms):
        cos, sin = angles[:, :half].cos(), angles[:, :half].sin()
        written = []
        for some in (kernels, ReferenceKernels()):
            q, k, v = qkv.clone().split((3, 2, 2), 1)
            pools = [torch.zeros(40, 2, 16, dtype=q.dtype, device=device) for _ in range(2)]
            rotated = some.rotate_and_write(
                q, k, v, cos=cos, sin=sin, k_pool=pools[0], v_pool=pools[1],
                slot_mapping=slots, qk_norm=qk_norm,
            )  # fmt: skip
            written.append((rotated, pools[0], pools[1]))
        for result, truth in zip(*written, strict=True):
            if truth.numel() and bool(truth.any()):
                yield "rotate_and_write", (num_tokens, half, qk_norm is None), result, truth


def _writes(
    kernels: Kernels, normal: Callable[..., Tensor], device: torch.device
) -> Iterator[tuple[str, object, Tensor, Tensor]]:
    slots = torch.tensor([7, 3, 19, 0, 11], device=device)
    for num_kv_heads, head_dim in ((2, 8), (3, 80), (1, 128)):
        k, v = normal(2, 5, num_kv_heads, head_dim).unbind(0)
        shape = (20, num_kv_heads, head_dim)
        pools = [torch.full(shape, -1.0, dtype=k.dtype, device=device) for _ in range(2)]
        expected = [pool.clone() for pool in pools]
        expected[0][slots], expected[1][slots] = k, v
        kernels.write_kv(k, v, *pools, slots)
        for pool, truth in zip(pools, expected, strict=True):
            yield "write_kv", (num_kv_heads, head_dim), pool, truth


def _poisoned(call: Callable[[], Tensor]) -> Tensor:
    with Poisoned():
        return call()
