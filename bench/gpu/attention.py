"""Batches over a KV pool of one layer, and the checks that every timed result passes first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from bench.gpu.machine import Machine
from lightserve.kernels.interface import AttentionBatch, Kernels
from lightserve.kernels.reference import ReferenceKernels
from lightserve.kernels.shapes import KernelShapes
from lightserve.kernels.triton.kernels import TritonKernels
from lightserve.kernels.tune import tune_kernels
from lightserve.models.kv_layout import KVGroup, KVLayout
from lightserve.worker.kv_pool import KVPool

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
    tune_kernels(kernels, shapes, machine.device, mode="auto", is_shown=False)
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
