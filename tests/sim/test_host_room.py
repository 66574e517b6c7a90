"""Best-effort requests start while the host has room for what could be taken from them."""

from __future__ import annotations

import pytest

from lightserve import sim
from lightserve.router.kv.store import KVStore

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
