"""How large a KV pool on a GPU is: arithmetic, what is measured for it, and refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.tiny_models import TINY_MODELS, write_tiny_model

from lightserve.config import ServeConfig
from lightserve.errors import ConfigError, StartupError
from lightserve.kernels.cpu import core
from lightserve.kernels.interface import FEW_TOKENS, MAX_FEW_TOKENS, WORD_BYTES
from lightserve.messages.common import DeviceFacts, unpack_int32
from lightserve.messages.router_worker import (
    OutputKind,
    row_results,
)
from lightserve.metrics.catalogue import DEVICE_INFO
from lightserve.metrics.recording import Recorder
from lightserve.models.base import KVGroup, KVLayout
from lightserve.router.metrics import RouterMetrics
from lightserve.worker import device as device_facts
from lightserve.worker import profiling
from lightserve.worker.build import build_runner
from lightserve.worker.device import facts_of
from lightserve.worker.memory import (
    AUTO_LOCKED_BYTES,
    DeviceMemory,
    host_sizes,
    measure_step,
    num_device_slots,
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
        ({}, replace(H200, kept=6 * GIB), (126 - 26) * 8192 - 1),
    ],
)
def test_size(options: dict[str, Any], memory: DeviceMemory, num_slots: int) -> None:
    config = ServeConfig(**options)
    found = num_device_slots(config, LAYOUT, memory)
    assert found == num_slots
    # With the slot of no request, it fits in.
    assert memory.taken + (found + 1) * LAYOUT.bytes_per_token <= memory.total


@pytest.mark.parametrize(("head_dim", "found"), [(64, (999, 1001)), (124, (1000, 1001))])
def test_layers_of_8_bits_begin_where_kernels_read_16_bytes_at_once(
    head_dim: int, found: tuple[int, int]
) -> None:
    """A head of 64 numbers has 72 bytes with its factor: an odd number of slots and the scratch."""
    own = KVGroup(num_layers=3, num_kv_heads=1, head_dim=head_dim, dtype="int8", word=WORD_BYTES)
    for most, num_slots in zip((1000, 1001), found, strict=True):
        config = ServeConfig(max_kv_tokens=most)
        assert num_device_slots(config, KVLayout((own,)), H200) == num_slots
        assert (num_slots + 1) * own.head_size % 16 == 0


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
        (
            {"gpu_memory_utilization": 0.3},
            replace(H200, kept=22 * GIB),
            r"inputs of guesses 22\.00 GiB.* leave 0\.00 GiB .* Lower --max-draft-tokens, --max-nu",
        ),
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
    found = host_sizes(
        ServeConfig(**options), LAYOUT, num_slots=10**6, free_bytes=free, is_beside_gpu=True
    )
    assert found.num_slots == expected // LAYOUT.bytes_per_token
    locked = (found.num_slots + found.num_prefix_slots) * LAYOUT.bytes_per_token
    assert locked <= max(AUTO_LOCKED_BYTES, expected), "one limit for requests and prefixes"


def test_more_than_the_host_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="more than the 20480 MiB that are free for each"):
        host_sizes(
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
        ({"preemption": "recompute"}, 140 * GIB, 8192),  # for prefixes
        ({"preemption": "recompute", "prefix_host_memory": "0"}, 140 * GIB, 0),
        ({"preemption": "recompute", "cache_policy": "off"}, 140 * GIB, 0),
        ({"host_kv_memory": "0", "prefix_host_memory": "0"}, 140 * GIB, 0),
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
    prefills, decodes, few, chunk = plans
    num_rows, longest = min(max_seqs, max_tokens), min(context_len - 1, num_kv_tokens)
    for plan in plans:
        rows = [row.row for row in plan.rows]
        if plan is not few:
            assert len(rows) == (1 if plan is chunk else num_rows)
        assert len(set(rows)) == len(rows)
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
    [new] = {row.num_tokens for row in few.rows}
    assert new == min(FEW_TOKENS, contexts[0], max_tokens)
    assert {row.start_position + new for row in few.rows} == set(contexts)
    most = min(MAX_FEW_TOKENS, max_tokens, num_rows * new)
    assert most - new < new * len(few.rows) <= most
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


# Options of the KV memory: what would have no effect is refused, and says why.

EXCLUSIVE = {"block_owner": "exclusive", "preemption": "recompute", "cache_policy": "off"}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"block_size": 6}, "--block-size must be 1, 2, 4, 8 or 16"),
        (
            EXCLUSIVE | {"preemption": "checkpoint"},
            "--block-owner needs --preemption recompute",
        ),
        (EXCLUSIVE | {"cache_policy": "lru"}, "--block-owner needs --cache-policy off"),
        ({"preemption": "recompute", "host_kv_memory": "1MiB"}, "--host-kv-memory needs"),
        ({"cache_policy": "off", "rt_cache_min_tokens": 9}, "--rt-cache-min-tokens needs"),
        ({"host_kv_memory": "much"}, "--host-kv-memory"),
        ({"prefix_host_memory": "much"}, "--prefix-host-memory"),
        ({"cache_policy": "off", "prefix_host_memory": "1MiB"}, "--prefix-host-memory needs"),
    ],
)
def test_what_would_have_no_effect_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        ServeConfig(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        EXCLUSIVE,
        {"preemption": "checkpoint", "host_kv_memory": "1MiB"},
        {"cache_policy": "lru", "rt_cache_min_tokens": 9},
        {"prefix_host_memory": "1MiB"},
    ],
)
def test_what_has_an_effect_is_taken(fields: dict[str, Any]) -> None:
    config = ServeConfig(**fields)
    assert all(getattr(config, name) == value for name, value in fields.items())


def test_recompute_takes_no_host_memory() -> None:
    layout = KVLayout((KVGroup(num_layers=1, num_kv_heads=1, head_dim=16, dtype="float32"),))
    sizes = [
        host_sizes(
            ServeConfig(preemption=way), layout, num_slots=100, free_bytes=10_000_000
        ).num_slots
        for way in ("checkpoint", "recompute")
    ]
    assert sizes == [50, 0]


# What is said of the workers' device: in the profile's key, in /version and in the metrics.

CUDA = torch.device("cuda", 0)
DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n"
H200_FACTS = DeviceFacts(
    kind="cuda",
    name="NVIDIA H200",
    memory_bytes=150 * 10**9,
    driver="580.159.04",
    cuda="13.0",
    torch=str(torch.__version__),
    triton="3.6.0",
    kernels="triton",
)


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=150 * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(device_facts.importlib.metadata, "version", lambda name: "3.6.0")
    monkeypatch.setattr(device_facts, "DRIVER_INFO", tmp_path / "version")
    (tmp_path / "version").write_text(DRIVER)
    return tmp_path / "version"


@pytest.mark.parametrize(
    ("line", "version"),
    [
        (DRIVER, "580.159.04"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\n", "535.104.05"),
        ("no such line", "unknown"),
        (None, "unknown"),
    ],
)
def test_a_gpu(gpu: Path, line: str | None, version: str) -> None:
    if line is None:
        gpu.unlink()
    else:
        gpu.write_text(line)
    facts = facts_of(ServeConfig(), CUDA)
    assert facts == DeviceFacts(**{**_fields(H200_FACTS), "driver": version})
    expected = f"NVIDIA H200 (driver {version}, CUDA 13.0, torch {torch.__version__}, Triton 3.6.0)"
    assert facts.summary == expected


def _fields(facts: DeviceFacts) -> dict[str, object]:
    return {name: getattr(facts, name) for name in facts.__struct_fields__}


@pytest.mark.parametrize(
    ("config", "kernels"),
    [
        (ServeConfig(), "native" if core.LIBRARY.exists() else "torch"),
        (ServeConfig(attention_backend="torch"), "torch"),
        (ServeConfig(attention_backend="reference"), "reference"),
        (
            ServeConfig(batch_invariant=True),
            f"{'native' if core.LIBRARY.exists() else 'torch'}-batch-invariant",
        ),
    ],
)
def test_a_cpu(config: ServeConfig, kernels: str) -> None:
    facts = facts_of(config, torch.device("cpu"))
    assert (facts.kind, facts.kernels, facts.memory_bytes) == ("cpu", kernels, 0)
    assert facts.summary == facts.name != ""


def test_a_profile_belongs_to_the_gpu_and_its_software(
    gpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ServeConfig()
    on_cpu = profiling.profile_key(config)
    monkeypatch.setattr(profiling, "resolve_device", lambda name, rank: CUDA)
    on_gpu = profiling.profile_key(config)
    assert (on_gpu.device, on_gpu.kernels) == (H200_FACTS.summary, "triton")
    gpu.write_text(DRIVER.replace("580", "590"))
    assert len({on_cpu.digest, on_gpu.digest, profiling.profile_key(config).digest}) == 3


def test_a_profile_belongs_to_how_weights_and_kv_are_kept() -> None:
    plain = profiling.profile_key(ServeConfig())
    rounded = profiling.profile_key(ServeConfig(quantization="int8"))
    both = profiling.profile_key(ServeConfig(quantization="int4", kv_dtype="int8"))
    assert rounded.kernels == f"{plain.kernels}, int8 weights"
    assert both.kernels == f"{plain.kernels}, int4 weights, int8 KV"
    guessing = profiling.profile_key(ServeConfig(speculation="mtp"))
    assert guessing.kernels == f"{plain.kernels}, mtp"
    assert len({plain.digest, rounded.digest, both.digest, guessing.digest}) == 4


def test_the_metric() -> None:
    recorder = Recorder()
    RouterMetrics(recorder).on_device(H200_FACTS)
    (sample,) = [s for s in recorder.snapshot() if s.family == DEVICE_INFO.name]
    assert dict(zip(DEVICE_INFO.labels, sample.labels, strict=True)) == {
        "device": "cuda",
        "device_name": "NVIDIA H200",
        "driver": "580.159.04",
        "cuda": "13.0",
        "triton": "3.6.0",
        "kernels": "triton",
    }


# What a GPU would be told to do, without one; see `support.device_steps`.

TESTS = Path(__file__).parents[2]
KERNELS = {
    "_decode_kernel",
    "_prefill_kernel",
    "_norm_kernel",
    "_move_kernel",
    "_rows_kernel",
    "adjust_kernel",
    "draw_kernel",
    "draw_top_kernel",
    "logprobs_kernel",
}
"""Some of every part of a step."""


@pytest.fixture(scope="module")
def found() -> Any:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": f"{TESTS.parent}:{TESTS}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "support.device_steps"],
        capture_output=True,
        env=environment,
        timeout=600,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_steps_are_on_the_device_and_wait_for_nothing(found: Any) -> None:
    """Real plans with every option, copies and constraints; a fault of either kind is seen."""
    steps = found["fake"]
    assert steps["num_plans"] > 80
    assert set(steps["kernels"]) >= KERNELS
    assert steps["waited"] == "in finish"
    assert steps["launch_s"] > 0.0  # the router is told
    # What torch calls it in one version and in another.
    mixed = {"FakeTensorDeviceMismatchError", "RuntimeError", "WaitedError"}
    assert steps["faults"].pop("a tensor on the host") in mixed
    assert steps["faults"] == {
        "a value is read": "DataDependentOutputException",
        "a size is read": "DynamicOutputShapeException",
        "rows by a list": "WaitedError",
        "a kernel's argument on the host": "RuntimeError",
    }


def test_nothing_is_compiled_after_the_start(found: Any) -> None:
    assert found["variants"]["late"] == {"small": [], "large": []}
    assert found["variants"]["num_late_if_cold"] > 10


@pytest.mark.parametrize("graphs", ["mixed False", "mixed True"])
def test_states_of_rows_with_drafts_wait_for_nothing(found: Any, graphs: str) -> None:
    """They move on behind the draws, by kernels that the start has compiled."""
    steps = found["states"][graphs]["fake"]
    assert steps["num_plans"] > 20 and steps["waited"] == "in finish"
    assert set(steps["kernels"]) >= {"_keep_kernel", "_pairs_kernel", "_scan_kernel"}
    assert found["states"][graphs]["late"] == []
