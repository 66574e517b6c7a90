"""Prefill attention over the pool, beside torch's attention on contiguous data."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from bench.gpu.attention import (
    MAX_ERROR,
    Heads,
    Order,
    attend,
    make_batch,
    make_pool,
    slot_table,
    tuned_kernels,
    worst_error,
)
from bench.gpu.context import Bench
from bench.gpu.machine import Machine
from lightserve.kernels.interface import Kernels
from lightserve.kernels.triton.configs import AttentionShape, ChunkClass, gpu_of
from lightserve.kernels.triton.kernels import TritonKernels

HEADS, REHEARSED_HEADS = Heads(32, 8, 128), Heads(4, 2, 16)
MIN_RATIO = 0.8
CHECKED_QUERIES = 16
NUM_SETS = 2


@dataclass(frozen=True)
class Chunk:
    """New tokens at the end of a context."""

    num_tokens: int
    context: int

    def __str__(self) -> str:
        cached = self.context - self.num_tokens
        return f"{self.num_tokens} tokens" + (f" over {cached} cached" if cached else "")

    def operations(self, heads: Heads) -> int:
        """Operations of both products, a multiply-add as two, over visible pairs alone."""
        cached = self.context - self.num_tokens
        pairs = self.num_tokens * cached + self.num_tokens * (self.num_tokens + 1) // 2
        return 4 * heads.num_heads * heads.head_dim * pairs


CHUNKS = (Chunk(4096, 4096), Chunk(16_384, 16_384), Chunk(2048, 16_384))
REHEARSED_CHUNKS = (Chunk(24, 24), Chunk(8, 24))
SHORT_CHUNKS = tuple(
    Chunk(new, cached + new) for cached in (16_384, 65_536) for new in (64, 256, 512)
)
"""The questions of chats and documents; the last ones fill the GPU without cuts."""
REHEARSED_SHORT_CHUNKS = (Chunk(8, 300),)
NEVER_CUT = 1 << 30


def run(bench: Bench) -> None:
    """Time every chunk: ours with slots in the allocator's order, torch's in order."""
    heads = REHEARSED_HEADS if bench.rehearse else HEADS
    chunks = REHEARSED_CHUNKS if bench.rehearse else CHUNKS
    short_chunks = REHEARSED_SHORT_CHUNKS if bench.rehearse else SHORT_CHUNKS
    longest = max(chunk.context for chunk in (*chunks, *short_chunks))
    kernels = tuned_kernels(bench.machine, heads, longest)
    for chunk in chunks:
        operations = chunk.operations(heads)
        rates = {}
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            name = f"torch {backend.name}, {chunk}"
            try:
                rates[backend] = operations / torch_s(bench.machine, heads, chunk, backend)
            except RuntimeError as error:
                bench.rows.skip(name, str(error).partition("\n")[0][:120].replace("|", "/"))
                continue
            bench.rows.figure(name, rates[backend] / 1e12, "TFLOP/s")
        flash = rates.get(SDPBackend.FLASH_ATTENTION)
        for order in Order:
            ours = Ours(bench.machine, kernels, heads, chunk, order)
            _measure(bench, ours, flash)
    for chunk in short_chunks:
        _measure_cut(bench, kernels, heads, chunk)


@dataclass(frozen=True)
class Ours:
    """A measurement of our kernel."""

    machine: Machine
    kernels: Kernels
    heads: Heads
    chunk: Chunk
    order: Order

    def seconds(self) -> float | None:
        """Return the median of a call, None if it is wrong."""
        context, q_len = self.chunk.context, self.chunk.num_tokens
        pool = make_pool(self.machine, self.heads, NUM_SETS * context)
        table = slot_table(self.order, NUM_SETS, context).to(self.machine.device)
        batches = [
            make_batch(table, [row], q_len=q_len, context=context) for row in range(NUM_SETS)
        ]
        q = self.machine.random(NUM_SETS, q_len, self.heads.num_heads, self.heads.head_dim)
        last = min(CHECKED_QUERIES, q_len)
        if not worst_error(self.kernels, q[0], pool, batches[0], last_queries=last) <= MAX_ERROR:
            return None

        def work(number: int) -> Tensor:
            one = number % NUM_SETS
            return attend(self.kernels, q[one], pool, batches[one])

        return self.machine.median_s(work)


def _measure(bench: Bench, ours: Ours, flash: float | None) -> None:
    """Report one order of slots beside `flash`, torch's operations per second."""
    name = f"{ours.chunk}, {ours.order}"
    seconds = ours.seconds()
    if seconds is None:
        bench.rows.claim(name, False, f"relative error above {MAX_ERROR:g}")
        return
    rate = ours.chunk.operations(ours.heads) / seconds
    bench.rows.figure(name, rate / 1e12, "TFLOP/s", note=f"{1e3 * seconds:.3g} ms")
    if flash is not None:
        limit = MIN_RATIO if ours.order is Order.BLOCKS else None
        bench.rows.figure(f"{name}, beside FLASH_ATTENTION", rate / flash, "x", at_least=limit)


def _measure_cut(bench: Bench, kernels: TritonKernels, heads: Heads, chunk: Chunk) -> None:
    """Report a short chunk over a long context, and beside it with the context in one piece."""
    shape = AttentionShape(
        heads.num_heads, heads.num_kv_heads, heads.head_dim, torch.bfloat16, has_window=False
    )
    config = kernels.configs.prefill(shape, gpu_of(bench.machine.device), ChunkClass.SHORT)
    whole = TritonKernels(
        kernels.configs.plus(shape, ChunkClass.SHORT, replace(config, split_len=NEVER_CUT))
    )
    seconds = [
        Ours(bench.machine, some, heads, chunk, Order.BLOCKS).seconds() for some in (kernels, whole)
    ]
    if seconds[0] is None or seconds[1] is None:
        bench.rows.claim(f"{chunk}", False, f"relative error above {MAX_ERROR:g}")
        return
    rate = chunk.operations(heads) / seconds[0]
    note = f"{1e3 * seconds[0]:.3g} ms, {rate / 1e12:.3g} TFLOP/s"
    bench.rows.figure(f"{chunk}, cut, beside in one piece", seconds[1] / seconds[0], "x", note=note)


def torch_s(machine: Machine, heads: Heads, chunk: Chunk, backend: SDPBackend) -> float:
    """Return the seconds of torch's attention with one backend.

    Keys and values of a group are shared (`enable_gqa`) where the backend knows that, else
    repeated beforehand, outside the time.

    Raises:
        RuntimeError: the backend cannot do this here.
    """
    q = machine.random(NUM_SETS, heads.num_heads, chunk.num_tokens, heads.head_dim)
    shape = (NUM_SETS, heads.num_kv_heads, chunk.context, heads.head_dim)
    k, v = machine.random(*shape), machine.random(*shape)
    group = heads.num_heads // heads.num_kv_heads
    wide = [x.repeat_interleave(group, dim=1) for x in (k, v)]
    is_square = chunk.num_tokens == chunk.context
    mask = None if is_square else causal_lower_right(chunk.num_tokens, chunk.context)
    seconds = []
    failures = []
    for keys, values in ((k, v), wide):

        def work(number: int, keys: Tensor = keys, values: Tensor = values) -> Tensor:
            one = slice(number % NUM_SETS, number % NUM_SETS + 1)
            shares = keys.shape[1] < q.shape[1]
            return F.scaled_dot_product_attention(
                q[one], keys[one], values[one], mask, is_causal=is_square, enable_gqa=shares
            )

        try:
            with sdpa_kernel(backend):
                seconds.append(machine.median_s(work))
        except (RuntimeError, ValueError) as error:
            failures.append(error)
    if not seconds:
        raise RuntimeError(str(failures[-1]))
    return min(seconds)
