"""`recomputed_tokens` is what the workers computed twice, whatever the reason."""

from __future__ import annotations

import dataclasses

import pytest

from lightserve import sim
from lightserve.sim.hybrid import HybridRun
from lightserve.sim.traffic import DrawnTraffic
from lightserve.sim.worker import A100_LLAMA2_7B, VirtualHardware
from lightserve.types import RequestClass

TIGHT = sim.HybridConfig(
    rt="poisson:12",
    rt_lengths="uniform:10-200,5-80",
    rt_max_tokens=100,
    be="closed:30",
    be_lengths="uniform:100-300,20-60",
    duration_s=6.0,
    margin_s=1.0,
    capacity_tokens=2500,
    policy="priority",
)
SLOW_LINK = dataclasses.replace(A100_LLAMA2_7B, per_copied_token_s=2e-3)


@pytest.mark.parametrize(
    ("preemption", "host_kv_tokens", "hardware"),
    [
        pytest.param("recompute", -1, A100_LLAMA2_7B, id="nothing is saved"),
        pytest.param("checkpoint", -1, SLOW_LINK, id="loading is slower"),
        pytest.param("checkpoint", 100, A100_LLAMA2_7B, id="the host is full"),
        pytest.param("swap", 100, A100_LLAMA2_7B, id="the host is full of whole requests"),
    ],
)
def test_computed_twice(preemption: str, host_kv_tokens: int, hardware: VirtualHardware) -> None:
    run = HybridRun(
        dataclasses.replace(
            TIGHT,
            host_kv_tokens=host_kv_tokens,
            hardware=hardware,
            serve_options={"preemption": preemption, "cache_policy": "off"},
        )
    )
    run.advance(TIGHT.duration_s)
    traffic = run.clients[RequestClass.BE].traffic
    assert isinstance(traffic, DrawnTraffic)
    traffic.num_clients = None
    run.advance(1000.0)  # no request is replaced any more
    assert not run.core.running
    needed = sum(
        sum(clients.num_prompt_tokens) + sum(clients.num_output_tokens)
        for clients in run.clients.values()
    )
    num_requests = len(run.simulation.outcomes)
    needed -= num_requests  # the last token is not read
    computed = run.worker.sums.num_tokens
    lost = run.report().kv.recomputed_tokens
    assert lost > 2 * num_requests
    # The step that was sent when a request ended may have computed one token more.
    assert needed + lost <= computed <= needed + lost + num_requests
