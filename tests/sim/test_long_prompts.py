"""Long prompts one after the other (AccelGen): scenes, and against chunks in turn."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
from support.policy_scenes import (
    RT,
    Admitting,
    Queue,
    filled,
    make_limits,
    make_request,
    running_of,
)

from lightserve.config import ServeConfig
from lightserve.errors import ConfigError
from lightserve.router.config import make_scheduler_config
from lightserve.router.events import FromFrontend, WorkersReady
from lightserve.router.policies.base import Policy, Step
from lightserve.router.policies.step_budget import LOOK_AHEAD
from lightserve.router.policies.unified import UnifiedOptions, UnifiedPolicy
from lightserve.router.request import Request
from lightserve.router.scheduler import Scheduler
from lightserve.router.slo import TokenDeadlines
from lightserve.router.step import Reason, Skips
from lightserve.router.step_cost import StepCost, StepShape
from lightserve.sim.simulation import Simulation, TimedEvent
from lightserve.sim.traffic import Job
from lightserve.sim.virtual_gpus import A100_LLAMA2_7B
from lightserve.sim.worker import LengthWorker, VirtualWorker
from lightserve.types import SLO, FrontendId, RequestId, RequestKey

MS_PER_TOKEN = 0.1
LONG = 10_000


@pytest.fixture(scope="module")
def cost() -> StepCost:
    """Steps take 0.1 ms per token, whatever the context."""
    model = StepCost()
    for _ in range(4):
        for exponent in range(15):
            model.observe(StepShape(num_new=2**exponent), MS_PER_TOKEN / 1e3 * 2**exponent)
    return model


def due(request: Request, residual_ms: float) -> Request:
    request.slo = SLO(ttft_ms=residual_ms, tpot_ms=residual_ms)
    request.deadlines = TokenDeadlines(SLO(ttft_ms=residual_ms), 0.0)
    return request


def play(
    cost: StepCost, requests: list[Request], *, long_tokens: int = 4096
) -> tuple[dict[int, int], Skips]:
    in_rows = running_of([r for r in requests if r.num_computed_tokens])
    limits = make_limits(512, num_free_rows=64, step_number=1, num_slots=10**6, cost=cost)
    waiting = Queue([r for r in requests if not r.num_computed_tokens])
    policy = UnifiedPolicy(UnifiedOptions(long_prompt_tokens=long_tokens))
    step = filled(policy, in_rows, waiting, limits, Admitting())
    return {request.arrival_number: count for request, count in step.budget.parts}, step.skips


def test_a_second_long_prompt_waits_and_short_ones_go_on(cost: StepCost) -> None:
    """Though its deadline is the nearer one: 2 s after those of 1.2 s of work each."""
    first = due(make_request(0, prompt=LONG, computed=100), 5000)
    second, short = due(make_request(1, prompt=LONG), 3000), due(make_request(2, prompt=100), 400)
    shares, skips = play(cost, [first, second, short])
    assert shares == {2: 100, 0: 412}
    assert skips.reason_of(second) is Reason.ORDER
    shares, _ = play(cost, [first, second, short], long_tokens=0)
    assert shares == {2: 100, 1: 412}, "the nearest deadlines first, without the rule"
    through = make_request(0, prompt=LONG, output=3)
    assert play(cost, [due(through, 5000), second])[0] == {0: 1, 1: 511}


@pytest.mark.parametrize(
    ("residual_ms", "goes"), [(900, False), (1010, True), (1090, True), (1200, False)]
)
def test_an_urgent_one_does_not_wait(cost: StepCost, residual_ms: float, goes: bool) -> None:
    """It takes a second; up to a step later it could still be in time."""
    first = due(make_request(0, prompt=LONG, computed=100), 5000)
    second = due(make_request(1, prompt=LONG), residual_ms)
    assert (1 in play(cost, [first, second])[0]) == goes


def test_a_late_one_keeps_none_waiting(cost: StepCost) -> None:
    late = due(make_request(0, prompt=LONG, computed=100), 10)
    assert play(cost, [late, due(make_request(1, prompt=LONG), 5000)])[0] == {1: 512}


def test_the_search_for_short_ones_ends(cost: StepCost) -> None:
    first = due(make_request(0, prompt=LONG, computed=9_990), 5000)
    waiting = [due(make_request(1 + i, prompt=LONG), 5000) for i in range(50)]
    shares, skips = play(cost, [first, *waiting])
    assert shares == {0: 10}
    held = [request for request in waiting if skips.reason_of(request) is not None]
    assert len(held) == LOOK_AHEAD and skips.stopped_by[RT] is Reason.ORDER


class TurnTaking:
    """Every prompt gets an equal chunk of every step: what the rule is against."""

    is_class_aware = True
    meets_deadlines = True

    def fill(self, step: Step) -> None:
        running = step.of()
        step.take(decodes=running.decodes)
        prompts, newcomers = list(running.prompts), list(step.waiting.of(RT))
        budget = step.limits.max_num_batched_tokens - step.budget.shape.num_new
        share = budget // max(1, len(prompts) + len(newcomers))
        for request in prompts:
            step.take([request], num_tokens=min(share, request.num_schedulable_tokens))
        for request in newcomers:
            step.take(newcomers=[request], num_tokens=min(share, request.num_schedulable_tokens))


def ends(policy: Policy) -> list[float]:
    """Return when each of two long and twenty short requests is through."""
    core_config = make_scheduler_config(ServeConfig(policy="unified"), max_model_len=16384)
    core = Scheduler(dataclasses.replace(core_config, policy=policy))
    worker = VirtualWorker(
        A100_LLAMA2_7B,
        LengthWorker(max_num_seqs=core_config.max_num_seqs, max_model_len=16384),
        rng=np.random.default_rng(0),
    )
    simulation = Simulation(core, worker, worker.seconds, WorkersReady(60_000))
    lengths = [LONG, LONG] + [200] * 20
    events = []
    for number, num_prompt in enumerate(lengths):
        job = Job(np.full(num_prompt, number, dtype=np.int32), 20, 20)
        ttft_ms = 6000.0 if num_prompt == LONG else 400.0
        submit = job.submit(number, RT, SLO(ttft_ms=ttft_ms, tpot_ms=200.0))
        time_s = 0.0 if num_prompt == LONG else 0.08 * number
        events.append(TimedEvent(time_s, FromFrontend(FrontendId(0), submit)))
    simulation.run(events)
    outcomes = [
        simulation.outcomes[RequestKey(FrontendId(0), RequestId(n))] for n in range(len(lengths))
    ]
    times_s = [outcome.token_times_s for outcome in outcomes]
    assert all(len(times) == 20 for times in times_s)
    assert max(b - a for times in times_s for a, b in pairwise(times)) < 0.2
    return [times[-1] for times in times_s]


def test_two_long_prompts_end_earlier_than_with_chunks_in_turn() -> None:
    exclusive, in_turn = ends(UnifiedPolicy()), ends(TurnTaking())
    assert exclusive[0] < 0.85 * in_turn[0] and exclusive[1] < in_turn[1]
    assert max(exclusive) < max(in_turn)


def test_the_option_needs_a_policy_that_reads_it() -> None:
    assert ServeConfig(policy="unified", long_prompt_tokens=0).long_prompt_tokens == 0
    with pytest.raises(ConfigError, match="--long-prompt-tokens needs --policy unified"):
        ServeConfig(policy="priority", long_prompt_tokens=0)
