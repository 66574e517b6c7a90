"""Decode attention: what share of the copy bandwidth it reads KV at.

A row's KV is read once for all query heads of a group, so bytes are counted once. Small cases are
rotated over a pool several times the last cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bench.gpu.attention import (
    BLOCK_SIZE,
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
from bench.gpu.ceilings import copy_bandwidth
from bench.gpu.context import Bench
from lightserve.kernels.interface import Kernels
from lightserve.worker.kv_pool import KVPool

HEADS, REHEARSED_HEADS = Heads(32, 8, 128), Heads(4, 2, 16)
BATCHES, REHEARSED_BATCHES = (1, 16, 64, 256), (1, 3)
CONTEXTS, REHEARSED_CONTEXTS = (1024, 8192, 32_768), (40,)
LARGE_BYTES = 10**9
"""Reads from here on are judged."""
MIN_SHARE_PCT = 80.0
CACHES = 4
"""The rotated buffers together are at least so many times the last cache."""


def run(bench: Bench) -> None:
    """Time every batch and context that fits, with slots in the allocator's order and others."""
    heads = REHEARSED_HEADS if bench.rehearse else HEADS
    batches = REHEARSED_BATCHES if bench.rehearse else BATCHES
    contexts = REHEARSED_CONTEXTS if bench.rehearse else CONTEXTS
    shapes = [(batch, context) for context in contexts for batch in batches]
    kernels = tuned_kernels(bench.machine, heads, max(contexts))
    bandwidth = copy_bandwidth(bench.machine)
    bench.rows.figure("copy, read + written", bandwidth / 1e9, "GB/s")
    free_bytes = 0.8 * bench.machine.free_bytes()
    fitting = [shape for shape in shapes if shape[0] * shape[1] * heads.kv_bytes <= free_bytes]
    for batch, context in [shape for shape in shapes if shape not in fitting]:
        bench.rows.skip(f"batch {batch}, context {context}", "does not fit")
    least = CACHES * bench.machine.cache_bytes // heads.kv_bytes
    num_slots = max(least, *(batch * context for batch, context in fitting))
    num_slots = -(-num_slots // BLOCK_SIZE) * BLOCK_SIZE
    pool = make_pool(bench.machine, heads, num_slots)
    setup = Setup(bench, heads, pool, bandwidth, max(contexts), kernels)
    for batch, context in fitting:
        for order in Order:
            _measure(setup, batch, context, order)


@dataclass(frozen=True)
class Setup:
    """What all cases share."""

    bench: Bench
    heads: Heads
    pool: KVPool
    bandwidth: float
    """Bytes per second of the copy."""
    max_model_len: int
    """Longest context: the table is as wide as a server's."""
    kernels: Kernels


def _measure(setup: Setup, batch: int, context: int, order: Order) -> None:
    machine, rows, heads, pool = setup.bench.machine, setup.bench.rows, setup.heads, setup.pool
    kv_bytes = batch * context * heads.kv_bytes
    num_sets = max(2, -(-CACHES * machine.cache_bytes // kv_bytes))
    num_sets = min(num_sets, pool.num_slots // (batch * context))
    table = slot_table(order, num_sets * batch, context)
    wide = torch.zeros(len(table), setup.max_model_len + 1, dtype=torch.int32)
    wide[:, :context] = table
    wide = wide.to(machine.device)
    batches = [
        make_batch(wide, range(n * batch, (n + 1) * batch), q_len=1, context=context)
        for n in range(num_sets)
    ]
    queries = machine.random(num_sets, batch, heads.num_heads, heads.head_dim)
    name = f"batch {batch}, context {context}, {order}"
    error = worst_error(setup.kernels, queries[0], pool, batches[0], last_queries=1)
    if not error <= MAX_ERROR:
        rows.claim(name, False, f"relative error {error:.2g}")
        return

    def work(number: int) -> Tensor:
        one = number % num_sets
        return attend(setup.kernels, queries[one], pool, batches[one])

    seconds = machine.median_s(work)
    is_judged = kv_bytes >= LARGE_BYTES and order is Order.BLOCKS
    rows.figure(
        name,
        100 * kv_bytes / seconds / setup.bandwidth,
        "% of copy",
        at_least=MIN_SHARE_PCT if is_judged else None,
        note=f"{1e6 * seconds:.1f} us",
    )
