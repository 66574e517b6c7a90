"""Contexts of chunks that are cut into stretches: which, into what, and that nothing is lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel_grid import Poisoned, make_batch, make_inputs, relative_error

from lightserve.kernels.reference import ReferenceKernels
from lightserve.kernels.triton.configs import (
    GPUS,
    INTERPRETER,
    AttentionConfigs,
    AttentionShape,
    PrefillConfig,
    default_prefill,
    num_prefill_programs,
)
from lightserve.kernels.triton.kernels import TritonKernels
from lightserve.kernels.triton.merge import max_splits
from lightserve.kernels.triton.plan import attention_work, blocks_of, cut, rows_to_cut

H200 = GPUS[90]
LLAMA = AttentionShape(32, 8, 128, torch.bfloat16, False)
CONFIG = default_prefill(LLAMA, H200)
Row = tuple[int, int]
"""New tokens and context."""


def lens(rows: list[Row]) -> tuple[np.ndarray, np.ndarray]:
    q_lens, context_lens = np.array(rows, dtype=np.int64).T
    return q_lens, context_lens


@pytest.mark.parametrize(
    ("new", "context", "num_programs"),
    [
        (64, 16_384, 128),
        (64, 65_536, 128),
        (256, 16_384, 128),
        (16, 131_072, 128),
        (2, 1024, 16),  # stretches are worth a program: 512 tokens at least
    ],
)
def test_a_short_chunk_fills_the_gpu(new: int, context: int, num_programs: int) -> None:
    q_lens, context_lens = lens([(new, context)])
    rows = rows_to_cut(q_lens, context_lens, LLAMA, None, CONFIG, H200)
    assert rows.tolist() == [0]
    cuts = cut(rows, q_lens, context_lens, LLAMA, None, CONFIG, H200, max_splits=32)
    assert len(cuts.rows) * LLAMA.num_kv_heads == num_programs <= H200.num_sms


@pytest.mark.parametrize(
    "rows",
    [
        [(512, 65_536)],  # 128 programs
        [(8192, 8192)],
        [(64, 1000)],
        [(64, 16_384)] * 8,
        [(1, 100_000), (4, 4)],  # decodes are not cut here
        [(0, 100_000)],
    ],
)
def test_who_has_no_need_is_left_alone(rows: list[Row]) -> None:
    assert not rows_to_cut(*lens(rows), LLAMA, None, CONFIG, H200).size


def test_a_long_context_beside_others_is_cut_alone() -> None:
    """It would be walked long after the rest is done."""
    rows: list[Row] = [(4096, 4096), (1, 3000), (64, 65_536), (300, 300)]
    assert rows_to_cut(*lens(rows), LLAMA, None, CONFIG, H200).tolist() == [2]
    batch = make_batch(rows, "contiguous")
    meta = AttentionShape(32, 8, 128, torch.bfloat16, False)
    work = attention_work(batch, meta, None, AttentionConfigs(), H200)
    whole, stretches = work.chunks
    assert set(whole.rows.tolist()) == {0, 3} and whole.cuts is None
    assert set(stretches.rows.tolist()) == {2} and stretches.cuts is not None
    assert work.decodes is not None and work.decodes.num_decodes == 1
    tokens = stretches.cuts.tokens.tolist()
    assert tokens == list(range(4097, 4097 + 64))


def test_a_window_is_all_that_is_walked() -> None:
    q_lens, context_lens = lens([(64, 65_536)])
    shape = AttentionShape(32, 8, 128, torch.bfloat16, True)
    assert not rows_to_cut(q_lens, context_lens, shape, 900, CONFIG, H200).size
    rows = rows_to_cut(q_lens, context_lens, shape, 4096, CONFIG, H200)
    cuts = cut(rows, q_lens, context_lens, shape, 4096, CONFIG, H200, max_splits=32)
    assert cuts.stretches[:, 0].min() >= 65_472 - 4096 - CONFIG.block_n


ROWS = st.lists(
    st.tuples(st.integers(2, 90), st.integers(0, 5000)).map(lambda row: (row[0], sum(row))),
    min_size=1,
    max_size=5,
)


@settings(max_examples=60)
@given(
    rows=ROWS,
    window=st.none() | st.integers(1, 3000),
    config=st.builds(
        PrefillConfig,
        st.sampled_from([16, 64]),
        st.sampled_from([16, 64]),
        st.just(4),
        st.just(2),
        st.sampled_from([64, 200]),
    ),
    limit=st.sampled_from([1, 2, 32]),
)
def test_every_position_has_one_part(
    rows: list[Row], window: int | None, config: PrefillConfig, limit: int
) -> None:
    """Of every token: stretches follow one another, and no two parts are in one place."""
    q_lens, context_lens = lens(rows)
    shape = AttentionShape(4, 2, 16, torch.float32, window is not None)
    chunks = np.arange(len(rows))
    cuts = cut(chunks, q_lens, context_lens, shape, window, config, INTERPRETER, max_splits=limit)
    size = config.tokens(shape.group)
    row_starts = np.cumsum(q_lens) - q_lens
    place_of: dict[tuple[int, int], int] = {}
    ends: dict[tuple[int, int], int] = {}
    for row, start, stretch in zip(cuts.rows, cuts.starts, cuts.stretches, strict=True):
        begin, end, part, count = map(int, stretch)
        first = int(context_lens[row] - q_lens[row] + start)
        before = ends.get((row, start))
        if before is None:
            sees_from = 0 if window is None else max(0, first - window + 1)
            assert sees_from - config.block_n < begin <= sees_from
        else:
            assert begin == before
        assert begin < end and begin % config.block_n == 0 and 1 <= count <= limit
        ends[row, start] = end
        for token in range(min(size, int(q_lens[row] - start))):
            number = int(row_starts[row] + start + token)
            place = part + token * count
            assert place not in place_of.values()
            place_of[number, begin] = place
    for (row, start), end in ends.items():
        assert end == min(context_lens[row], context_lens[row] - q_lens[row] + start + size)
    assert sorted(place_of.values()) == list(range(cuts.num_parts))
    # The merge finds them where they are.
    assert sorted(cuts.tokens.tolist()) == list(range(int(q_lens.sum())))
    for token, first, count in zip(cuts.tokens, cuts.firsts, cuts.counts, strict=True):
        own = sorted(place for (number, _), place in place_of.items() if number == token)
        assert own == list(range(int(first), int(first + count)))
    blocks = blocks_of(chunks, q_lens, size)
    assert set(ends) == set(zip(blocks.rows.tolist(), blocks.starts.tolist(), strict=True))


@pytest.mark.parametrize("scale", [0.2, 1.0, 2.5])
def test_a_stretch_that_a_query_does_not_see_adds_nothing(scale: float) -> None:
    """The last stretch, 384 …, begins behind most of 32 tokens at the end of 410. Whatever the
    scale is: it is in what stands for unseen scores."""
    batch = make_batch([(32, 410)], "scattered")
    q, k_pool, v_pool = make_inputs(batch, (2, 1, 32), torch.float32)
    options = {"scale": scale, "sliding_window": None}
    truth = ReferenceKernels().attention(q, k_pool, v_pool, batch, **options)  # type: ignore[arg-type]
    with Poisoned():
        result = TritonKernels().attention(q, k_pool, v_pool, batch, **options)  # type: ignore[arg-type]
    (chunks,) = next(iter(batch.prepared.values())).chunks
    assert chunks.cuts is not None
    assert chunks.cuts.stretches[:, 0].tolist() == [0, 192, 384]
    assert relative_error(result, truth) < 1e-5


def test_programs_at_once_and_most_parts() -> None:
    assert num_prefill_programs(CONFIG, LLAMA, H200) == 132  # 8 warps with all registers
    small = AttentionShape(32, 8, 64, torch.bfloat16, False)
    assert num_prefill_programs(default_prefill(small, H200), small, H200) == 264
    assert max_splits(512, num_kv_heads=8, max_len=131_073) == 32
    assert max_splits(512, num_kv_heads=1, max_len=131_073) == 256
    assert max_splits(512, num_kv_heads=8, max_len=600) == 2
    assert max_splits(512, num_kv_heads=300, max_len=9000) == 1
