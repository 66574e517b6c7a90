"""Prefill attention over the pool, beside torch's attention on contiguous data."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from gpu_parts.attention import (
    MAX_ERROR,
    Heads,
    Order,
    attend,
    make_batch,
    make_pool,
    slot_table,
    worst_error,
)
from gpu_parts.context import Bench
from gpu_parts.machine import Machine
from lightserve.kernels.triton.kernels import TritonKernels
from lightserve.worker.kv_pool import KVPool

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


def run(bench: Bench) -> None:
    """Time every chunk: ours with slots in the allocator's order, torch's in order."""
    heads = REHEARSED_HEADS if bench.rehearse else HEADS
    for chunk in REHEARSED_CHUNKS if bench.rehearse else CHUNKS:
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
            _measure(bench, heads, chunk, order, flash)


def _measure(bench: Bench, heads: Heads, chunk: Chunk, order: Order, flash: float | None) -> None:
    pool = make_pool(bench.machine, heads, NUM_SETS * chunk.context)
    name = f"{chunk}, {order}"
    seconds = our_s(bench.machine, pool, heads, chunk, order)
    if seconds is None:
        bench.rows.claim(name, False, f"relative error above {MAX_ERROR:g}")
        return
    rate = chunk.operations(heads) / seconds
    bench.rows.figure(name, rate / 1e12, "TFLOP/s", note=f"{1e3 * seconds:.3g} ms")
    if flash is not None:
        limit = MIN_RATIO if order is Order.BLOCKS else None
        bench.rows.figure(f"{name}, beside FLASH_ATTENTION", rate / flash, "x", at_least=limit)


def our_s(machine: Machine, pool: KVPool, heads: Heads, chunk: Chunk, order: Order) -> float | None:
    """Return the seconds of our kernel, None if it is wrong."""
    kernels = TritonKernels()
    table = slot_table(order, NUM_SETS, chunk.context).to(machine.device)
    batches = [
        make_batch(table, [row], q_len=chunk.num_tokens, context=chunk.context)
        for row in range(NUM_SETS)
    ]
    q = machine.random(NUM_SETS, chunk.num_tokens, heads.num_heads, heads.head_dim)
    last = min(CHECKED_QUERIES, chunk.num_tokens)
    if not worst_error(kernels, q[0], pool, batches[0], last_queries=last) <= MAX_ERROR:
        return None
    return machine.median_s(
        lambda number: attend(kernels, q[number % NUM_SETS], pool, batches[number % NUM_SETS])
    )


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
