"""Best-effort requests start while the host has room for what could be taken from them."""

from __future__ import annotations

import dataclasses

import pytest

from lightserve import sim
from lightserve.router.kv.cache import KVStore

CONFIG = sim.HybridConfig(
    rt="poisson:14",
    rt_lengths="uniform:10-200,20-100",
    rt_max_tokens=100,
    be="closed:40",
    be_lengths="uniform:200-400,20-60",
    duration_s=12.0,
    margin_s=0.0,
    capacity_tokens=4000,
    host_kv_tokens=1000,
)


def test_little_is_computed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without regard to the host it is full of copies when more is taken, which is lost then."""
    with_regard = sim.run_hybrid(CONFIG)
    monkeypatch.setattr(KVStore, "saves", False)
    without = sim.run_hybrid(CONFIG)
    assert without.kv.recomputed_tokens > 200
    assert with_regard.kv.recomputed_tokens < 0.2 * without.kv.recomputed_tokens


def test_best_effort_work_does_not_wait_until_real_time_memory_was_seen() -> None:
    """Two small real-time requests per second leave nearly all of the pool to be taken from none.

    Counted as the whole pool until they had been seen for two windows, they left best-effort
    requests half of their work for half a minute.
    """
    light = dataclasses.replace(
        CONFIG, rt="poisson:2", rt_lengths="uniform:10-100,5-30", duration_s=5.0
    )
    ample, small = (
        sim.run_hybrid(dataclasses.replace(light, host_kv_tokens=num_slots)).be.throughput_tps
        for num_slots in (2 * CONFIG.capacity_tokens, 1000)
    )
    assert small >= 0.8 * ample
