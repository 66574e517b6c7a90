"""Orderings of the hybrid benchmark in short runs, as `bench.scheduling.hybrid` has.

Hardware a quarter as fast as the virtual A100, so that a few requests a second are a full load.
About 19 real-time requests per second are all that it can serve; 8,000 tokens of KV are short.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest

from lightserve import sim
from lightserve.sim.worker import A100_LLAMA2_7B

SLOW = dataclasses.replace(
    A100_LLAMA2_7B,
    floor_s=4 * A100_LLAMA2_7B.floor_s,
    per_new_token_s=4 * A100_LLAMA2_7B.per_new_token_s,
    constant_s=4 * A100_LLAMA2_7B.constant_s,
    per_decode_context_s=4 * A100_LLAMA2_7B.per_decode_context_s,
    per_chunk_context_s=4 * A100_LLAMA2_7B.per_chunk_context_s,
)
LIGHT, FULL, OVERLOAD = 8.0, 20.0, 26.0
SEEDS = (0, 1)


@functools.cache
def run(policy: str, rate: float, seed: int, *, budget_tokens: int = 512) -> sim.HybridReport:
    return sim.run_hybrid(
        sim.HybridConfig(
            rt=f"poisson:{rate}",
            rt_lengths="uniform:40-160,20-60",
            rt_max_tokens=64,
            be="closed:32",
            be_lengths="uniform:256-512,16-64",
            capacity_tokens=8000,
            duration_s=20.0,
            margin_s=5.0,
            hardware=SLOW,
            policy=policy,
            budget_tokens=budget_tokens,
            seed=seed,
        )
    )


def best_of_priority(rate: float, seed: int) -> float:
    return max(
        run("priority", rate, seed, budget_tokens=budget).rt.goodput_rps for budget in (256, 512)
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_a_light_load_meets_all_targets_and_leaves_most_of_the_time_to_best_effort(
    seed: int,
) -> None:
    unified, priority = run("unified", LIGHT, seed), run("priority", LIGHT, seed)
    assert unified.rt.ttft_attainment == unified.rt.mtpot_attainment == 1.0
    assert unified.be.throughput_rps >= 0.5 * priority.be.throughput_rps > 1.0


@pytest.mark.parametrize("seed", SEEDS)
def test_at_capacity_more_requests_are_good_than_under_priority(seed: int) -> None:
    assert run("unified", FULL, seed).rt.goodput_rps >= 1.05 * best_of_priority(FULL, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_overload_leaves_goodput_where_priority_has_next_to_none(seed: int) -> None:
    goodput = run("unified", OVERLOAD, seed).rt.goodput_rps
    assert goodput >= 3.0 and goodput >= 2.0 * best_of_priority(OVERLOAD, seed)


@pytest.mark.parametrize("rate", [FULL, OVERLOAD])
@pytest.mark.parametrize("seed", SEEDS)
def test_real_time_requests_keep_their_kv_while_best_effort_ones_have_any(
    rate: float, seed: int
) -> None:
    for policy in ("unified", "priority"):
        report = run(policy, rate, seed)
        assert report.be.evictions > 0, "memory is short"
        assert report.kv.rt_evictions_beside_be == 0
