"""Options of the KV memory: what would have no effect is refused, and says why."""

from __future__ import annotations

from typing import Any

import pytest

from lightserve.config import ServeConfig
from lightserve.errors import ConfigError
from lightserve.models.base import KVGroup, KVLayout
from lightserve.worker.memory import num_host_slots

EXCLUSIVE = {"block_owner": "exclusive", "preemption": "swap", "cache_policy": "off"}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"block_size": 6}, "--block-size must be 1, 2, 4, 8 or 16"),
        (EXCLUSIVE | {"preemption": "checkpoint"}, "--block-owner exclusive needs --preemption"),
        (EXCLUSIVE | {"cache_policy": "lru"}, "--block-owner exclusive needs --cache-policy off"),
        ({"preemption": "swap", "clean_ahead_tokens": 9}, "--clean-ahead-tokens needs"),
        ({"preemption": "recompute", "clean_ahead_tokens": 9}, "--clean-ahead-tokens needs"),
        ({"preemption": "recompute", "host_kv_memory": "1MiB"}, "--host-kv-memory needs"),
        ({"cache_policy": "off", "rt_cache_min_tokens": 9}, "--rt-cache-min-tokens needs"),
        ({"host_kv_memory": "much"}, "--host-kv-memory"),
    ],
)
def test_what_would_have_no_effect_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        ServeConfig(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        EXCLUSIVE,
        EXCLUSIVE | {"preemption": "recompute"},
        {"preemption": "swap", "host_kv_memory": "1MiB"},
        {"cache_policy": "lru", "rt_cache_min_tokens": 9},
        {"clean_ahead_tokens": 9},
    ],
)
def test_what_has_an_effect_is_taken(fields: dict[str, Any]) -> None:
    config = ServeConfig(**fields)
    assert all(getattr(config, name) == value for name, value in fields.items())


def test_recompute_takes_no_host_memory() -> None:
    layout = KVLayout((KVGroup(num_layers=1, num_kv_heads=1, head_dim=16, dtype="float32"),))
    sizes = [
        num_host_slots(ServeConfig(preemption=way), layout, num_slots=100, free_bytes=10_000_000)
        for way in ("checkpoint", "swap", "recompute")
    ]
    assert sizes == [50, 50, 0]
