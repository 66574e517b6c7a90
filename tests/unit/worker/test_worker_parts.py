"""The worker's tables and the size of its pool."""

from __future__ import annotations

import cProfile
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from support.random_plans import PlanMaker, row_by_row
from torch import Tensor

from lightserve.config import ServeConfig
from lightserve.config.fields import parse_memory
from lightserve.errors import ConfigError, ProtocolError, StartupError
from lightserve.messages.common import TokenSegment, pack_int32, unpack_int32
from lightserve.messages.router_worker import (
    AddSequence,
    OutputKind,
    PlanRow,
    SlotRange,
    StepPlan,
    StepResult,
    check_states,
    pack_decodes,
    plan_rows,
)
from lightserve.models.base import KVGroup, KVLayout
from lightserve.types import RowId, SamplingParams, StepId
from lightserve.worker.device import Array, CudaQueue, HostQueue
from lightserve.worker.host_pool import Waited
from lightserve.worker.memory import (
    MIN_SLOTS,
    KVPool,
    free_memory_bytes,
    num_kv_slots,
    usable_cores,
)
from lightserve.worker.step_results import Drawn, Pending, StepMarks
from lightserve.worker.tables import SequenceTable
from lightserve.worker.warm_up import largest_steps, warm_up

LAYOUT = KVLayout((KVGroup(num_layers=2, num_kv_heads=3, head_dim=8, dtype="bfloat16"),))
"""192 bytes per token."""


def test_a_step_of_chunks_and_decodes() -> None:
    table = SequenceTable(4, 32, HostQueue(), scratch_slot=50)
    segments = [TokenSegment(token_ids=pack_int32(part)) for part in ([10, 11, 12], [13, 14])]
    table.begin(
        StepPlan(
            step_id=StepId(0),
            sequences=[
                AddSequence(RowId(2), segments, SamplingParams(seed=5), 4, []),
                AddSequence(RowId(0), segments[:1], SamplingParams(seed=6), 3, []),
            ],
            slot_ranges=[
                SlotRange(RowId(2), 0, pack_int32([9, 7, 5])),
                SlotRange(RowId(0), 0, pack_int32([1, 2, 3])),
                SlotRange(RowId(2), 3, pack_int32([4, 8])),
            ],
            rows=[PlanRow(RowId(2), 0, 1, OutputKind.NONE)],
        )
    )
    plan = StepPlan(
        step_id=StepId(1),
        sequences=[],
        slot_ranges=[],
        rows=[
            PlanRow(RowId(2), 1, 2, OutputKind.NONE),
            PlanRow(RowId(0), 0, 3, OutputKind.SAMPLE),
        ],
    )
    inputs = table.begin(plan)
    input_ids, batch = table.unrecorded(inputs)
    assert input_ids.tolist() == [11, 12, 10, 11, 12]
    assert batch.positions.tolist() == [1, 2, 0, 1, 2]
    assert batch.slot_mapping.tolist() == [7, 5, 1, 2, 3]
    assert batch.cu_seqlens_q.tolist() == [0, 2, 5]
    assert batch.context_lens.tolist() == [3, 3]
    assert batch.req_to_slot[2, :5].tolist() == [9, 7, 5, 4, 8]
    assert batch.req_to_slot[4].tolist() == [50] + [0] * 32  # the padding row
    assert not inputs.is_plain_decode
    assert inputs.tensors.logit_rows.tolist() == [4]
    assert inputs.tensors.sampled_positions.tolist() == [3]
    assert inputs.sampled_rows == [0]
    rows = [PlanRow(RowId(2), 1, 2, OutputKind.NONE), PlanRow(RowId(0), 3, 0, OutputKind.NONE)]
    uneven = table.begin(StepPlan(StepId(1), [], [], rows))
    assert not uneven.is_decode, "as many tokens as rows, but not one each"
    table.append(inputs, torch.tensor([77]))
    decode = StepPlan(StepId(2), [], [], [], pack_decodes([0], [3], [30]))
    inputs = table.begin(decode)
    input_ids, batch = table.unrecorded(inputs)
    assert input_ids.tolist() == [77] and batch.slot_mapping.tolist() == [30]
    assert inputs.is_plain_decode


def test_decodes_as_columns_are_what_they_are_row_by_row() -> None:
    """Tables and inputs of the step, in steps of decodes alone and beside chunks."""
    limits = {"max_seqs": 9, "num_slots": 400, "max_len": 40}
    tables = [SequenceTable(9, 40, HostQueue(), scratch_slot=400) for _ in range(2)]
    kinds = set()
    for plan in PlanMaker(5, vocab_size=99, **limits).plans(60):
        left, right = (
            table.begin(one) for table, one in zip(tables, (plan, row_by_row(plan)), strict=True)
        )
        kinds.add((bool(plan.rows), bool(plan.decodes.rows)))
        for one, other in zip(left.tensors, right.tensors, strict=True):
            assert one.dtype == other.dtype and one.tolist() == other.tolist()
        assert left.sampled_rows == right.sampled_rows
        for name in ("rows", "q_lens", "context_lens"):
            assert getattr(left, name).tolist() == getattr(right, name).tolist()
        assert left.is_plain_decode == right.is_plain_decode
        token_ids = torch.arange(len(left.sampled_rows))
        for table, inputs in zip(tables, (left, right), strict=True):
            table.append(inputs, token_ids)
        assert torch.equal(tables[0].req_to_slot, tables[1].req_to_slot)
        assert torch.equal(tables[0].token_ids, tables[1].token_ids)
    assert kinds == {(True, False), (False, True), (True, True)}


def test_a_row_more_costs_a_step_of_decodes_no_call() -> None:
    """From the message to the inputs of the forward pass, and from the tokens to the message."""
    num_calls(2)  # the first one imports
    assert num_calls(2) == num_calls(200)


def num_calls(num_rows: int) -> int:
    """Return how many functions the host calls for a step of so many decodes."""
    rows = range(num_rows)
    data = msgspec.msgpack.encode(
        StepPlan(StepId(1), [], [], [], pack_decodes(rows, [5] * num_rows, rows))
    )
    table, tensors = SequenceTable(200, 40, HostQueue()), torch.zeros(num_rows, dtype=torch.int64)
    mark = HostQueue().mark()
    profile = cProfile.Profile()
    profile.enable()
    plan = msgspec.msgpack.decode(data, type=StepPlan)
    inputs = table.begin(plan)
    assert inputs.is_plain_decode
    pending = Pending(
        plan=plan,
        num_rows=num_rows,
        drawn=Drawn(inputs.sampled_rows, tensors, is_finite=tensors == 0),
        prompts={},
        constrained_rows=frozenset(),
        marks=StepMarks(mark, mark, mark),
        copies=Waited(0.0),
        launch_s=0.0,
    )
    token_ids, others = pending.row_results()
    result = StepResult(
        StepId(1), 0, pack_int32(token_ids.ravel()), exec_s=0.0, idle_s=0.0, rows=others
    )
    msgspec.msgpack.encode(result)
    profile.disable()
    assert len(result.token_ids) == 4 * num_rows and not others
    return sum(entry.callcount for entry in profile.getstats())


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1048576", 2**20),
        ("512MiB", 2**29),
        ("4GiB", 2**32),
        ("2.5 GB", 2_500_000_000),
        ("1kb", 1000),
    ],
)
def test_memory_sizes(text: str, num_bytes: int) -> None:
    assert parse_memory(text, "--kv-memory") == num_bytes


@pytest.mark.parametrize("text", ["", "much", "-1GiB", "4TiB", "1e9", "MiB"])
def test_bad_memory_sizes(text: str) -> None:
    with pytest.raises(ConfigError, match="--kv-memory must be auto or a size"):
        parse_memory(text, "--kv-memory")


@pytest.mark.parametrize(
    ("options", "free_bytes", "num_slots"),
    [
        ({}, 192_000, 500),
        ({}, 2**40, 2**32 // 192),
        ({"tp": 2}, 192_000, 250),
        ({"kv_memory": "19200"}, 192_000, 100),
        ({"kv_memory": "19200", "max_kv_tokens": 64}, 192_000, 64),
    ],
)
def test_pool_size(options: dict[str, object], free_bytes: int, num_slots: int) -> None:
    config = ServeConfig(**options)  # type: ignore[arg-type]
    assert num_kv_slots(config, LAYOUT, free_bytes=free_bytes) == num_slots
    pool = KVPool(LAYOUT, 64, torch.device("cpu"))
    assert pool.num_slots == 64  # and one of no request behind them
    assert len(pool.k) == len(pool.v) == 2 and pool.k[0].shape == (65, 3, 8)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kv_memory": "1GiB"}, ConfigError, "more than the 100 MiB that are free"),
        ({"kv_memory": "60MiB", "tp": 2}, ConfigError, "for 2 rank"),
        ({"kv_memory": "1000"}, StartupError, "would hold 5 tokens of 192 bytes, at least 16"),
        ({"max_kv_tokens": 15}, StartupError, "would hold 15 tokens"),
    ],
)
def test_impossible_pools(options: dict[str, object], error: type[Exception], message: str) -> None:
    config = ServeConfig(**options)  # type: ignore[arg-type]
    with pytest.raises(error, match=message):
        num_kv_slots(config, LAYOUT, free_bytes=100 * 2**20)


MIB = 2**20


def test_inputs_of_guesses_are_part_of_the_memory() -> None:
    """Of each rank; what they leave is for KV, of which `auto` takes a half."""
    sizes = {"free_bytes": 100 * MIB, "kept_bytes": 20 * MIB}
    for num_ranks in (1, 2):
        auto = num_kv_slots(ServeConfig(tp=num_ranks), LAYOUT, **sizes)
        assert auto == (100 - 20 * num_ranks) * MIB // 2 // num_ranks // 192
    assert num_kv_slots(ServeConfig(kv_memory="80MiB"), LAYOUT, **sizes) == 80 * MIB // 192
    said = "more than the 80 MiB that are free beside 20 MiB for inputs of guesses"
    with pytest.raises(ConfigError, match=said):
        num_kv_slots(ServeConfig(kv_memory="81MiB"), LAYOUT, **sizes)
    said = (
        r"50 MiB for inputs of guesses \(--speculation\) on each rank are more than the 99 MiB that"
        r" are free for 2 rank\(s\): lower --max-draft-tokens, --max-num-seqs or"
    )
    with pytest.raises(StartupError, match=said):
        num_kv_slots(ServeConfig(tp=2), LAYOUT, free_bytes=99 * MIB, kept_bytes=50 * MIB)


@pytest.mark.parametrize(
    ("options", "num_tokens"),
    [
        ({}, 0),
        ({"speculation": "ngram", "max_num_seqs": 4}, 36),
        ({"speculation": "ngram", "max_num_seqs": 4, "max_draft_tokens": 2}, 12),
        ({"speculation": "ngram", "max_num_seqs": 100}, 512),
        ({"speculation": "ngram", "max_num_seqs": 100, "max_num_batched_tokens": 200}, 200),
    ],
)
def test_tokens_of_rows_with_guesses(options: dict[str, Any], num_tokens: int) -> None:
    """As many rows as there can be, with all their guesses, but no more than a step has."""
    assert ServeConfig(**options).drafted_tokens_of_step("cpu") == num_tokens


@pytest.mark.parametrize(
    ("groups", "free_mib"),
    [
        ({"": ("max", 7, 0)}, 900),
        ({"": (500, 100, 0)}, 400),
        ({"": (500, 450, 300)}, 350),
        ({"": ("max", 7, 0), "a.slice": (600, 100, 0), "a.slice/b.scope": ("max", 100, 0)}, 500),
        ({"": ("max", 7, 0), "a.slice": (600, 100, 0), "a.slice/b.scope": (80, 70, 50)}, 60),
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_a_container_limits_memory(
    tmp_path: Path, version: int, groups: dict[str, tuple[object, int, int]], free_mib: int
) -> None:
    """Limits of the own group and those above count; page cache can be dropped."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {900 * 1024} kB\n")
    own = max(groups, key=len)
    line = f"0::/{own}\n" if version == 2 else f"5:cpu:/\n4:memory:/{own}\n"
    (tmp_path / "proc/self/cgroup").write_text(line)
    base = tmp_path / ("sys/fs/cgroup" if version == 2 else "sys/fs/cgroup/memory")
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    for name, (limit, usage, cache) in groups.items():
        folder = base / name
        folder.mkdir(parents=True, exist_ok=True)
        unlimited = "max" if version == 2 else str(2**63 - 4096)
        limit_bytes = unlimited if limit == "max" else str(int(str(limit)) * MIB)
        (folder / names[0]).write_text(limit_bytes)
        (folder / names[1]).write_text(str(usage * MIB))
        (folder / "memory.stat").write_text(f"anon 1\n{names[2]} {cache * MIB}\n")
    assert free_memory_bytes(tmp_path) == free_mib * MIB


@pytest.mark.parametrize(
    ("groups", "cores"),
    [
        ({"": None}, 8),
        ({"": 2.0}, 2),
        ({"": 2.9}, 2),
        ({"": 0.5}, 1),
        ({"": 64.0}, 8),
        ({"": None, "a.slice": 3.0, "a.slice/b.scope": 6.0}, 3),
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_a_container_limits_cores(
    tmp_path: Path,
    version: int,
    groups: dict[str, float | None],
    cores: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    (tmp_path / "proc/self").mkdir(parents=True)
    own = max(groups, key=len)
    line = f"0::/{own}\n" if version == 2 else f"4:memory:/x\n3:cpu,cpuacct:/{own}\n"
    (tmp_path / "proc/self/cgroup").write_text(line)
    for name, quota in groups.items():
        folder = tmp_path / ("sys/fs/cgroup" if version == 2 else "sys/fs/cgroup/cpu") / name
        folder.mkdir(parents=True, exist_ok=True)
        if version == 2:
            text = "max" if quota is None else str(int(quota * 100_000))
            (folder / "cpu.max").write_text(f"{text} 100000\n")
        else:
            (folder / "cpu.cfs_quota_us").write_text(
                "-1" if quota is None else str(int(quota * 100_000))
            )
            (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores(tmp_path) == cores


# Many arrays as one copy: each comes out as it was, at an address that kernels can rely on.

TYPES = (np.bool_, np.uint8, np.int32, np.int64, np.float32, np.float64)


class Unpinned(CudaQueue):
    """Without a GPU no memory is page-locked; all else is as on one."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.full(tuple(shape), 99, dtype=dtype)


def random_arrays(seed: int) -> list[Array]:
    rng = np.random.default_rng(seed)
    arrays: list[Array] = []
    for _ in range(int(rng.integers(0, 14))):
        shape = tuple(rng.integers(0, 9, int(rng.integers(1, 3))).tolist())
        dtype = TYPES[int(rng.integers(len(TYPES)))]
        arrays.append(rng.integers(0, 2 if dtype is np.bool_ else 200, shape).astype(dtype))
    return arrays


@pytest.mark.parametrize("seed", range(40))
def test_arrays_come_out_as_they_were(seed: int) -> None:
    arrays = random_arrays(seed)
    tensors = Unpinned().upload(arrays)
    for array, tensor in zip(arrays, tensors, strict=True):
        assert torch.equal(tensor, torch.from_numpy(array)) and tensor.is_contiguous()
        assert tensor.dtype is torch.from_numpy(array).dtype
        assert tensor.storage_offset() * tensor.element_size() % 16 == 0
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) <= 1


def test_what_is_written_later_does_not_change_it() -> None:
    array = np.arange(5)
    (tensor,) = Unpinned().upload([array])
    array[:] = 7
    assert tensor.tolist() == [0, 1, 2, 3, 4]


# The steps of a warm-up stay within what a server of any size can run.


class NotingRunner:
    """Takes down the plans."""

    def __init__(
        self,
        device: str,
        context_len: int,
        max_num_seqs: int,
        *,
        rank: int,
        num_states: int,
        max_drafted: int,
    ) -> None:
        self.device = torch.device(device)
        self.context_len = context_len
        self.max_num_seqs = max_num_seqs
        self.has_constraints = rank == 0
        self.max_drafted_tokens = max_drafted
        self.pool = SimpleNamespace(num_state_slots=num_states)
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> None:
        self.plans.append(plan)


def plans_of(
    device: str,
    context_len: int,
    max_num_seqs: int,
    max_tokens: int,
    *,
    rank: int = 0,
    num_states: int = 0,
    max_drafted: int = 0,
) -> list[StepPlan]:
    own = {"rank": rank, "num_states": num_states, "max_drafted": max_drafted}
    runner = NotingRunner(device, context_len, max_num_seqs, **own)  # type: ignore[arg-type]
    warm_up(runner, max_num_batched_tokens=max_tokens)  # type: ignore[arg-type]
    return runner.plans


def test_rows_that_begin_have_slots_for_their_states() -> None:
    """In the warm-up and in the largest steps; without them a worker refuses the plan."""
    sizes = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "context_len": 100}
    plans = largest_steps(**sizes, num_kv_tokens=1000, num_state_slots=3)
    for plan in [*plans, *plans_of("cuda", 100, 4, 64, num_states=3)]:
        check_states(plan, 3)
    for plan in largest_steps(**sizes, num_kv_tokens=1000):
        with pytest.raises(ProtocolError, match="have no slots for their states"):
            check_states(plan, 3)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("context_len", [2, 3, 5, 8, 4096])
@pytest.mark.parametrize(("max_num_seqs", "max_tokens"), [(1, 64), (2, 64), (256, 2048)])
def test_within_limits(device: str, context_len: int, max_num_seqs: int, max_tokens: int) -> None:
    plans = plans_of(device, context_len, max_num_seqs, max_tokens, max_drafted=max_tokens)
    assert plans
    for plan in plans:
        assert 0 < sum(row.num_tokens for row in plan_rows(plan)) <= max_tokens
        for row in plan_rows(plan):
            assert row.num_tokens > 0 and row.row < max_num_seqs
            assert row.start_position + row.num_tokens <= context_len
        for part in plan.slot_ranges:
            assert unpack_int32(part.slots).max() < MIN_SLOTS
        assert unpack_int32(plan.decodes.slots).max(initial=0) < MIN_SLOTS
        for sequence in plan.sequences:
            assert sequence.num_prompt_tokens < context_len


def test_every_rank_runs_the_same_steps() -> None:
    """Though rank 0 alone knows constraints."""
    first, other = (plans_of("cuda", 4096, 256, 2048, rank=rank) for rank in (0, 1))
    assert [plan_rows(plan) for plan in first] == [plan_rows(plan) for plan in other]
    constrained = [plan for plan in first if any(s.constraint for s in plan.sequences)]
    assert constrained and not any(s.constraint for plan in other for s in plan.sequences)


def test_kinds_of_steps() -> None:
    plans = plans_of("cuda", 4096, 256, 2048)
    kinds = {frozenset(row.num_tokens > 1 for row in plan_rows(plan)) for plan in plans}
    assert kinds == {frozenset({True}), frozenset({False}), frozenset({True, False})}
    outputs = {row.output for plan in plans for row in plan_rows(plan)}
    assert {OutputKind.NONE, OutputKind.SAMPLE} < outputs
    assert max(row.num_tokens for plan in plans for row in plan_rows(plan)) == 4095 // 3
    assert any(len(unpack_int32(plan.decodes.rows)) == 2 for plan in plans)
    # On the CPU, where nothing is compiled, a start is not to take longer.
    assert len(plans_of("cpu", 4096, 256, 2048, max_drafted=2048)) == 2


@pytest.mark.parametrize(
    ("options", "num_drafts"),
    [
        ({}, [2, 0]),
        ({"max_num_seqs": 3, "max_num_batched_tokens": 3}, [2]),
        ({"max_num_seqs": 2, "max_num_batched_tokens": 2}, [1]),
        ({"max_num_seqs": 1, "max_num_batched_tokens": 1}, []),
        ({"max_num_seqs": 1, "max_draft_tokens": 1}, [1]),
        ({"speculation": "off"}, []),
    ],
)
def test_guesses_are_verified_before_the_first_request(
    options: dict[str, Any], num_drafts: list[int]
) -> None:
    """On a GPU: kernels that move states on are those of chunks whose length the device has.

    With no more tokens than there is room for the inputs of.
    """
    config = ServeConfig(**{"speculation": "ngram"} | options)
    rows, tokens = config.max_num_seqs, config.max_tokens_of_step("cuda")
    most = config.drafted_tokens_of_step("cuda")
    plans = plans_of("cuda", 4096, rows, tokens, max_drafted=most)
    drafts = [unpack_int32(plan.decodes.num_drafts).tolist() for plan in plans]
    assert [own for own in drafts if own] == ([num_drafts] if num_drafts else [])
