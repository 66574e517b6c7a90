"""Batches over a KV pool of one layer, and the checks that every timed result passes first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.gpu.device import Machine, copy_bandwidth
from bench.gpu.table import Bench
from lightserve.kernels.interface import AttentionBatch, Kernels
from lightserve.kernels.reference import ReferenceKernels
from lightserve.kernels.select import tune_kernels
from lightserve.kernels.triton.configs import AttentionShape, ChunkClass, gpu_of
from lightserve.kernels.triton.kernels import TritonKernels
from lightserve.kernels.weights import KernelShapes
from lightserve.models.base import KVGroup, KVLayout
from lightserve.worker.memory import KVPool

BLOCK_SIZE = 16
"""Slots that the router's allocator hands out together."""
MAX_ERROR = 2e-2
"""Of bfloat16 against float32."""
CHECKED_ROWS = 3


class Order(StrEnum):
    """How the slots of a sequence lie in the pool."""

    CONTIGUOUS = "contiguous"
    BLOCKS = "blocks of 16 at random"
    """As the allocator hands them out after a while."""
    SCATTERED = "every token at random"


@dataclass(frozen=True)
class Heads:
    """Shape of a layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def kv_bytes(self) -> int:
        """Keys and values of one token, bfloat16."""
        return 2 * 2 * self.num_kv_heads * self.head_dim


def tuned_kernels(machine: Machine, heads: Heads, context_len: int) -> TritonKernels:
    """Return the kernels as a server with such layers has them: fitted to the GPU."""
    kernels = TritonKernels()
    shapes = KernelShapes(
        dtype=torch.bfloat16,
        hidden_size=heads.num_heads * heads.head_dim,
        intermediate_size=heads.num_heads * heads.head_dim,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        rotary_dim=heads.head_dim,
        sliding_windows=(None,),
        rms_norm_eps=1e-5,
        qk_norm=False,
        qkv_bias=False,
        context_len=context_len,
    )
    tune_kernels(kernels, [shapes], machine.device, mode="auto", is_shown=False)
    machine.release()
    print(f"configurations: {kernels.configs}", flush=True)
    return kernels


def make_pool(machine: Machine, heads: Heads, num_slots: int) -> KVPool:
    """Return the server's own pool of one layer, full of random numbers."""
    group = KVGroup(
        num_layers=1, num_kv_heads=heads.num_kv_heads, head_dim=heads.head_dim, dtype="bfloat16"
    )
    pool = KVPool(KVLayout((group,)), num_slots, machine.device)
    for tensor in pool.tensors:
        tensor.normal_()
    return pool


def slot_table(order: Order, num_rows: int, length: int, *, seed: int = 0) -> Tensor:
    """Return int32 [num_rows, length]: num_rows * length different slots."""
    rng = np.random.default_rng(seed)
    num_slots = num_rows * length
    slots = np.arange(num_slots, dtype=np.int32)
    if order is Order.SCATTERED:
        rng.shuffle(slots)
    elif order is Order.BLOCKS:
        num_blocks = num_slots // BLOCK_SIZE
        blocks = slots[: num_blocks * BLOCK_SIZE].reshape(-1, BLOCK_SIZE)
        blocks[:] = blocks[rng.permutation(num_blocks)]
    return torch.from_numpy(slots).view(num_rows, length)


def make_batch(table: Tensor, rows: Sequence[int], *, q_len: int, context: int) -> AttentionBatch:
    """Return a batch of equal rows of a device's `table`, whose first positions are in use."""
    device = table.device
    num_rows = len(rows)
    index = torch.tensor(rows)
    positions = torch.arange(context - q_len, context).repeat(num_rows)
    slots = table[index.to(device), context - q_len : context].reshape(-1)
    return AttentionBatch(
        positions=positions.to(device),
        slot_mapping=slots.long(),
        req_to_slot=table,
        rows=index.to(device),
        cu_seqlens_q=(torch.arange(num_rows + 1, dtype=torch.int32) * q_len).to(device),
        context_lens=torch.full((num_rows,), context, dtype=torch.int32, device=device),
        host_rows=tuple(rows),
        host_q_lens=(q_len,) * num_rows,
        host_context_lens=(context,) * num_rows,
    )


def attend(kernels: Kernels, q: Tensor, pool: KVPool, batch: AttentionBatch) -> Tensor:
    """Return causal attention over the pool's one layer."""
    scale = q.shape[-1] ** -0.5
    return kernels.attention(q, pool.k[0], pool.v[0], batch, scale=scale, sliding_window=None)


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill whatever floats `torch.empty` returns with NaN: an unwritten output shows."""

    def filled(make: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Tensor:
            tensor: Tensor = make(*args, **kwargs)
            return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

        return call

    with (
        mock.patch.object(torch, "empty", filled(torch.empty)),
        mock.patch.object(torch, "empty_like", filled(torch.empty_like)),
    ):
        yield


def worst_error(
    kernels: Kernels, q: Tensor, pool: KVPool, batch: AttentionBatch, *, last_queries: int
) -> float:
    """Return the largest relative error over some rows; infinite if anything is not finite.

    Args:
        kernels: under test.
        q: [rows * q_len, Hq, D].
        pool: of one layer.
        batch: of equal rows.
        last_queries: queries of each row's end that are compared: the reference is slow.
    """
    with poisoned():
        out = attend(kernels, q, pool, batch)
    if not bool(out.isfinite().all()):
        return float("inf")
    num_rows, q_len = len(batch.host_rows), batch.host_q_lens[0]
    step = max(1, (num_rows - 1) // (CHECKED_ROWS - 1))
    errors = []
    for number in range(0, num_rows, step):
        ends = slice((number + 1) * q_len - last_queries, (number + 1) * q_len)
        one = replace(
            batch,
            host_rows=(batch.host_rows[number],),
            host_q_lens=(last_queries,),
            host_context_lens=(batch.host_context_lens[number],),
            prepared={},
        )
        truth = attend(ReferenceKernels(), q[ends].float(), pool, one)
        errors.append(float((out[ends].float() - truth).norm() / truth.norm()))
    return max(errors)


DECODE_HEADS, REHEARSED_DECODE_HEADS = Heads(32, 8, 128), Heads(4, 2, 16)
BATCHES, REHEARSED_BATCHES = (1, 16, 64, 256), (1, 3)
CONTEXTS, REHEARSED_CONTEXTS = (1024, 8192, 32_768), (40,)
LARGE_BYTES = 10**9
"""Reads from here on are judged."""
MIN_SHARE_PCT = 80.0
JUDGED_BATCH, MIN_BATCH_SHARE_PCT = 64, 90.0
"""Rows of a server's ordinary decode, which are judged at every context."""
CACHES = 4
"""The rotated buffers together are at least so many times the last cache."""


def decode_attention(bench: Bench) -> None:
    """Time every batch and context that fits, with slots in the allocator's order and others."""
    heads = REHEARSED_DECODE_HEADS if bench.rehearse else DECODE_HEADS
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
            _measure_decodes(setup, batch, context, order)


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


def _measure_decodes(setup: Setup, batch: int, context: int, order: Order) -> None:
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
    limit = MIN_SHARE_PCT if kv_bytes >= LARGE_BYTES else None
    limit = MIN_BATCH_SHARE_PCT if batch == JUDGED_BATCH else limit
    rows.figure(
        name,
        100 * kv_bytes / seconds / setup.bandwidth,
        "% of copy",
        at_least=limit if order is Order.BLOCKS else None,
        note=f"{1e6 * seconds:.1f} us",
    )


PREFILL_HEADS, REHEARSED_PREFILL_HEADS = Heads(32, 8, 128), Heads(4, 2, 16)
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


def prefill_attention(bench: Bench) -> None:
    """Time every chunk: ours with slots in the allocator's order, torch's in order."""
    heads = REHEARSED_PREFILL_HEADS if bench.rehearse else PREFILL_HEADS
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
        for order in Order:
            ours = Ours(bench.machine, kernels, heads, chunk, order)
            _measure_prefill(bench, ours, rates)
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


def _measure_prefill(bench: Bench, ours: Ours, rates: Mapping[SDPBackend, float]) -> None:
    """Report one order of slots beside torch's operations per second; FLASH alone is a bar."""
    name = f"{ours.chunk}, {ours.order}"
    seconds = ours.seconds()
    if seconds is None:
        bench.rows.claim(name, False, f"relative error above {MAX_ERROR:g}")
        return
    rate = ours.chunk.operations(ours.heads) / seconds
    bench.rows.figure(name, rate / 1e12, "TFLOP/s", note=f"{1e3 * seconds:.3g} ms")
    for backend, peer in rates.items():
        is_judged = backend is SDPBackend.FLASH_ATTENTION and ours.order is Order.BLOCKS
        limit = MIN_RATIO if is_judged else None
        bench.rows.figure(f"{name}, beside {backend.name}", rate / peer, "x", at_least=limit)


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
    # Brings the compiler with it, seconds that tests of the rest need not wait for.
    from torch.nn.attention.bias import causal_lower_right  # noqa: PLC0415

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
