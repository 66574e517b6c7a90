"""A small model, a pool full of random KV and tables of random tokens in scattered slots."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightserve.kernels.interface import AttentionBatch, Kernels
from lightserve.models.decoder import DecoderModel
from lightserve.worker.graphs import DecodeGraphs, DecodeTables, GraphRecorder
from lightserve.worker.memory import KVPool
from lightserve.worker.mixed_graphs import MixedGraphs
from support.random_model import layout_of, random_model, tiny_config
from support.tensor_kernels import TensorKernels

MAX_SEQS = 11
WIDTH = 33
NUM_SLOTS = MAX_SEQS * (WIDTH - 1)
SIZES = (1, 2, 4, 8, 11)


class Scene(NamedTuple):
    model: DecoderModel
    pool: KVPool
    tables: DecodeTables

    def eager(self, rows: Tensor, positions: Tensor) -> Tensor:
        """What the pass gives when it runs as any other does."""
        where = rows, positions
        num_rows = len(rows)
        batch = AttentionBatch(
            positions=where[1],
            slot_mapping=self.tables.req_to_slot[where].long(),
            req_to_slot=self.tables.req_to_slot,
            rows=where[0],
            cu_seqlens_q=torch.arange(num_rows + 1, dtype=torch.int32),
            context_lens=(where[1] + 1).int(),
            host_rows=tuple(rows.tolist()),
            host_q_lens=(1,) * num_rows,
            host_context_lens=tuple((positions + 1).tolist()),
            state_slots=self.tables.state_slots,
        )
        input_ids = self.tables.token_ids[where].long()
        logits = self.model.forward(input_ids, batch, self.pool, torch.arange(num_rows))
        assert logits is not None
        return logits

    def hidden(self, rows: list[int], lens: list[tuple[int, int]], too_far: int = 0) -> Tensor:
        """What a pass of such new tokens and contexts gives as any other; none: left out.

        `too_far`: by how much the host takes rows to be longer.
        """
        rows = [row for row, (new, _) in zip(rows, lens, strict=True) if new]
        lens = [row for row in lens if row[0]]
        owners = [row for row, (new, _) in zip(rows, lens, strict=True) for _ in range(new)]
        positions = torch.tensor([p for new, end in lens for p in range(end - new, end)])
        where = torch.tensor(owners), positions
        batch = AttentionBatch(
            positions=positions,
            slot_mapping=self.tables.req_to_slot[where].long(),
            req_to_slot=self.tables.req_to_slot,
            rows=torch.tensor(rows),
            cu_seqlens_q=torch.tensor([0, *np.cumsum([new for new, _ in lens])]).int(),
            context_lens=torch.tensor([end for _, end in lens]).int(),
            host_rows=rows,
            host_q_lens=[new for new, _ in lens],
            host_context_lens=[end + too_far for _, end in lens],
            is_bounded=too_far > 0,
            state_slots=self.tables.state_slots,
        )
        return self.model.hidden(self.tables.token_ids[where].long(), batch, self.pool, None)

    def graphs(self, recorder: GraphRecorder, model: Any = None, **changes: Any) -> DecodeGraphs:
        return DecodeGraphs(
            model or self.model,
            self.pool,
            self.tables,
            **{"sizes": SIZES, "recorder": recorder, "has_logits": True, **changes},
        )

    def mixed(self, recorder: GraphRecorder, sizes: tuple[int, ...]) -> MixedGraphs:
        return MixedGraphs(self.model, self.pool, self.tables, sizes=sizes, recorder=recorder)


def scene(kernels: Kernels | None = None, **changes: Any) -> Scene:
    """Return the same scene every time, but for `kernels` and `changes` of the configuration."""
    generator = torch.Generator().manual_seed(1)
    config = tiny_config(sliding_windows=(None, 7), **changes)
    layout = layout_of(config)
    num_states = layout.num_state_slots
    pool = KVPool(layout, NUM_SLOTS + MAX_SEQS * num_states, torch.device("cpu"))
    for tensor in pool.tensors:
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    token_ids = torch.randint(200, (MAX_SEQS + 1, WIDTH), generator=generator, dtype=torch.int32)
    slots = torch.full((MAX_SEQS + 1, WIDTH), pool.num_slots, dtype=torch.int32)
    order = torch.randperm(NUM_SLOTS, generator=generator).int()
    slots[:MAX_SEQS, : WIDTH - 1] = order.view(MAX_SEQS, WIDTH - 1)
    model = random_model(kernels or TensorKernels(), config, context_len=WIDTH - 1)
    states = torch.arange(NUM_SLOTS, pool.num_slots + num_states, dtype=torch.int32)
    states = states.view(MAX_SEQS + 1, -1).clamp(max=pool.num_slots)
    return Scene(model, pool, DecodeTables(token_ids, slots, states if num_states else None))


def places(rng: np.random.Generator, num_rows: int) -> tuple[Tensor, Tensor]:
    rows = rng.permutation(MAX_SEQS)[:num_rows].astype(np.int64)
    positions = rng.integers(0, WIDTH - 1, num_rows, dtype=np.int64)
    return torch.from_numpy(rows), torch.from_numpy(positions)
