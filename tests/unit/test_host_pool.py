"""Copies of KV to the host and back: nothing is altered, nothing else is touched."""

from __future__ import annotations

import pytest
import torch

from lightserve.config import ServeConfig
from lightserve.errors import ConfigError, ProtocolError
from lightserve.messages.common import pack_int32
from lightserve.messages.router_worker import KVCopies
from lightserve.models.kv_layout import KVGroup, KVLayout
from lightserve.worker.host_pool import HostPool
from lightserve.worker.kv_pool import KVPool
from lightserve.worker.memory import num_host_slots

NUM_SLOTS, NUM_HOST_SLOTS = 40, 16


def make_pools(dtype: str) -> tuple[KVPool, HostPool]:
    layout = KVLayout((KVGroup(num_layers=3, num_kv_heads=2, head_dim=4, dtype=dtype),))
    pool = KVPool(layout, NUM_SLOTS, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    for tensor in pool.tensors:
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return pool, HostPool(layout, NUM_HOST_SLOTS, pool)


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


@pytest.mark.parametrize(
    ("slots", "host_slots"),
    [([NUM_SLOTS], [0]), ([-1], [0]), ([0], [NUM_HOST_SLOTS]), ([0], [-1]), ([0, 1], [0])],
)
def test_places_outside_are_refused_before_anything_moves(
    slots: list[int], host_slots: list[int]
) -> None:
    pool, host = make_pools("float32")
    before = kv_at(pool, list(range(NUM_SLOTS)))
    for copy in (host.save, host.load):
        with pytest.raises(ProtocolError, match="cop"):
            copy(copies(slots, host_slots))
    assert torch.equal(kv_at(pool, list(range(NUM_SLOTS))), before)


def test_no_copies_need_no_host_pool() -> None:
    layout = KVLayout((KVGroup(num_layers=1, num_kv_heads=1, head_dim=4, dtype="float32"),))
    host = HostPool(layout, 0, KVPool(layout, 4, torch.device("cpu")))
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
