"""How large a KV pool on a GPU is: arithmetic, what is measured for it, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.tiny_models import TINY_MODELS, write_tiny_model

from lightserve.config import ServeConfig
from lightserve.errors import ConfigError, StartupError
from lightserve.messages.common import unpack_int32
from lightserve.messages.router_worker import (
    OutputKind,
    row_results,
)
from lightserve.models.base import KVGroup, KVLayout
from lightserve.worker.engine import build_runner
from lightserve.worker.memory import (
    AUTO_LOCKED_BYTES,
    DeviceMemory,
    measure_step,
    num_device_slots,
    num_host_slots,
    num_kv_slots,
    num_staged_slots,
)
from lightserve.worker.warm_up import largest_steps

GIB = 2**30
LAYOUT = KVLayout((KVGroup(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16"),))
"""Of Llama-3-8B: 128 KiB per token."""
H200 = DeviceMemory(
    total=140 * GIB,
    others=1 * GIB,
    weights=15 * GIB,
    activations=2 * GIB,
    graphs=1 * GIB,
    staging=1 * GIB,
)
SMALL = DeviceMemory(total=24 * GIB, others=GIB, weights=15 * GIB, activations=6 * GIB)


@pytest.mark.parametrize(
    ("options", "memory", "num_slots"),
    [
        ({}, H200, (126 - 20) * 8192 - 1),
        ({"gpu_memory_utilization": 1.0}, H200, 120 * 8192 - 1),
        ({"gpu_memory_utilization": 0.5}, H200, 50 * 8192 - 1),
        ({"kv_memory": "2GiB"}, H200, 2 * 8192 - 1),
        ({"kv_memory": "117GiB"}, H200, 117 * 8192 - 1),
        ({"kv_memory": "500GiB", "max_kv_tokens": 1000}, H200, 1000),
        ({"max_kv_tokens": 1000}, H200, 1000),
        ({"kv_memory": "1GiB"}, SMALL, 8192 - 1),
    ],
)
def test_size(options: dict[str, Any], memory: DeviceMemory, num_slots: int) -> None:
    config = ServeConfig(**options)
    found = num_device_slots(config, LAYOUT, memory)
    assert found == num_slots
    # With the slot of no request, it fits in.
    assert memory.taken + (found + 1) * LAYOUT.bytes_per_token <= memory.total


@pytest.mark.parametrize(
    ("options", "memory", "message"),
    [
        (
            {},
            SMALL,
            r"no room for a KV pool: weights 15\.00 GiB, the largest step 6\.00 GiB, other",
        ),
        ({}, SMALL, r"leave 0\.00 GiB of the 21\.60 GiB that --gpu-memory-utilization 0\.9 allows"),
        ({"gpu_memory_utilization": 0.05}, H200, "CUDA graphs 1.00 GiB, staged copies 1.00 GiB"),
        ({"kv_memory": "118GiB"}, H200, r"--kv-memory 118GiB does not fit on a GPU of 140\.00 GiB"),
        (
            {"kv_memory": "2GiB"},
            SMALL,
            r"the largest step 6\.00 .*, and 0\.48 GiB that are kept free, leave 1\.52 GiB,"
            r" and the pool would take 2\.00 GiB",
        ),
        ({"kv_memory": "2MiB"}, H200, "15 tokens where 16 are needed"),
        ({"max_kv_tokens": 15}, H200, "15 tokens where 16"),
    ],
)
def test_what_does_not_fit(options: dict[str, Any], memory: DeviceMemory, message: str) -> None:
    with pytest.raises(StartupError, match=message):
        num_device_slots(ServeConfig(**options), LAYOUT, memory)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cpu", "gpu_memory_utilization": 0.8}, "needs a GPU, got --device cpu"),
        ({"kv_memory": "1GiB", "gpu_memory_utilization": 0.8}, "needs --kv-memory auto"),
        ({"gpu_memory_utilization": 1.2}, "must be at most 1.0"),
        ({"gpu_memory_utilization": 0.0}, "must be at least 0.05"),
    ],
)
def test_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServeConfig(**options)


def test_refused_where_auto_finds_no_gpu() -> None:
    with pytest.raises(ConfigError, match="--gpu-memory-utilization needs a GPU, and none"):
        num_kv_slots(ServeConfig(gpu_memory_utilization=0.8), LAYOUT, free_bytes=100 * GIB)


@pytest.mark.parametrize(
    ("options", "free", "expected"),
    [
        ({}, 400 * GIB, AUTO_LOCKED_BYTES),
        ({}, 20 * GIB, 10 * GIB),  # half of what is free
        ({"tp": 2}, 20 * GIB, 5 * GIB),
        ({"host_kv_memory": "30GiB"}, 31 * GIB, 30 * GIB),
        ({"preemption": "recompute"}, 400 * GIB, 0),
    ],
)
def test_host_pool_beside_a_gpu(options: dict[str, Any], free: int, expected: int) -> None:
    """The KV pool takes nothing off it: that is elsewhere."""
    found = num_host_slots(
        ServeConfig(**options), LAYOUT, num_slots=10**6, free_bytes=free, is_beside_gpu=True
    )
    assert found == expected // LAYOUT.bytes_per_token


def test_more_than_the_host_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="more than the 20480 MiB that are free for each"):
        num_host_slots(
            ServeConfig(host_kv_memory="30GiB"),
            LAYOUT,
            num_slots=10,
            free_bytes=20 * GIB,
            is_beside_gpu=True,
        )


@pytest.mark.parametrize(
    ("options", "total", "expected"),
    [
        ({}, 140 * GIB, 8192),
        ({}, 24 * GIB, 1536),  # one 128th
        ({}, GIB // 1024, 1),
        ({"preemption": "recompute"}, 140 * GIB, 0),
        ({"host_kv_memory": "0"}, 140 * GIB, 0),
    ],
)
def test_staging_memory(options: dict[str, Any], total: int, expected: int) -> None:
    assert num_staged_slots(ServeConfig(**options), LAYOUT, total_bytes=total) == expected


class Recorded:
    """A GPU on which other processes take 3, libraries 2 and weights 10; a step reserves 7 more."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def begin(self) -> int:
        self.calls.append("begin")
        return 10

    def peak(self) -> int:
        self.calls.append("peak")
        return 17

    def others(self) -> int:
        self.calls.append("others")
        return 5

    def total(self) -> int:
        return 100

    def end(self) -> None:
        self.calls.append("end")


def test_measured() -> None:
    """What libraries take is read after the steps: their first use is part of those."""
    statistics = Recorded()
    memory = measure_step(statistics, lambda: statistics.calls.append("steps"))
    assert memory == DeviceMemory(total=100, others=5, weights=10, activations=7)
    assert statistics.calls == ["begin", "steps", "peak", "others", "end"]


@pytest.mark.parametrize(
    ("max_tokens", "max_seqs", "context_len", "num_kv_tokens"),
    [
        (2048, 256, 8192, 10**6),
        (8192, 7, 512, 10**6),
        (100, 256, 64, 10**6),
        (2048, 1, 1 << 17, 10**6),
        (2048, 256, 1 << 17, 10**6),  # not every sequence can be as long
        (16, 16, 2, 10**6),
        (16, 16, 4096, 20),
    ],
)
def test_largest_steps(
    max_tokens: int, max_seqs: int, context_len: int, num_kv_tokens: int
) -> None:
    plans = largest_steps(
        max_num_batched_tokens=max_tokens,
        max_num_seqs=max_seqs,
        context_len=context_len,
        num_kv_tokens=num_kv_tokens,
    )
    prefills, decodes, chunk = plans
    num_rows, longest = min(max_seqs, max_tokens), min(context_len - 1, num_kv_tokens)
    for plan in plans:
        rows = [row.row for row in plan.rows]
        assert len(set(rows)) == len(rows) == (1 if plan is chunk else num_rows)
        assert {sequence.row for sequence in plan.sequences} == set(rows)
        assert all(row.output is OutputKind.SAMPLE for row in plan.rows)
        # A sampled token has its place in the tables.
        assert all(1 <= r.start_position + r.num_tokens < context_len for r in plan.rows)
        for sequence in plan.sequences:
            assert len(unpack_int32(sequence.segments[0].token_ids)) == 1
    assert sum(row.num_tokens for row in prefills.rows) == min(max_tokens, longest * num_rows)
    assert all(row.num_tokens == 1 for row in decodes.rows)
    contexts = [row.start_position + 1 for row in decodes.rows]
    assert sum(contexts) <= max(num_kv_tokens, num_rows)
    assert all(context == min(longest, num_kv_tokens // num_rows) for context in contexts)
    [row] = chunk.rows
    assert row.num_tokens == min(max_tokens, longest)
    assert row.start_position + row.num_tokens == longest


def test_the_largest_steps_run(tmp_path: Path) -> None:
    """On a pool of a few slots, whatever its KV is; and a measured pool is what is made."""
    write_tiny_model(TINY_MODELS[0], tmp_path)
    config = ServeConfig(model=str(tmp_path), max_num_seqs=3, max_num_batched_tokens=40)
    runner = build_runner(config)
    for plan in largest_steps(
        max_num_batched_tokens=40,
        max_num_seqs=3,
        context_len=runner.context_len,
        num_kv_tokens=1000,
    ):
        found = row_results(plan, runner.execute(plan))
        assert [row.row for row in found] == [row.row for row in plan.rows]
