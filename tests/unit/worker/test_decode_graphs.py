"""Decodes as recorded passes: their logits, their padding, and what must not be recorded.

The recorder repeats torch operations on the very tensors of the recording, so that whatever a
CUDA graph would keep from its capture is kept here too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.decode_scene import MAX_SEQS, NUM_SLOTS, SIZES, places, scene
from support.graph_recorders import Tape, TapeRecorder
from support.random_model import layout_of, random_model, tiny_config
from support.tensor_kernels import TensorKernels
from torch import Tensor
from torch._subclasses import FakeTensorMode

from lightserve.errors import StartupError
from lightserve.kernels.interface import AttentionBatch, UnknownValues
from lightserve.models.base import KVTensors as PoolOfModel
from lightserve.models.decoder import DecoderModel
from lightserve.worker.graphs import (
    MAX_ROWS,
    NUM_ESTIMATED,
    DecodeGraphs,
    DecodeTables,
    MemoryUse,
    estimated_graph_bytes,
    ladder,
)
from lightserve.worker.memory import KVPool


@pytest.mark.parametrize(
    ("max_rows", "sizes"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (50, (1, 2, 4, 8, 16, 24, 32, 40, 48, 50)),
        (200, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 200)),
    ],
)
def test_the_ladder(max_rows: int, sizes: tuple[int, ...]) -> None:
    assert ladder(max_rows) == sizes


def test_the_ladder_wastes_little() -> None:
    """Rows computed for nothing, in rows of which the products of 180 cost as much as of one."""
    sizes = ladder(1000)
    assert list(sizes) == sorted(set(sizes)) and sizes[-1] == 1000
    for num_rows in range(1, 1001):
        size = next(size for size in sizes if size >= num_rows)
        assert (max(180, size) - max(180, num_rows)) / max(180, num_rows) < 0.13
    assert len(ladder(256)) == 23 and len(ladder(MAX_ROWS)) == 31


@torch.inference_mode()
def test_every_number_of_rows_gives_its_logits_and_writes_its_slots_alone() -> None:
    ours, reference = scene(), scene()
    recorder = TapeRecorder()
    graphs = ours.graphs(recorder)
    heard: list[int] = []
    graphs.capture(heard.append)
    assert heard == [1] * len(SIZES) == [1] * recorder.num_recorded
    assert not graphs.covers(0) and not graphs.covers(MAX_SEQS + 1)
    _assert_same_kv(ours.pool, reference.pool)  # recording wrote nothing but the scratch slot
    rng = np.random.default_rng(0)
    for num_rows in (*range(1, MAX_SEQS + 1), *range(MAX_SEQS, 0, -1)):
        assert graphs.covers(num_rows)
        rows, at = places(rng, num_rows)
        before = [tensor.clone() for tensor in ours.pool.tensors]
        logits = graphs.logits(rows, at)
        assert logits is not None and logits.shape == (num_rows, 200)
        torch.testing.assert_close(logits, reference.eager(rows, at), rtol=1e-4, atol=1e-4)
        written = ours.tables.req_to_slot[rows, at].long()
        kept = torch.ones(NUM_SLOTS, dtype=torch.bool)
        kept[written] = False
        for old, new, eager in zip(before, ours.pool.tensors, reference.pool.tensors, strict=True):
            assert torch.equal(
                old[:, :, :, :NUM_SLOTS][:, :, :, kept], new[:, :, :, :-1][:, :, :, kept]
            )
            torch.testing.assert_close(new[:, :, :, written], eager[:, :, :, written])
            assert not torch.equal(old[:, :, :, written], new[:, :, :, written])


def _assert_same_kv(left: KVPool, right: KVPool) -> None:
    for one, other in zip(left.tensors, right.tensors, strict=True):
        assert torch.equal(one[:, :, :, :-1], other[:, :, :, :-1])


@torch.inference_mode()
def test_padding_reads_and_writes_nothing_that_lives() -> None:
    """With every live slot but a row's own poisoned, that row's logits stay what they were."""
    ours = scene()
    graphs = ours.graphs(TapeRecorder())
    graphs.capture()
    rows, at = torch.tensor([3]), torch.tensor([20])
    wanted = ours.eager(rows, at).clone()
    own = ours.tables.req_to_slot[3, :21].long()
    live = torch.arange(NUM_SLOTS)
    live = live[~torch.isin(live, own)]
    for tensor in ours.pool.tensors:
        tensor[:, :, :, live] = torch.nan
    for others in range(MAX_SEQS):  # 0: the row alone, padded to nothing; then with more beside it
        beside = [row for row in range(MAX_SEQS) if row != 3][:others]
        logits = graphs.logits(torch.tensor([3, *beside]), torch.tensor([20] + [0] * others))
        assert logits is not None
        torch.testing.assert_close(logits[:1], wanted, rtol=1e-4, atol=1e-4)
        assert all(
            bool(tensor[:, :, :, NUM_SLOTS].isfinite().all()) for tensor in ours.pool.tensors
        )


@torch.inference_mode()
def test_a_rank_without_logits_gives_none() -> None:
    ours = scene()
    graphs = ours.graphs(TapeRecorder(), sizes=(2,), has_logits=False)
    graphs.capture()
    rng = np.random.default_rng(0)
    # The model is rank 0's all the same: what it gives is dropped.
    assert graphs.logits(*places(rng, 2)) is None


class Changed:
    """A model that does something more before its pass."""

    def __init__(self, model: DecoderModel, act: Callable[[Tensor, AttentionBatch], Any]) -> None:
        self._model, self._act = model, act
        self.config = model.config

    def hidden(
        self, input_ids: Tensor, batch: AttentionBatch, kv: PoolOfModel, rows: Tensor
    ) -> Any:
        factor = self._act(input_ids, batch)
        hidden = self._model.hidden(input_ids, batch, kv, rows)
        return hidden * factor if isinstance(factor, float) else hidden

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor | None:
        return self._model.logits(hidden, out)


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (lambda ids, batch: max(batch.host_context_lens), "host_context_lens .* was read"),
        (lambda ids, batch: np.array(batch.host_rows), "host_rows .* was read"),
        (lambda ids, batch: tuple(batch.host_rows), "host_rows .* was read"),
        (lambda ids, batch: int(batch.context_lens.max()), "waits for the device"),
        (lambda ids, batch: bool((ids > 3).all()), "waits for the device"),
        (lambda ids, batch: ids[ids > 3], "waits for the device"),
    ],
)
def test_what_reads_values_is_no_graph(act: Callable[..., Any], reason: str) -> None:
    ours = scene()
    graphs = ours.graphs(TapeRecorder(), Changed(ours.model, act), sizes=(2, 4))
    with pytest.raises(StartupError, match=rf"4 decodes could not be captured: .*{reason}.*off"):
        graphs.capture()


@torch.inference_mode()
def test_what_the_host_decides_is_stale_in_a_replay() -> None:
    """The recorder has teeth: a pass that changes with Python's state is not what is repeated."""
    ours = scene()
    rng = np.random.default_rng(0)
    calls = iter(range(100))
    model = Changed(ours.model, lambda ids, batch: 1.0 + next(calls))
    recorder = TapeRecorder()
    graphs = ours.graphs(recorder, model, sizes=(4,))
    graphs.capture()
    rows, at = places(rng, 4)
    first = graphs.logits(rows, at)
    assert first is not None and next(calls) == 2  # the recording was the second call
    torch.testing.assert_close(first, 2 * ours.eager(rows, at), rtol=1e-4, atol=1e-4)


def test_an_estimate_from_two_sizes() -> None:
    ours, recorder = scene(), TapeRecorder()
    estimated = estimated_graph_bytes(lambda sizes: ours.graphs(recorder, sizes=sizes), SIZES)
    assert recorder.num_recorded == NUM_ESTIMATED < len(SIZES)
    graphs = ours.graphs(recorder)
    assert sum(graphs.capture()) == len(SIZES) * 2**20
    assert graphs.static_bytes == MAX_SEQS * (2 * 8 + 4 + (64 + 200) * 4) + 4
    assert estimated == len(SIZES) * 2**20 + graphs.static_bytes
    one = ours.graphs(recorder, sizes=(1,)).static_bytes + 2**20
    assert estimated_graph_bytes(lambda s: ours.graphs(recorder, sizes=s), (1,)) == one


def test_unknown_values_have_a_number_and_nothing_else() -> None:
    values = UnknownValues("host_rows", 3)
    assert len(values) == 3
    for read in (list, sum, np.array, lambda v: v[0], lambda v: 5 in v):
        with pytest.raises(RuntimeError, match="host_rows of a recorded pass was read"):
            read(values)


# What a CUDA graph records, on tensors that say they are on a GPU: all is on the device, no value
# is asked for, and nothing is copied from or to the host. Needs a build of torch with CUDA,
# though no GPU: the CPU build cannot index such tensors.

CUDA = torch.device("cuda", 0)
RECORDED_SIZES = (1, 2, 4, 8)

needs_cuda_build = pytest.mark.skipif(
    torch.version.cuda is None, reason="a build of torch without CUDA"
)


class Captures:
    """Takes down what is recorded; fake tensors need no warm-up."""

    def __init__(self) -> None:
        self.tapes: list[Tape] = []

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        with Tape() as tape:
            function()
        self.tapes.append(tape)
        return lambda: None

    def memory(self) -> MemoryUse:
        return MemoryUse(0, 0)


class SpoiltKernels(TensorKernels):
    """And something that no graph may have."""

    def __init__(self, spoil: Callable[[Tensor], object]) -> None:
        self._spoil = spoil

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        self._spoil(gate_up)
        return super().silu_and_mul(gate_up)


def captured(kernels: TensorKernels) -> list[Tape]:
    with FakeTensorMode():
        config = tiny_config(sliding_windows=(None, 5))
        tables = [torch.zeros(9, 65, dtype=torch.int32, device=CUDA) for _ in range(2)]
        recorder = Captures()
        DecodeGraphs(
            random_model(kernels, config, device=CUDA, dtype=torch.bfloat16),
            KVPool(layout_of(config, "bfloat16"), 100, CUDA),
            DecodeTables(*tables),
            sizes=RECORDED_SIZES,
            recorder=recorder,
            has_logits=True,
        ).capture()
        return recorder.tapes


@needs_cuda_build
def test_a_pass_stays_on_the_device() -> None:
    tapes = captured(TensorKernels())
    assert len(tapes) == len(RECORDED_SIZES)
    for tape in tapes:
        tensors = [tensor for operation in tape.operations for tensor in operation.outputs]
        assert len(tensors) > 50
        assert {tensor.device for tensor in tensors} == {CUDA}
        assert tensors[-1].dtype is torch.bfloat16 and tensors[-1].shape[1] == 200


@needs_cuda_build
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda x: float(x.amax()), "waits for the device"),
        (lambda x: x.amax(dim=-1).tolist(), "waits for the device"),
        (lambda x: x.nonzero(), "waits for the device"),
        (lambda x: torch.arange(x.shape[-1]).to(x.device), "copies between"),
        (lambda x: x.cpu(), "copies between"),
    ],
)
def test_what_would_not_be_captured(spoil: Callable[[Tensor], object], reason: str) -> None:
    with pytest.raises(StartupError, match=f"8 decodes could not be captured: .*{reason}"):
        captured(SpoiltKernels(spoil))
