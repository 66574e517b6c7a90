"""Copies of KV to the host and back: nothing is altered, nothing else is touched."""

from __future__ import annotations

import pytest
import torch

from lightserve.config import ServeConfig
from lightserve.errors import ConfigError, ProtocolError
from lightserve.messages.common import pack_int32
from lightserve.messages.router_worker import KVCopies, StepPlan
from lightserve.models.base import KVGroup, KVLayout
from lightserve.sim.worker import PlanError, SimulatedWorker
from lightserve.types import StepId
from lightserve.worker.host_pool import MIN_TOKENS_BY_LAYER, DirectHostPool
from lightserve.worker.memory import KVPool, num_host_slots

NUM_SLOTS, NUM_HOST_SLOTS = 40, 16


def make_pools(dtype: str) -> tuple[KVPool, DirectHostPool]:
    layout = KVLayout((KVGroup(num_layers=3, num_kv_heads=2, head_dim=4, dtype=dtype),))
    pool = KVPool(layout, NUM_SLOTS, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    for tensor in pool.tensors:
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return pool, DirectHostPool(NUM_HOST_SLOTS, pool)


def copies(slots: list[int], host_slots: list[int]) -> KVCopies:
    return KVCopies(pack_int32(slots), pack_int32(host_slots))


def kv_at(pool: KVPool, slots: list[int]) -> torch.Tensor:
    """All layers' keys and values at these slots, as attention reads them."""
    return torch.stack([layer[slots] for layer in (*pool.k, *pool.v)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_kv_survives_overwriting_and_moving(dtype: str) -> None:
    pool, host = make_pools(dtype)
    slots, elsewhere = [7, 3, 39, 0], [11, 12, 4, 30]
    before = kv_at(pool, slots)
    untouched = [i for i in range(NUM_SLOTS) if i not in {*slots, *elsewhere}]
    others = kv_at(pool, untouched)
    host.save(copies(slots, [5, 0, 15, 2]))
    for layer in (*pool.k, *pool.v):
        layer[slots] = float("nan")
    host.load(copies(elsewhere, [5, 0, 15, 2]))
    assert torch.equal(kv_at(pool, elsewhere), before)
    assert torch.equal(kv_at(pool, untouched), others)


def test_copies_show_what_was_saved() -> None:
    """Teeth: another token of the host pool is another KV."""
    pool, host = make_pools("float32")
    before = kv_at(pool, [1, 2])
    host.save(copies([1, 2], [0, 1]))
    host.load(copies([1, 2], [1, 0]))
    assert torch.equal(kv_at(pool, [2, 1]), before)
    assert not torch.equal(kv_at(pool, [1, 2]), before)


def test_a_later_save_replaces_an_earlier_one() -> None:
    pool, host = make_pools("float32")
    host.save(copies([1], [3]))
    host.save(copies([2], [3]))
    second = kv_at(pool, [2])
    host.load(copies([9], [3]))
    assert torch.equal(kv_at(pool, [9]), second)


SCENES = {
    "slot too large": {"saves": ([NUM_SLOTS], [0])},
    "slot too small": {"saves": ([-1], [0])},
    "host slot too large": {"loads": ([0], [NUM_HOST_SLOTS])},
    "host slot too small": {"ahead_saves": ([0], [-1])},
    "lengths": {"saves": ([0, 1], [0])},
    "slot twice": {"loads": ([3, 3], [0, 1])},
    "host slot twice": {"saves": ([3, 4], [1, 1])},
    "saved and loaded": {"saves": ([3], [1]), "loads": ([4], [1])},
    "ahead: host slot too large": {"ahead_loads": ([0], [NUM_HOST_SLOTS])},
    "saved and loaded ahead": {"saves": ([3], [1]), "ahead_loads": ([4], [1])},
    "saved ahead and loaded ahead": {"ahead_saves": ([3], [1]), "ahead_loads": ([4], [1])},
    "loaded twice to a slot": {"loads": ([3], [1]), "ahead_loads": ([3], [2])},
    "slot saved ahead and loaded ahead": {"ahead_saves": ([3], [1]), "ahead_loads": ([3], [2])},
}


def plan_of(scene: dict[str, tuple[list[int], list[int]]]) -> StepPlan:
    lists = {name: copies(*places) for name, places in scene.items()}
    return StepPlan(step_id=StepId(0), sequences=[], slot_ranges=[], rows=[], **lists)


@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)
def test_wrong_plans_are_refused(scene: dict[str, tuple[list[int], list[int]]]) -> None:
    """By the pool, which looks at all of a plan first, and by the simulated worker."""
    _, host = make_pools("float32")
    with pytest.raises(ProtocolError, match=r"cop|saved"):
        host.check(plan_of(scene))
    worker = SimulatedWorker(
        num_slots=NUM_SLOTS, max_num_seqs=1, max_model_len=8, num_host_slots=NUM_HOST_SLOTS
    )
    worker._kv[:] = worker._host[:] = 1
    with pytest.raises(PlanError):
        worker.execute(plan_of(scene), exec_s=0.0, idle_s=0.0)


@pytest.mark.parametrize("scene", [{"saves": ([3], [1])}, {"loads": ([3], [1])}])
def test_nothing_that_was_never_written_is_copied(
    scene: dict[str, tuple[list[int], list[int]]],
) -> None:
    worker = SimulatedWorker(num_slots=9, max_num_seqs=1, max_model_len=8, num_host_slots=9)
    with pytest.raises(PlanError, match="never written"):
        worker.execute(plan_of(scene), exec_s=0.0, idle_s=0.0)


@pytest.mark.parametrize("count", [MIN_TOKENS_BY_LAYER - 1, MIN_TOKENS_BY_LAYER, 200])
def test_many_tokens_are_copied_as_few_are(count: int) -> None:
    layout = KVLayout((KVGroup(num_layers=3, num_kv_heads=2, head_dim=4, dtype="bfloat16"),))
    pool = KVPool(layout, 400, torch.device("cpu"))
    for tensor in pool.tensors:
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(3)))
    host = DirectHostPool(300, pool)
    order = torch.randperm(400, generator=torch.Generator().manual_seed(4)).tolist()
    slots, elsewhere = order[:count], order[count : 2 * count]
    host_slots = list(range(300))[::-1][:count]
    before = kv_at(pool, slots)
    host.save(copies(slots, host_slots))
    for layer in (*pool.k, *pool.v):
        layer[slots] = float("nan")
    host.load(copies(elsewhere, host_slots))
    assert torch.equal(kv_at(pool, elsewhere), before)


def test_no_copies_need_no_host_pool() -> None:
    layout = KVLayout((KVGroup(num_layers=1, num_kv_heads=1, head_dim=4, dtype="float32"),))
    host = DirectHostPool(0, KVPool(layout, 4, torch.device("cpu")))
    host.save(KVCopies())
    host.load(KVCopies())


@pytest.mark.parametrize(
    ("text", "num_slots", "free", "expected"),
    [
        ("auto", 100, 1_000_000, 50),  # half of the KV pool
        ("auto", 100, 12_480, 15),  # half of the 30 tokens that it leaves
        ("auto", 100, 9_600, 0),
        ("0", 100, 1_000_000, 0),
        ("9600B", 10, 1_000_000, 100),
    ],
)
def test_sizes(text: str, num_slots: int, free: int, expected: int) -> None:
    layout = KVLayout((KVGroup(num_layers=1, num_kv_heads=1, head_dim=12, dtype="float32"),))
    assert layout.bytes_per_token == 96
    config = ServeConfig(host_kv_memory=text)
    assert num_host_slots(config, layout, num_slots=num_slots, free_bytes=free) == expected


def test_more_than_is_free_is_refused() -> None:
    layout = KVLayout((KVGroup(num_layers=1, num_kv_heads=1, head_dim=12, dtype="float32"),))
    with pytest.raises(ConfigError, match="--host-kv-memory 1GiB for 1 rank"):
        num_host_slots(
            ServeConfig(host_kv_memory="1GiB"), layout, num_slots=10, free_bytes=1_000_000
        )
