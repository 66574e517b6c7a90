"""Pools of a GPU, made without one: on fake tensors, or on the CPU in the guise of a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support.immediate_copies import TorchCopies, immediate_copy_queues
from support.recorded_plans import make_runner
from support.tiny_models import TINY_MODELS, write_tiny_model
from torch._subclasses import FakeTensorMode

from lightserve.config import ServeConfig
from lightserve.errors import StartupError
from lightserve.messages.common import GraphSizes, pack_int32
from lightserve.messages.router_worker import KVCopies, StepPlan
from lightserve.models.base import KVGroup, KVLayout, SingleRank
from lightserve.types import StepId
from lightserve.worker import build, capture, staged_host_pool
from lightserve.worker.build import build_runner
from lightserve.worker.device import make_queue
from lightserve.worker.host_pool import DirectHostPool
from lightserve.worker.memory import DeviceMemory, KVPool
from lightserve.worker.model_runner import ModelRunner
from lightserve.worker.staged_host_pool import StagedHostPool, make_host_pool

GIB = 2**30
LAYOUT = KVLayout(
    (
        KVGroup(num_layers=3, num_kv_heads=2, head_dim=8, dtype="bfloat16"),
        KVGroup(num_layers=1, num_kv_heads=1, head_dim=5, dtype="float32"),
    )
)
MEMORY = DeviceMemory(total=140 * GIB, others=GIB, weights=15 * GIB, activations=2 * GIB)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_what_a_pool_forgets_is_no_longer_resident() -> None:
    layout = KVLayout((KVGroup(num_layers=2, num_kv_heads=2, head_dim=64, dtype="bfloat16"),))
    pool = KVPool(layout, 64 * 2**20 // layout.bytes_per_token, torch.device("cpu"))
    pool.tensors[0].fill_(1.0)
    before = resident_bytes()
    pool.forget()
    assert before - resident_bytes() > 60 * 2**20
    assert not pool.k[1][1000:2000].any(), "it is empty, and can be written again"
    pool.k[1][1000:2000] = 2.0
    assert bool((pool.k[1][1000:2000] == 2.0).all())


def test_touching_writes_into_every_slot_of_all_layers_and_no_other() -> None:
    pool = KVPool(LAYOUT, 9, torch.device("cpu"))
    for tensor in pool.tensors:
        tensor.fill_(1.0)
    pool.touch(3, 5)
    for part in (*pool.k, *pool.v):
        is_touched = (part != 1.0).any(dim=2)
        assert is_touched[3:5].all() and not is_touched[:3].any() and not is_touched[5:].any()


FREED_TWICE = """
import resource
import torch
from lightserve.worker.memory import keep_freed_memory

def new_pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(48 * 2**20, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed_memory()
print(*(new_pages() for _ in range(16)))
"""


def test_memory_of_a_step_serves_later_ones() -> None:
    run = subprocess.run([sys.executable, "-c", FREED_TWICE], capture_output=True, check=True)
    first, *_, last = map(int, run.stdout.split())
    assert last * 10 < first, "its pages are not emptied anew"


STARTED = """
import sys
from lightserve.bundled import BUNDLED_MODEL_DIR
from lightserve.config import ServeConfig
from lightserve.worker.build import build_runner

runner = build_runner(ServeConfig(model=str(BUNDLED_MODEL_DIR), device="cpu"))
inside, kib = False, 0
address = runner.pool.tensors[0].data_ptr()
for line in open("/proc/self/smaps"):
    first = line.split()[0]
    if not first.endswith(":"):
        start, end = (int(number, 16) for number in first.split("-"))
        inside = start <= address < end
    elif inside and first == "Anonymous:":
        kib = int(line.split()[1])
print(kib, *(sys.modules.keys() & {"torch._dynamo", "triton", "sympy", "transformers"}))
"""


def test_a_started_worker_has_neither_an_empty_pool_s_pages_nor_torch_s_compiler() -> None:
    # Where huge pages may be, as the supervisor has it, a head's first token would be 2 MiB.
    run = subprocess.run(
        [sys.executable, "-c", STARTED],
        capture_output=True,
        check=True,
        env={**os.environ, "THP_MEM_ALLOC_ENABLE": "1"},
    )
    kib, *heavy = run.stdout.split()
    assert int(kib) < 1024
    assert not heavy


def test_a_pool_of_what_was_measured() -> None:
    tried = []

    def measure(pool: KVPool) -> DeviceMemory:
        tried.append(pool)
        return MEMORY

    with FakeTensorMode():
        made = build.make_pools(
            ServeConfig(preemption="recompute", prefix_host_memory="0"),
            LAYOUT,
            torch.device("cuda"),
            is_shown=False,
            measure=measure,
            kept_bytes=GIB,  # which were there when the weights were measured
        )
    left = 126 * GIB - MEMORY.taken
    assert made.kv.num_slots == left // LAYOUT.bytes_per_token - 1
    assert sum(tensor.nbytes for tensor in made.kv.tensors) <= left
    assert {tensor.device.type for tensor in (*made.kv.k, *made.kv.v)} == {"cuda"}
    assert made.host.num_slots == 0
    [trial] = tried
    assert trial.num_slots == 16 and trial.device.type == "cuda"


class Statistics:
    """A GPU of 100 GiB on which 7 bytes are taken."""

    def __init__(self, device: torch.device) -> None:
        self.num_ends = 0

    def begin(self) -> int:
        return 5

    def peak(self) -> int:
        return 6

    def others(self) -> int:
        return 1

    def total(self) -> int:
        return 100 * GIB

    def end(self) -> None:
        self.num_ends += 1


def test_steps_are_run_once_when_the_graphs_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture empties torch's caches of memory on the device and of locked memory."""
    write_tiny_model(TINY_MODELS[0], tmp_path)
    order: list[str] = []
    for name in ("capture_graphs", "warm_up"):
        monkeypatch.setattr(
            build, name, lambda *_, name=name, **__: order.append(name), raising=True
        )
    build_runner(ServeConfig(model=str(tmp_path), max_num_seqs=3, max_num_batched_tokens=40))
    assert order == ["capture_graphs", "warm_up"]


def test_measuring_runs_the_largest_steps_and_tries_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_model(TINY_MODELS[0], tmp_path)
    config = ServeConfig(model=str(tmp_path), max_num_seqs=3, max_num_batched_tokens=40)
    model, executed = build_runner(config)._model, list[StepPlan]()
    pool = KVPool(LAYOUT, 16, torch.device("cpu"))
    monkeypatch.setattr(build, "CudaStatistics", Statistics)
    monkeypatch.setattr(build, "estimated_graph_bytes", lambda _, sizes: 1000 * len(sizes))
    monkeypatch.setattr(capture, "CudaGraphRecorder", lambda device, recording: None)
    monkeypatch.setattr(ModelRunner, "execute", lambda _, plan: executed.append(plan), raising=True)

    def make_runner(pool: KVPool) -> ModelRunner:
        queue, host_pool = make_queue(pool.device), DirectHostPool(0, pool)
        return ModelRunner(
            model, pool, SingleRank(), host_pool=host_pool, queue=queue, max_num_seqs=3
        )

    both = GraphSizes((1, 2, 4), (16, 32))
    for sizes, graphs in ((GraphSizes(), 0), (GraphSizes((1, 2, 4)), 3000), (both, 5000)):
        executed.clear()
        memory = build.measure_gpu(
            config, model, pool, make_runner, graph_sizes=sizes, tp=SingleRank()
        )
        assert memory == DeviceMemory(
            total=100 * GIB, others=1, weights=5, activations=1, graphs=graphs
        )
        assert [len(plan.rows) for plan in executed] == [3, 3, 3, 1]
        assert sum(row.num_tokens for row in executed[0].rows) == 40


@pytest.mark.parametrize("is_recorded", [True, False])
def test_measuring_tries_graphs_of_states_that_wait_for_drafts(
    is_recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Last, as nothing is recorded behind what cannot be."""
    runner, tried = make_runner(kind="delta"), list[Sequence[int]]()

    def estimated(_: object, sizes: Sequence[int]) -> int:
        tried.append(sizes)
        if len(tried) == 3 and not is_recorded:
            raise StartupError("it waits for the device")
        return sum(sizes)

    monkeypatch.setattr(build, "CudaStatistics", Statistics)
    monkeypatch.setattr(build, "estimated_graph_bytes", estimated)
    monkeypatch.setattr(capture, "CudaGraphRecorder", lambda device, recording: None)
    monkeypatch.setattr(ModelRunner, "execute", lambda *_: None, raising=True)
    memory = build.measure_gpu(
        ServeConfig(max_num_seqs=3),
        runner._model,
        runner.pool,
        lambda _: runner,
        graph_sizes=GraphSizes((1, 2), (16, 24)),
        tp=SingleRank(),
    )
    assert tried == [(16, 24), (1, 2), (16, 32, 40)], "of as many inputs as there is room for"
    assert memory.graphs == (1 + 2) + (16 + 24) + (16 + 32 + 40) * is_recorded


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> KVPool:
    """Return a pool on the CPU that says it is on a GPU, and let copies run at once."""
    pool = KVPool(LAYOUT, 30, torch.device("cpu"))
    pool.device = torch.device("cuda")
    monkeypatch.setattr(
        staged_host_pool,
        "pinned_bytes",
        lambda size, **_: torch.full((size,), 77, dtype=torch.uint8),
    )
    monkeypatch.setattr(staged_host_pool, "cuda_copy_streams", lambda _: immediate_copy_queues())
    monkeypatch.setattr("lightserve.kernels.triton.copies.TritonCopies", TorchCopies)
    return pool


def test_groups_share_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = as_on_a_gpu(monkeypatch)
    host_pool = make_host_pool(11, pool, num_staged=4)
    assert isinstance(host_pool, StagedHostPool) and host_pool.num_slots == 11
    for tensor in pool.tensors:
        tensor.copy_(torch.randn(tensor.shape))
    before = [tensor.clone() for tensor in pool.tensors]
    slots, host_slots = [3, 29, 0, 7, 8, 12, 1], [9, 0, 1, 2, 10, 4, 3]
    copies = KVCopies(pack_int32(slots), pack_int32(host_slots))
    empty = StepPlan(step_id=StepId(0), sequences=[], slot_ranges=[], rows=[], saves=copies)
    host_pool.check(empty)
    host_pool.begin(empty)
    for tensor in pool.tensors:
        tensor.fill_(torch.nan)
    loads = StepPlan(step_id=StepId(1), sequences=[], slot_ranges=[], rows=[], loads=copies)
    assert host_pool.begin(loads).seconds() == 0.0
    for tensor, old in zip(pool.tensors, before, strict=True):
        assert torch.equal(tensor[:, :, :, slots], old[:, :, :, slots])
        assert int(tensor.isnan().all(dim=4).sum()) == tensor[..., 0].numel() * (31 - 7) // 31


def test_without_room_on_the_host_nothing_is_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(staged_host_pool, "pinned_bytes", None)
    assert isinstance(make_host_pool(0, pool, num_staged=0), DirectHostPool)


class NoCompiler(TorchCopies):
    def gather(self, pool: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
        raise RuntimeError("Failed to find C compiler.")


def test_where_triton_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = as_on_a_gpu(monkeypatch)
    monkeypatch.setattr("lightserve.kernels.triton.copies.TritonCopies", NoCompiler)
    with pytest.raises(StartupError, match=r"Triton cannot compile .*: Failed to find C compiler"):
        make_host_pool(11, pool, num_staged=4)


class Cudart:
    """Locks memory, or does not, and remembers what is locked."""

    def __init__(self, error: int) -> None:
        self.error = error
        self.locked: dict[int, int] = {}
        self.was_mapped: list[bool] = []
        """Of what was unlocked, whether it was still there."""

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        assert flags == 3
        self.locked[address] = num_bytes
        return self.error

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
        del self.locked[address]
        self.was_mapped.append(is_mapped(address))


def is_mapped(address: int) -> bool:
    """Return whether this process has memory there."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    bounds = [line.partition(" ")[0].split("-") for line in lines]
    return any(int(start, 16) <= address < int(end, 16) for start, end in bounds)


def test_locked_memory_is_unlocked_with_its_last_user(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = Cudart(error=0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    memory = staged_host_pool.pinned_bytes(100_000, label="locking")
    part = memory[10:20].view(2, 5)
    assert cudart.locked == {memory.data_ptr(): 100_000} and memory.data_ptr() % 4096 == 0
    del memory
    part.fill_(3)
    assert cudart.locked
    del part
    assert not cudart.locked and cudart.was_mapped == [True]


def test_memory_that_cannot_be_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Cudart(error=2))
    with pytest.raises(StartupError, match=r"cannot page-lock 0\.0 GiB .*CUDA error 2"):
        staged_host_pool.pinned_bytes(100, label="locking")
    with pytest.raises(StartupError, match=r"no 1048576\.0 GiB of host memory"):
        staged_host_pool.pinned_bytes(2**50, label="locking")
