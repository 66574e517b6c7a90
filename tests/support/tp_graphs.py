"""Graphs of a model split over processes: `python -m support.tp_graphs RANK SIZE STORE`.

Every rank records the same passes in the same order, with its collectives in them. Rank 0 compares
their logits with those of the whole model, which it runs by itself.
"""

from __future__ import annotations

import os
import sys

import torch

from lightserve.worker.graphs import DecodeGraphs, DecodeTables
from lightserve.worker.memory import KVPool
from lightserve.worker.mixed_graphs import MixedGraphs
from lightserve.worker.tensor_parallel import join_group
from support.decode_scene import Scene
from support.graph_recorders import RerunRecorder
from support.random_model import CPU, layout_of, random_model, tiny_config
from support.tensor_kernels import TensorKernels

NUM_SEQS, WIDTH, SIZES = 5, 17, (1, 2, 4, 5)
NUM_SLOTS = NUM_SEQS * (WIDTH - 1)
CONFIG = tiny_config(vocab_size=201, num_layers=2)


@torch.inference_mode()
def main() -> None:
    rank, size, store_path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    tp = join_group(rank=rank, size=size, store=store_path, timeout_s=600.0)
    generator = torch.Generator().manual_seed(3)
    shape = (NUM_SEQS + 1, WIDTH)
    tables = DecodeTables(
        torch.randint(CONFIG.vocab_size, shape, generator=generator, dtype=torch.int32),
        torch.full(shape, NUM_SLOTS, dtype=torch.int32),
    )
    order = torch.randperm(NUM_SLOTS, generator=generator).int()
    tables.req_to_slot[:NUM_SEQS, : WIDTH - 1] = order.view(NUM_SEQS, -1)
    whole = KVPool(layout_of(CONFIG), NUM_SLOTS, CPU)
    whole.tensors[0].copy_(torch.randn(whole.tensors[0].shape, generator=generator))
    part = KVPool(layout_of(CONFIG, tp_size=size), NUM_SLOTS, CPU)
    num_heads = part.tensors[0].shape[2]
    part.tensors[0].copy_(whole.tensors[0][:, :, rank * num_heads : (rank + 1) * num_heads])
    model = random_model(TensorKernels(), CONFIG, tp=tp)
    graphs = DecodeGraphs(
        model,
        part,
        tables,
        sizes=SIZES,
        recorder=RerunRecorder(),
        has_logits=rank == 0,
    )
    graphs.capture()
    reference = Scene(random_model(TensorKernels(), CONFIG), whole, tables)
    for num_rows in (3, 5, 1, 2, 4, 5):
        rows = torch.randperm(NUM_SEQS, generator=generator)[:num_rows]
        positions = torch.randint(WIDTH - 1, (num_rows,), generator=generator)
        logits = graphs.logits(rows, positions)
        assert (logits is None) == (rank != 0)
        if logits is not None:
            expected = reference.eager(rows, positions)
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
            assert logits.std() > 0.5  # else anything would be close
    mixed = MixedGraphs(model, part, tables, sizes=(16, 32), recorder=RerunRecorder())
    mixed.capture()
    for lens in ([(9, 12), (1, 4), (2, 16)], [(14, 14), (1, 9), (0, 3), (5, 16)]):
        q_lens, ends = zip(*lens, strict=True)
        graph = mixed.size_of(q_lens)
        assert graph is not None
        states = mixed.hidden(graph, range(len(lens)), q_lens, ends)
        if rank == 0:  # whose whole model has taken all steps before
            expected = reference.hidden([*range(len(lens))], lens)
            torch.testing.assert_close(states[: len(expected)], expected, rtol=1e-4, atol=1e-4)
    mixed.check()
    tp.close()


if __name__ == "__main__":
    main()
    # Recording a collective leaves the group alive, with its threads, which may still let go of a
    # tensor of Python's when the interpreter is gone: that aborts a process.
    os._exit(0)
