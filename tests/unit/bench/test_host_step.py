"""The bench of a worker's host has what a runner asks of a model."""

from __future__ import annotations

import msgspec

from bench.engine.host_step import OPTIONS, decode_plan, first_plan, make_runner
from lightserve.messages.common import unpack_int32
from lightserve.messages.router_worker import StepPlan


def test_a_runner_executes_its_plans() -> None:
    runner = make_runner(2)
    assert runner.graph_sizes.decodes == (1, 2)
    for plan in (
        first_plan(2, OPTIONS["greedy"]),
        msgspec.msgpack.decode(decode_plan(2, 0), type=StepPlan),
    ):
        assert unpack_int32(runner.execute(plan).token_ids).tolist() == [0, 0]
