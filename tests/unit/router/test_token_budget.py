"""--max-num-batched-tokens: the default is that of the device, which workers tell the router."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.core_scenes import Arrival, make_core, submit

from lightserve.config import ServeConfig
from lightserve.cost.profile import tokens_of_step
from lightserve.decisions.records import event_of, input_of
from lightserve.errors import ConfigError
from lightserve.messages.common import GraphSizes, StepCoefficients
from lightserve.router.config import make_scheduler_config
from lightserve.router.events import FromFrontend, StepTimesKnown, WorkersGone, WorkersReady
from lightserve.router.scheduler import Scheduler
from lightserve.router.step import PlannedStep
from lightserve.types import FrontendId
from lightserve.worker.profiling import limits_of

PROMPT_TOKENS = 40


@pytest.mark.parametrize(
    ("fields", "device_type", "expected"),
    [
        ({}, "cpu", 512),
        ({}, "cuda", 8192),
        ({"max_num_seqs": 700}, "cpu", 700),
        ({"max_num_seqs": 700}, "cuda", 8192),
        ({"max_num_seqs": 9000}, "cuda", 9000),
        ({"max_num_batched_tokens": 300}, "cpu", 300),
        ({"max_num_batched_tokens": 300}, "cuda", 300),
    ],
)
def test_the_default_is_the_devices(
    fields: dict[str, Any], device_type: str, expected: int
) -> None:
    assert ServeConfig(**fields).max_tokens_of_step(device_type) == expected


def test_what_is_given_has_room_for_a_token_of_every_sequence() -> None:
    with pytest.raises(ConfigError, match=r"at least --max-num-seqs \(256\), got 255"):
        ServeConfig(max_num_batched_tokens=255)


def test_a_core_plans_as_on_a_cpu_until_workers_say_otherwise() -> None:
    assert make_scheduler_config(ServeConfig(), max_model_len=64).max_num_batched_tokens == 512


def coefficients(floor_s: float, per_new_s: float, knee: float = 0.0) -> StepCoefficients:
    return StepCoefficients(floor_s, knee, per_new_s, 0.0, 0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("step_cost", "fields", "expected"),
    [
        (None, {}, 512),
        (coefficients(0.050, 0.001), {}, 350),
        (coefficients(0.050, 0.001, knee=10), {}, 280),
        (coefficients(0.050, 0.0005), {}, 512),
        (coefficients(0.050, 0.0), {}, 512),
        (coefficients(0.010, 0.001), {}, 256),
        (coefficients(0.010, 0.001, knee=50), {"max_num_seqs": 32}, 32),
        (coefficients(0.010, 0.001), {"max_num_seqs": 32}, 70),
        (coefficients(0.010, 0.001), {"max_num_batched_tokens": 300}, 300),
    ],
)
def test_on_a_cpu_it_is_what_the_profile_finds_worth_it(
    step_cost: StepCoefficients | None, fields: dict[str, Any], expected: int
) -> None:
    """An eighth of such a step is what a step of few tokens takes, too."""
    config = ServeConfig(**fields)
    assert tokens_of_step(config, "cpu", step_cost) == expected
    assert tokens_of_step(config, "cuda", step_cost) == config.max_tokens_of_step("cuda")


class _Runner:
    """What a profile asks a runner for."""

    context_len, pool = 10_000, SimpleNamespace(num_slots=20_000)
    graph_sizes = GraphSizes(mixed=(64, 512))

    def __init__(self, device_type: str) -> None:
        self.device = torch.device(device_type)


@pytest.mark.parametrize(("device_type", "expected"), [("cpu", 512), ("cuda", 8192)])
def test_steps_are_profiled_up_to_the_budget(device_type: str, expected: int) -> None:
    limits = limits_of(_Runner(device_type), ServeConfig())  # type: ignore[arg-type]
    assert limits.max_tokens == expected
    assert limits.graph_sizes == _Runner.graph_sizes


def first_chunk(core: Scheduler) -> int:
    """Return how much of a prompt that waits is in the next step."""
    step = core.plan(0.0)
    assert isinstance(step, PlannedStep)
    return step.scheduled[0].num_tokens


def waiting_core(policy: str, configured: int) -> Scheduler:
    core = make_core(policy, configured)
    arrival = Arrival(0.0, PROMPT_TOKENS, 2, 2)
    core.on_message(FromFrontend(FrontendId(0), submit(0, arrival)), 0.0)
    return core


@pytest.mark.parametrize("policy", ["chunked", "priority", "round-robin", "unified"])
def test_steps_are_as_large_as_the_workers_of_now_take(policy: str) -> None:
    """Each group says its own: after a restart on another device as well."""
    core = waiting_core(policy, 16)
    for of_workers, expected in ((None, 16), (32, 32), (64, PROMPT_TOKENS), (None, 16)):
        core.on_message(WorkersReady(100, max_num_batched_tokens=of_workers), 0.0)
        assert first_chunk(core) == expected
        core.on_message(WorkersGone(), 0.0)


def test_a_log_has_what_workers_said() -> None:
    ready = WorkersReady(100, 10, overlaps_copies=True, max_num_batched_tokens=8192)
    assert event_of(input_of(ready, 0.0)) == ready


def test_what_workers_measure_after_they_were_ready_counts_from_then_on() -> None:
    core = waiting_core("chunked", 16)
    core.on_message(WorkersReady(100, max_num_batched_tokens=32), 0.0)
    assert first_chunk(core) == 32
    known = StepTimesKnown(StepCoefficients(1.0, *[0.0] * 9), max_num_batched_tokens=8)
    core.on_message(known, 0.0)
    assert first_chunk(core) == 8
    step = core.plan(0.0)
    assert isinstance(step, PlannedStep)
    assert step.predicted_s == pytest.approx(1.0)
    assert event_of(input_of(known, 0.0)) == known
