"""What Triton's attention promises beyond being right: replays, bits, and that faults are seen."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.grids import choose, every_value, long_but, more_when_long
from support.kernel_grid import (
    SMALL_SHAPES,
    AttentionCase,
    Poisoned,
    attend,
    attention_error,
    make_batch,
    make_inputs,
    relative_error,
)
from torch import Tensor
from triton import language as tl
from triton.runtime.interpreter import InterpretedFunction

from lightserve.errors import StartupError
from lightserve.kernels.interface import FEW_TOKENS, MAX_FEW_TOKENS, AttentionBatch, MostTokens
from lightserve.kernels.reference import ReferenceKernels, kv_in_8_bits, numbers_of_8_bit_kv
from lightserve.kernels.self_check import check_small_kv
from lightserve.kernels.triton import attention as attention_kernels
from lightserve.kernels.triton import merge, plan
from lightserve.kernels.triton.configs import (
    GPUS,
    INTERPRETER,
    AttentionConfigs,
    AttentionShape,
    ChunkClass,
    Gpu,
    KVOptions,
    PrefillConfig,
    attention_shape,
    default_prefill,
    num_prefill_programs,
    prefill_bytes,
)
from lightserve.kernels.triton.kernels import TritonKernels
from lightserve.kernels.triton.merge import MASKED, max_splits, walk
from lightserve.kernels.triton.plan import AttentionWork, attention_work

HEADS = (4, 2, 32)


class Unknown:
    """Numbers of the host that a recorded pass must not look at."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: object) -> int:
        raise AssertionError("a replay would see what was true when it was recorded")


@pytest.mark.parametrize("window", [None, 24])
def test_recorded_decodes_serve_any_contexts(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches that were made for some contexts are repeated, as they were, for others."""
    launches: list[Callable[[], Any]] = []
    run = InterpretedFunction.run

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        launches.append(lambda: run(self, *args, **kwargs))
        return run(self, *args, **kwargs)

    real = [
        make_batch([(1, c) for c in some], "scattered")
        for some in ((1,) * 5, (700, 1, 64, 333, 129))
    ]
    inputs = [make_inputs(batch, HEADS, torch.float32) for batch in real]
    static = replace(
        real[0],
        prepared={},
        host_rows=Unknown(5),
        host_context_lens=Unknown(5),  # type: ignore[arg-type]
    )
    with monkeypatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", recorded)
        out = attend(TritonKernels(), static, inputs[0], window)
    assert len(launches) == 3, "plan, decode, merge"
    for name in ("req_to_slot", "rows", "cu_seqlens_q", "context_lens"):
        getattr(static, name).copy_(getattr(real[1], name))
    for buffer, new in zip(inputs[0], inputs[1], strict=True):
        buffer.copy_(new)
    out.fill_(torch.nan)
    for launch in launches:
        launch()
    truth = attend(ReferenceKernels(), real[1], inputs[1], window)
    assert relative_error(out, truth) < 1e-6


def decodes_beside(others: list[tuple[int, int]], window: int | None) -> Tensor:
    """Return what three decodes get that stand before `others`."""
    own = [(1, 700), (1, 65), (1, 257)]
    batch = make_batch([*own, *others], "contiguous")
    q, k_pool, v_pool = make_inputs(batch, HEADS, torch.float32)
    alone = make_inputs(make_batch(own, "contiguous"), HEADS, torch.float32)
    q[:3] = alone[0][:3]
    end = sum(context for _, context in own)
    for pool, source in ((k_pool, alone[1]), (v_pool, alone[2])):
        pool[:end] = source[:end]
    return attend(TritonKernels(), batch, (q, k_pool, v_pool), window)[:3]


@pytest.mark.parametrize("window", [None, 100])
def test_a_decode_has_the_same_bits_beside_anyone(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = decodes_beside([], window)
    assert torch.equal(decodes_beside([(1, 400), (1, 3)], window), alone)
    assert torch.equal(decodes_beside([(40, 90), (1, 700), (0, 4)], window), alone)
    gpu = replace(INTERPRETER, num_sms=7)
    monkeypatch.setattr(attention_kernels, "gpu_of", lambda device: gpu)
    assert torch.equal(decodes_beside([], window), alone), "however many programs there are"


@pytest.mark.parametrize("others", [[], [(9, 40)], [(20, 40), (0, 3), (70, 900)]])
def test_more_decodes_than_are_looked_at_together(
    others: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "_ROWS_AT_ONCE", 4)
    batch = make_batch([*others, *((1, 1 + 150 * row % 700) for row in range(9))], "scattered")
    inputs = make_inputs(batch, (2, 1, 16), torch.float32)
    result = attend(TritonKernels(), batch, inputs, None)
    assert relative_error(result, attend(ReferenceKernels(), batch, inputs, None)) < 1e-6


def test_many_parts_are_merged() -> None:
    """More parts than are merged at once, and at most as many as there is room for."""
    for contexts in ([1500, 1], [4100, 128, 129]):
        batch = make_batch([(1, context) for context in contexts], "scattered")
        inputs = make_inputs(batch, (2, 1, 16), torch.float32)
        result = attend(TritonKernels(), batch, inputs, None)
        assert relative_error(result, attend(ReferenceKernels(), batch, inputs, None)) < 1e-6
        work = next(iter(batch.prepared.values()))
        assert int(work.totals[0]) == sum(-(-context // 128) for context in contexts)
        assert int(work.merged[0, 2]) > merge._MERGED_AT_ONCE


def test_a_masked_score_minus_itself_is_zero_in_a_fused_multiply_add() -> None:
    """What the interpreter cannot show: a GPU rounds the product in the maximum, not in the sum."""
    scales = (np.float32(1.4426950408889634) / np.sqrt(np.arange(1, 2000))).astype(np.float32)
    for score, is_exact in ((np.float32(MASKED.value), True), (np.float32(-1e38), False)):
        largest = score * scales
        assert bool((score.astype(np.float64) * scales == largest).all()) is is_exact


def test_an_empty_pass_launches_nothing() -> None:
    for rows in ([], [(0, 0), (0, 9)]):
        batch: AttentionBatch = make_batch(rows, "contiguous")
        assert (
            attend(TritonKernels(), batch, make_inputs(batch, HEADS, torch.float32), 3).shape[0]
            == 0
        )
        assert not batch.prepared


FAULTS = {
    "sees the future": {"q_positions": 1, "seen_end": 1},
    "window too long": {"edge_end": -1, "window": 1},
    "misses the last position": {"seen_end": -1, "last": -1},
    "masks too late": {"seen_end": 64, "edge_end": -64},
    "begins too late": {"begin": 64},
    "another head": {"v_pool": 32},
}
"""What is added to which argument of a walk."""


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # 0 / 0 where nothing was walked
@pytest.mark.parametrize(
    ("fault", "rows"),
    long_but(
        itertools.product(FAULTS, ["chunks", "decodes", "whole prompts"]),
        [("sees the future", "whole prompts"), *((fault, "decodes") for fault in [*FAULTS][1:])],
    ),
)
def test_a_wrong_walk_is_seen(fault: str, rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if (fault, rows) == ("sees the future", "decodes"):
        return  # a decode is the last position: it has no future
    names = list(inspect.signature(walk.fn).parameters)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        values = list(args)
        for name, change in FAULTS[fault].items():
            values[names.index(name)] += change
        return walk(*values, **kwargs)

    monkeypatch.setattr(attention_kernels, "walk", wrong)
    window = 24 if "window" in fault or "masks" in fault else None
    case = AttentionCase(rows, "scattered", HEADS, window, torch.float32)
    error = attention_error(TritonKernels(), case)
    assert not error <= 1e-2, error  # NaN is an error too


@pytest.mark.parametrize("rows", ["decodes", "short chunks, long contexts"])
def test_a_wrong_merge_is_seen(rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first part of a row, or of a chunk's tokens, is missing."""
    case = AttentionCase(rows, "scattered", HEADS, None, torch.float32)
    launch = InterpretedFunction.run
    merged: list[int] = []

    def first_part_missing(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "MAX_SPLITS" in kwargs and "NUM_HEADS" in kwargs:
            count = int(args[4][2])
            merged.append(count)
            args[1][args[3][:count, 1].long()] = -torch.inf
        return launch(self, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", first_part_missing)
    assert attention_error(TritonKernels(), case) > 1e-2
    assert any(merged)


# Keys and values of 8 bits, by the bytes that pools hold, and beside the reference over the same.

SMALL = {torch.int8: "int8", torch.uint8: "fp8"}
SMALL_ROWS = [
    ([(1, 700), (40, 90), (1, 5)], (14, 2, 64), None, None),
    ([(5, 5), (1, 130), (33, 200)], (3, 3, 80), 50, "cap"),
    ([(1, 1), (2, 65), (30, 400)], (8, 1, 16), None, "both"),
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # scores far beyond a cap
@pytest.mark.parametrize(
    ("pool_dtype", "dtype"), every_value([*SMALL], [torch.float32, torch.bfloat16, torch.float16])
)
def test_attention_over_keys_and_values_of_8_bits(
    pool_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    """Factors of keys and values differ by orders of magnitude; some heads are nothing."""
    torch.manual_seed(1)
    for (rows, heads, window, mod), word in zip(SMALL_ROWS, (1, 8, 8), strict=True):
        batch = make_batch(rows, "scattered")
        q, *pools = make_inputs(batch, heads, dtype)
        sizes = [3.0 ** torch.randint(-9, 4, (*pool.shape[:2], 1)) for pool in pools]
        sizes[1][::3] = 0.0
        small = [
            kv_in_8_bits(pool.float() * size, pool_dtype, word)
            for pool, size in zip(pools, sizes, strict=True)
        ]
        wide = [numbers_of_8_bit_kv(pool, heads[2]) for pool in small]
        truth = attend(ReferenceKernels(), batch, (q.float(), wide[0], wide[1]), window, mod)
        with Poisoned():
            found = attend(TritonKernels(), batch, (q, small[0], small[1]), window, mod)
        limit = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
        assert relative_error(found, truth) <= limit, (rows, heads)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # infinity times 0
@pytest.mark.parametrize("pool_dtype", SMALL, ids=SMALL.values())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_and_values_are_rounded_to_8_bits_as_the_reference_says(
    dtype: torch.dtype, pool_dtype: torch.dtype
) -> None:
    torch.manual_seed(2)
    qkv = (torch.randn(6, 8, 36) * torch.logspace(-4, 2, 6)[:, None, None]).to(dtype)
    qkv[1, 5:] = 0  # has no largest number to divide by
    qkv[2, 5, 3], qkv[3, 6, 20] = torch.nan, torch.inf
    slots = torch.tensor([3, 0, 9, 1, 7, 5])
    for half in (18, 7):  # whole heads, and a rest behind what is turned
        q, k, v = qkv.clone().split_with_sizes((4, 2, 2), dim=1)
        cos, sin = torch.ones(6, half), torch.zeros(6, half)  # no turn: what came is written
        pools = torch.full((2, 2, 10, 40), 99, dtype=pool_dtype).transpose(1, 2)
        TritonKernels().rotate_and_write(
            q, k, v, cos=cos, sin=sin, k_pool=pools[0], v_pool=pools[1], slot_mapping=slots,
            qk_norm=None,
        )  # fmt: skip
        for pool, numbers in zip(pools, (k, v), strict=True):
            good = numbers.isfinite().all(-1)
            assert torch.equal(pool[slots][good], kv_in_8_bits(numbers, pool_dtype)[good])
            assert numbers_of_8_bit_kv(pool[slots], 36)[~good].isnan().all()
            assert (pool[[2, 4, 6, 8]] == 99).all(), "nothing else is written"


@pytest.mark.parametrize("pool_dtype", SMALL, ids=SMALL.values())
def test_8_bits_are_checked_at_the_start(
    pool_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = replace(SMALL_SHAPES, pool_dtype=pool_dtype, sliding_windows=(None, 8), qk_norm=True)
    check_small_kv(TritonKernels(), shapes, torch.device("cpu"))
    monkeypatch.setattr(merge, "_LOG2_E", tl.constexpr(1.3))
    capped = replace(shapes, soft_cap=1.0)
    with pytest.raises(StartupError, match=r"attention .* of 8 bits .* --kv-dtype auto does"):
        check_small_kv(TritonKernels(), capped, torch.device("cpu"))


def test_8_bits_are_read_in_words() -> None:
    """Strides tell kernels how wide loads may be; before sm_89 GPUs have no such numbers."""
    pool = torch.zeros(2, 33, 136, dtype=torch.uint8).transpose(0, 1)
    assert KVOptions.of(pool, GPUS[90]) == ("fp8", 8, [17, 33 * 17])
    assert KVOptions.of(pool, GPUS[80]).kind == "bits"
    assert KVOptions.of(pool[..., :132].contiguous(), GPUS[90]).unit == 4
    plain = torch.zeros(2, 33, 128).transpose(0, 1)
    assert KVOptions.of(plain, GPUS[90]) == ("plain", 1, [128, 33 * 128])


# What the lists of a pass say: whose contexts are cut, into what, and that nothing is lost.

H200 = GPUS[90]
LLAMA = AttentionShape(32, 8, 128, torch.bfloat16, False)
CONFIG = default_prefill(LLAMA, H200)
Row = tuple[int, int]
"""New tokens and context."""


def work_of(
    rows: list[Row],
    *,
    shape: AttentionShape = LLAMA,
    window: int | None = None,
    configs: AttentionConfigs | None = None,
    gpu: Gpu = H200,
    width: int = 131_073,
    most: MostTokens | None = None,
) -> AttentionWork:
    batch = make_batch([(new, end) for new, end in rows], "contiguous")
    table = batch.req_to_slot.new_zeros(1).expand(len(rows) + 2, width)
    if most is not None:
        unknown = Unknown(len(rows))
        changes: Any = dict.fromkeys(("host_rows", "host_q_lens", "host_context_lens"), unknown)
        batch = replace(batch, most=most, **changes)
    batch = replace(batch, req_to_slot=table)
    return attention_work(batch, shape, window, configs or AttentionConfigs(), gpu)


def chunk_items(work: AttentionWork) -> list[list[int]]:
    return work.chunks[: int(work.totals[1])].tolist()


@pytest.mark.parametrize(
    ("new", "context", "num_programs"),
    [
        (64, 16_384, 128),
        (64, 65_536, 128),
        (256, 16_384, 128),
        (16, 131_072, 128),
        (10, 1024, 16),  # stretches are worth a program: 512 tokens at least
    ],
)
def test_a_short_chunk_fills_the_gpu(new: int, context: int, num_programs: int) -> None:
    items = chunk_items(work_of([(new, context)]))
    assert all(part >= 0 for _, _, _, _, part, _ in items)
    assert 0.8 * num_programs <= len(items) * LLAMA.num_kv_heads <= min(num_programs, 132)


@pytest.mark.parametrize(
    "rows",
    [
        [(512, 65_536)],  # 128 programs
        [(8192, 8192)],
        [(64, 1000)],
        [(64, 16_384)] * 8,
        [(1, 100_000), (4, 4), (16, 16)],  # decodes are not cut here
        [(0, 100_000), (16, 16)],
    ],
)
def test_who_has_no_need_is_left_alone(rows: list[Row]) -> None:
    items = chunk_items(work_of(rows))
    size = CONFIG.tokens(LLAMA.group)
    assert len(items) == sum(-(-new // size) for new, _ in rows if new > FEW_TOKENS)
    assert all(part == -1 and count == 1 for *_, part, count in items)


def test_a_long_context_beside_others_is_cut_alone() -> None:
    """It would be walked long after the rest is done."""
    work = work_of([(4096, 4096), (1, 3000), (64, 65_536), (300, 300)])
    assert {index for index, *_, part, _ in chunk_items(work) if part >= 0} == {2}
    assert {index for index, *_, part, _ in chunk_items(work) if part < 0} == {0, 3}
    assert chunk_items(work)[0][0] == 2, "the longest context first"
    tokens = work.merged[: int(work.totals[2]), 0].tolist()
    assert tokens == [4096, *range(4097, 4097 + 64)]


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("num_rows", [MAX_FEW_TOKENS // FEW_TOKENS, 256])
def test_room_for_parts_does_not_grow_with_rows_of_a_few_tokens(
    num_rows: int, is_recorded: bool
) -> None:
    """More than are kept free for are chunks, which share one room; decodes stay what they are."""
    decodes = work_of([(1, 5000)] * 3)
    room = len(decodes.parts.lse) // 3  # of a token
    most = MostTokens(3000, MAX_FEW_TOKENS) if is_recorded else None
    work = work_of([(FEW_TOKENS, 5000)] * num_rows + [(1, 5000)] * 3, most=most)
    num_decodes, num_chunks, _ = work.totals.tolist()
    assert num_decodes <= len(work.decodes) and num_chunks <= len(work.chunks)
    of_chunks = 1.2 if is_recorded else 1  # beside the room of as many tokens as may be few
    assert len(work.parts.lse) <= of_chunks * MAX_FEW_TOKENS * room
    is_few = num_rows * FEW_TOKENS <= MAX_FEW_TOKENS
    assert num_chunks == (0 if is_few else num_rows)
    of_last = [item[1:] for item in work.decodes[:num_decodes].tolist() if item[0] > num_rows]
    alone = [item[1:] for item in decodes.decodes[: int(decodes.totals[0])].tolist()]
    assert [item[1:4] for item in of_last] == [item[1:4] for item in alone]


def test_a_window_is_all_that_is_walked() -> None:
    shape = AttentionShape(32, 8, 128, torch.bfloat16, True)
    items = chunk_items(work_of([(64, 65_536)], shape=shape, window=900))
    assert all(part == -1 for *_, part, _ in items)
    items = chunk_items(work_of([(64, 65_536)], shape=shape, window=4096))
    assert all(part >= 0 for *_, part, _ in items)
    assert min(item[2] for item in items) >= 65_472 - 4096 - CONFIG.block_n


ROWS = st.lists(
    st.tuples(
        st.one_of(st.sampled_from([0, 1, 1]), st.integers(2, 9), st.integers(10, 90)),
        st.integers(0, 5000),
    ).map(lambda row: (row[0], max(1, sum(row)))),
    min_size=1,
    max_size=7,
)


@more_when_long
@settings(max_examples=choose(25, 150))
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
    group=st.sampled_from([1, 2, 3, 16]),
    kind=st.tuples(st.sampled_from([5100, 100_000]), st.booleans()),
)
def test_every_position_has_one_part(
    rows: list[Row],
    window: int | None,
    config: PrefillConfig,
    group: int,
    kind: tuple[int, bool],
) -> None:
    """Of every new token: stretches follow one another, and no two parts are in one place.

    `kind`: of the width of the table, and whether the pass is recorded.
    """
    width, is_recorded = kind
    shape = AttentionShape(2 * group, 2, 16, torch.float32, window is not None)
    configs = AttentionConfigs()
    for chunks in ChunkClass:
        configs = configs.plus(shape, chunks, config)
    num_tokens = sum(new for new, _ in rows)
    most = MostTokens(num_tokens + 30, num_tokens + 5) if is_recorded else None
    work = work_of(
        rows, shape=shape, window=window, configs=configs, gpu=INTERPRETER, width=width, most=most
    )
    starts = np.cumsum([0, *(new for new, _ in rows)]).tolist()
    stretches: dict[int, list[tuple[int, int, int]]] = {}
    num_decodes, num_chunks, num_merged = work.totals.tolist()
    assert num_decodes <= len(work.decodes) and num_chunks <= len(work.chunks)
    assert num_merged <= len(work.merged)
    for row, token, begin, end, last, part, count in work.decodes[:num_decodes].tolist():
        index = max(i for i, start in enumerate(starts[:-1]) if start <= token and rows[i][0])
        new, context = rows[index]
        assert row == index + 1 and 1 <= count <= work.together and new <= FEW_TOKENS
        assert last == context - new + token - starts[index] + count - 1
        for number in range(count):
            place = part if part < 0 else part + number * work.decode_splits
            stretches.setdefault(token + number, []).append((begin, end, place))
    size = config.tokens(group)
    for index, start, begin, end, part, count in work.chunks[:num_chunks].tolist():
        assert rows[index][0] > FEW_TOKENS and start % size == 0
        for number in range(min(size, rows[index][0] - start)):
            place = part if part < 0 else part + number * count
            stretches.setdefault(starts[index] + start + number, []).append((begin, end, place))
    merged = {token: (first, count) for token, first, count in work.merged[:num_merged].tolist()}
    assert len(merged) == num_merged
    assert sorted(stretches) == list(range(num_tokens))
    places: list[int] = []
    for index, (new, context) in enumerate(rows):
        for number in range(new):
            token, position = starts[index] + number, context - new + number
            own = sorted(stretches[token])
            sees_from = 0 if window is None else max(0, position - window + 1)
            assert own[0][0] <= sees_from and max(end for _, end, _ in own) > position
            for (_, end, _), (begin, _, _) in itertools.pairwise(own):
                assert end == begin or end >= position + 1 or begin >= position + 1
            if own[0][2] < 0:
                assert len(own) == 1 and token not in merged
                continue
            first, count = merged.pop(token)
            assert sorted(place for *_, place in own) == list(range(first, first + count))
            places += range(first, first + count)
    assert not merged and len(set(places)) == len(places)
    assert max(places, default=-1) < len(work.parts.lse)


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
    work = next(iter(batch.prepared.values()))
    assert sorted(set(work.chunks[: int(work.totals[1]), 2].tolist())) == [0, 192, 384]
    assert relative_error(result, truth) < 1e-5


def test_programs_at_once_and_most_parts() -> None:
    assert num_prefill_programs(CONFIG, LLAMA, H200) == 132  # 8 warps with all registers
    small = AttentionShape(32, 8, 64, torch.bfloat16, False)
    assert num_prefill_programs(default_prefill(small, H200), small, H200) == 264
    assert max_splits(512, num_kv_heads=8, max_len=131_073) == 32
    assert max_splits(512, num_kv_heads=1, max_len=131_073) == 256
    assert max_splits(512, num_kv_heads=8, max_len=600) == 2
    assert max_splits(512, num_kv_heads=300, max_len=9000) == 1
    # 128 heads over latents: 256 KiB each.
    assert max_splits(512, num_kv_heads=8, max_len=131_073, part_size=128 * 512) == 16


def test_latents_are_shared_by_blocks_of_heads_and_fit_every_gpu() -> None:
    for num_heads, group in ((16, 16), (8, 8), (128, 16), (24, 12), (17, 1)):
        shape = attention_shape(num_heads, 1, 576, torch.bfloat16, has_window=False, value_dim=512)
        assert (shape.group, shape.head_dim, shape.turned_dim) == (group, 512, 64)
        assert shape.token_bytes == 2 * 576
        for gpu in GPUS.values():
            config = default_prefill(shape, gpu)
            assert prefill_bytes(config, shape) <= gpu.shared_bytes and config.num_warps == 8
