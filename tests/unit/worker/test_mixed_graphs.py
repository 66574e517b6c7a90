"""Steps with chunks as recorded passes: which run so, and that they give what others give.

The recorder repeats torch operations on the very tensors of the recording, so that whatever a
CUDA graph would keep from its capture is kept here too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.decode_scene import MAX_SEQS, NUM_SLOTS, WIDTH, Scene, scene
from support.graph_recorders import RerunRecorder, TapeRecorder
from support.grids import choose, more_when_long

from lightserve.errors import StartupError
from lightserve.kernels.interface import FEW_TOKENS
from lightserve.kernels.triton.kernels import TritonKernels
from lightserve.worker.mixed_graphs import (
    MixedGraphs,
    kept_sizes,
    mixed_ladder,
)

SIZES = (16, 32, 64)


def test_the_ladder() -> None:
    assert mixed_ladder(0) == ()
    assert mixed_ladder(1) == (1,)
    assert mixed_ladder(100) == (16, 32, 48, 64, 96, 100)
    sizes = mixed_ladder(2048)
    assert sizes[-1] == 2048 and len(sizes) == 21 and list(sizes) == sorted(set(sizes))


def test_sizes_are_kept_by_what_they_take() -> None:
    replay = {64: 5.0, 128: 6.0, 256: 9.0, 448: 16.7, 512: 14.7, 1024: 26.0, 2048: 51.0}
    launch = dict.fromkeys(replay, 15.0)
    assert kept_sizes(replay, launch, is_limited=False) == (64, 128, 256, 512, 1024)
    assert kept_sizes(replay, launch, is_limited=True) == (64, 128, 256, 512, 1024, 2048)
    slow = dict.fromkeys(replay, 1.0)
    assert kept_sizes(replay, slow, is_limited=False) == ()


def recorded(ours: Scene, recorder: Any = None, sizes: tuple[int, ...] = SIZES) -> MixedGraphs:
    graphs = MixedGraphs(
        ours.model, ours.pool, ours.tables, sizes=sizes, recorder=recorder or TapeRecorder()
    )
    graphs.capture()
    return graphs


def random_step(rng: np.random.Generator, most: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Rows of chunks, decodes, some of a few new tokens and some of none."""
    rows: list[int] = []
    lens: list[tuple[int, int]] = []
    for row in rng.permutation(MAX_SEQS)[: rng.integers(1, MAX_SEQS + 1)].tolist():
        new = int(rng.choice([0, 1, 1, rng.integers(2, 10), rng.integers(10, 32)]))
        new = min(new, most - sum(count for count, _ in lens))
        end = int(rng.integers(max(1, new), WIDTH))
        rows.append(row)
        lens.append((new, end))
    if not any(new for new, _ in lens):
        lens[0] = (1, lens[0][1])
    return rows, lens


@more_when_long
@torch.inference_mode()
def test_random_steps_have_the_bits_of_the_same_pass_unrecorded() -> None:
    """Of all rows at once; and the values of a pass that is not padded."""
    ours, reference = scene(), scene()
    recorder = TapeRecorder()
    graphs = recorded(ours, recorder)
    assert recorder.num_recorded == len(SIZES)
    rng = np.random.default_rng(0)
    sizes = set()
    for _ in range(choose(300, 1000)):
        rows, lens = random_step(rng, SIZES[-1])
        q_lens, ends = ([part[i] for part in lens] for i in range(2))
        size = graphs.size_of(q_lens)
        assert size is not None and size >= sum(q_lens)
        sizes.add(size)
        count = sum(q_lens)
        before = [tensor.clone() for tensor in ours.pool.tensors]
        found = graphs.hidden(size, rows, q_lens, ends)[:count].clone()
        written = [tensor.clone() for tensor in ours.pool.tensors]
        for tensor, old in zip(ours.pool.tensors, before, strict=True):
            tensor.copy_(old)
        assert torch.equal(graphs.unrecorded(size, rows, q_lens, ends)[:count], found)
        for one, other in zip(ours.pool.tensors, written, strict=True):
            assert torch.equal(one, other)
        wanted = reference.hidden(rows, lens)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        for one, other in zip(ours.pool.tensors, reference.pool.tensors, strict=True):
            torch.testing.assert_close(
                one[:, :, :, :NUM_SLOTS], other[:, :, :, :NUM_SLOTS], rtol=1e-4, atol=1e-4
            )
    assert sizes == set(SIZES)


@more_when_long
@torch.inference_mode()
def test_attention_by_triton_serves_any_rows() -> None:
    ours, reference = scene(TritonKernels()), scene()
    graphs = recorded(ours, RerunRecorder(), (32,))
    rng = np.random.default_rng(1)
    for _ in range(choose(6, 40)):
        rows, lens = random_step(rng, 32)
        q_lens, ends = ([part[i] for part in lens] for i in range(2))
        found = graphs.hidden(32, rows, q_lens, ends)[: sum(q_lens)]
        torch.testing.assert_close(found, reference.hidden(rows, lens), rtol=1e-4, atol=1e-4)


def test_steps_that_have_no_graph() -> None:
    graphs = recorded(scene())
    assert graphs.size_of([]) is None and graphs.size_of([0, 0]) is None
    assert graphs.size_of([16]) == 16 and graphs.size_of([1, 16]) == 32
    assert graphs.size_of([64]) == 64 and graphs.size_of([60, 5]) is None
    assert graphs.size_of([1] * (MAX_SEQS + 1)) is None, "more rows than the tables have"


@torch.inference_mode()
def test_more_rows_than_a_graph_has_tokens() -> None:
    """Rows without new tokens count, too: the pass attends as many rows as it has tokens."""
    ours, reference = scene(), scene()
    graphs = recorded(ours, sizes=(2, 16))
    rows, q_lens, ends = [4, 1, 3], [0, 0, 2], [5, 7, 9]
    size = graphs.size_of(q_lens)
    assert size == 16
    found = graphs.hidden(size, rows, q_lens, ends)[:2]
    wanted = reference.hidden(rows, list(zip(q_lens, ends, strict=True)))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_more_rows_of_few_tokens_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of several tokens are chunks then, as in a step that is launched kernel by kernel."""
    monkeypatch.setattr("lightserve.worker.mixed_graphs.MAX_FEW_TOKENS", 12)
    ours, reference = scene(TritonKernels()), scene()
    graphs = recorded(ours, RerunRecorder(), (64,))
    for q_lens in ([1, 2, 9], [1, 2, 9, 1], [FEW_TOKENS] * 6, [1, 20, 9, 3, 1]):
        rows, ends = list(range(len(q_lens))), [20 + 2 * index for index in range(len(q_lens))]
        assert graphs.size_of(q_lens) == 64
        found = graphs.hidden(64, rows, q_lens, ends)[: sum(q_lens)]
        wanted = reference.hidden(rows, list(zip(q_lens, ends, strict=True)))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_padding_reads_and_writes_nothing_that_lives() -> None:
    """With every live slot but a row's own poisoned, that row's states stay what they were."""
    ours = scene()
    graphs = recorded(ours)
    wanted = ours.hidden([3], [(12, 21)]).clone()
    own = ours.tables.req_to_slot[3, :21].long()
    live = torch.arange(NUM_SLOTS)
    live = live[~torch.isin(live, own)]
    for tensor in ours.pool.tensors:
        tensor[:, :, :, live] = torch.nan
    for size in SIZES:
        found = graphs.hidden(size, [3], [12], [21])[:12]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        for tensor in ours.pool.tensors:
            assert bool(tensor[:, :, :, live].isnan().all())


@pytest.mark.parametrize("fault", ["old rows", "old ends", "old contexts", "nothing is replayed"])
def test_a_graph_that_replays_something_else(fault: str) -> None:
    class Wrong(TapeRecorder):
        def record(self, function: Any) -> Any:
            replay, graphs = super().record(function), function.func.__self__

            def wrong() -> None:
                step = graphs._step.clone()
                if fault == "old rows":
                    graphs._step[0] = graphs._step[0].flip(0)
                elif fault == "old ends":
                    graphs._step[1] = graphs._step[1].clamp(max=1)
                elif fault == "old contexts":
                    graphs._step[2] = (step[2] + 1).clamp(max=WIDTH - 1)
                if fault != "nothing is replayed":
                    replay()
                graphs._step.copy_(step)

            return wrong

    graphs = recorded(scene(), Wrong())
    with pytest.raises(
        StartupError, match=r"graph of \d+ new tokens replays other numbers .* launches"
    ):
        graphs.check()


def test_a_check_of_what_is_right_leaves_the_tables_as_they_were() -> None:
    ours = scene()
    tables = ours.tables.token_ids, ours.tables.req_to_slot
    before = [table.clone() for table in tables]
    recorded(ours).check()
    for table, old in zip(tables, before, strict=True):
        assert torch.equal(table, old)


def test_why_a_capture_failed() -> None:
    class Broken(TapeRecorder):
        def record(self, function: Any) -> Any:
            raise RuntimeError("out of memory")

    with pytest.raises(StartupError, match=r"of 64 new tokens .* out of memory; .*-max-tokens 0"):
        recorded(scene(), Broken())


def test_times_and_what_is_kept() -> None:
    graphs = recorded(scene())
    replay_s, launch_s = graphs.times(lambda: None)
    assert set(replay_s) == set(launch_s) == set(SIZES)
    assert all(taken > 0 for taken in (*replay_s.values(), *launch_s.values()))
    graphs.keep(SIZES[1:])
    assert graphs.sizes == SIZES[1:] and graphs.size_of([3]) == SIZES[1]
