"""The pace of real-time decodes without targets: the limits, and the steps that keep them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.policy_scenes import (
    BE,
    Admitting,
    Queue,
    filled,
    make_limits,
    make_request,
    running_of,
)

from lightserve.config import ServeConfig
from lightserve.errors import ConfigError
from lightserve.messages.common import GraphSizes, StepCoefficients
from lightserve.router.policies import make_policy
from lightserve.router.policies.base import Step
from lightserve.router.policies.pace import EVERY_BEST_EFFORT, Pace, PaceLimits, pace_limits
from lightserve.router.queue import MIN_CHUNK
from lightserve.router.request import Request
from lightserve.router.slo import TokenDeadlines
from lightserve.router.step import Reason
from lightserve.router.step_cost import StepCost
from lightserve.types import NO_SLO, SLO

PACED = ("priority", "unified")
FLOOR_MS = 5.0


def cost_of(floor_ms: float = FLOOR_MS, **coefficients: float) -> StepCost:
    """Steps take a floor and 0.1 ms for each token."""
    cost = StepCost()
    zeros = dict.fromkeys(StepCoefficients.__struct_fields__, 0.0)
    known = {"floor_s": floor_ms / 1e3, "per_new_s": 1e-4, **coefficients}
    cost.use_profile(StepCoefficients(**(zeros | known)))
    return cost


def stream(number: int, slo: SLO = NO_SLO, *, context: int = 10) -> Request:
    """Return a real-time request that decodes."""
    return with_targets(make_request(number, prompt=context, output=2), slo)


def with_targets(request: Request, slo: SLO) -> Request:
    request.slo = slo
    request.deadlines = TokenDeadlines(slo, 0.0)
    if request.output_token_ids:
        request.deadlines.on_tokens(1, 0.0)
    return request


def play(
    running: list[Request],
    waiting: list[Request],
    *,
    policy: str = "unified",
    cost: StepCost | None = None,
    step_number: int = 1,
    **options: Any,
) -> Step:
    limits = make_limits(
        max_num_batched_tokens=2048,
        num_free_rows=8,
        step_number=step_number,
        num_slots=100_000,
        cost=cost_of() if cost is None else cost,
    )
    made = make_policy(ServeConfig(policy=policy, **options))
    return filled(made, running_of(running), Queue(waiting), limits, Admitting())


def shares(step: Step) -> dict[int, int]:
    return {request.arrival_number: count for request, count in step.budget.parts}


@pytest.mark.parametrize(
    ("decodes_ms", "expected"),
    [(6.0, (29.7, 9.0)), (30.0, (60.0, 45.0)), (100.0, (200.0, 150.0))],
)
def test_the_limits(decodes_ms: float, expected: tuple[float, float]) -> None:
    """A tenth of the pace is left for steps that take longer than predicted."""
    limits = pace_limits(Pace(), decodes_ms / 1e3)
    assert limits == pytest.approx(PaceLimits(expected[0] / 1e3, expected[1] / 1e3))
    halves = pace_limits(Pace(), decodes_ms / 1e3, steps_per_token=2)
    assert halves.prompts_s == pytest.approx(expected[0] / 2e3)


@pytest.mark.parametrize("policy", PACED)
def test_a_prompt_leaves_a_stream_its_pace(policy: str) -> None:
    """29.7 ms are 247 tokens at 0.1 ms beside the floor, of which one is the stream's."""
    running, waiting = [stream(0)], [make_request(1, prompt=5000), make_request(2, prompt=5000)]
    step = play(running, waiting, policy=policy)
    assert shares(step) == {0: 1, 1: pytest.approx(246, abs=1)}
    assert step.budget.seconds <= 0.033
    assert step.skips.stopped_by[running[0].request_class] is Reason.PACE
    assert shares(play(running, waiting, policy=policy, pace_ms=0))[1] == 2047
    assert shares(play(running, waiting, policy=policy, pace_ms=60))[1] == pytest.approx(489, abs=1)


@pytest.mark.parametrize("policy", PACED)
def test_prompts_among_themselves_have_no_limit(policy: str) -> None:
    first, second = make_request(0, prompt=5000, computed=100), make_request(1, prompt=5000)
    assert sum(shares(play([first], [second], policy=policy)).values()) == 2048


@pytest.mark.parametrize("policy", PACED)
def test_where_decodes_take_as_long_as_the_pace_a_step_takes_twice_as_long(policy: str) -> None:
    step = play([stream(0)], [make_request(1, prompt=5000)], policy=policy, cost=cost_of(40.0))
    assert step.budget.seconds == pytest.approx(2 * 0.0401, abs=1e-4)


@pytest.mark.parametrize("policy", PACED)
def test_a_prompt_always_gets_on(policy: str) -> None:
    """A chunk may cost more than there is: of those of one step the first gets a few tokens."""
    cost = cost_of(50.0, per_chunk_s=0.06)
    step = play(
        [stream(0)], [make_request(n, prompt=5000) for n in (1, 2)], policy=policy, cost=cost
    )
    assert shares(step) == {0: 1, 1: MIN_CHUNK}
    ends = make_request(1, prompt=MIN_CHUNK // 2)
    assert shares(play([stream(0)], [ends], policy=policy, cost=cost))[1] == MIN_CHUNK // 2


def test_a_minimum_does_not_make_what_has_a_target_late() -> None:
    """The other stream's token is due in 60 ms."""
    cost = cost_of(50.0, per_chunk_s=0.06)
    running = [stream(0), stream(1, SLO(tpot_ms=60.0, mtpot_ms=60.0))]
    assert shares(play(running, [make_request(2, prompt=5000)], cost=cost)) == {0: 1, 1: 1}


@pytest.mark.parametrize("policy", PACED)
def test_best_effort_work_stretches_a_step_by_half(policy: str) -> None:
    """Of ten streams' 6 ms half are 30 tokens: decodes before prompts, however few tokens."""
    streams = [stream(number) for number in range(10)]
    decodes = [make_request(20 + n, BE, prompt=10, output=2) for n in range(25)]
    prompt = make_request(90, BE, prompt=5000)
    step = play([*streams, *decodes], [prompt], policy=policy)
    assert step.budget.seconds <= 1.5 * 0.006 + 1e-9
    assert shares(step)[90] == pytest.approx(5, abs=1) and len(shares(step)) == 36
    step = play(streams, [prompt], policy=policy, be_stretch=3)
    assert step.budget.seconds == pytest.approx(3 * 0.006, abs=1e-4)
    assert play(streams, [prompt], policy=policy, pace_ms=0).budget.seconds > 0.05


@pytest.mark.parametrize("policy", PACED)
def test_best_effort_work_has_nothing_beside_a_prompt_that_takes_longer(policy: str) -> None:
    step = play([stream(0)], [make_request(1, prompt=100), make_request(2, BE)], policy=policy)
    assert shares(step) == {0: 1, 1: 100}
    assert step.skips.stopped_by[BE] is Reason.PACE


def test_what_would_never_fit_beside_streams_has_a_step_now_and_then() -> None:
    """Its context alone takes 10 ms, and nothing else of its class would fit."""
    cost = cost_of(per_decode_context_s=1e-6)
    long = make_request(1, BE, prompt=10_000, output=2)
    rounds = [play([stream(0)], [], cost=cost, step_number=n) for n in (1, EVERY_BEST_EFFORT)]
    assert all(shares(step) == {0: 1} for step in rounds)
    rounds = [play([stream(0), long], [], cost=cost, step_number=n) for n in (1, EVERY_BEST_EFFORT)]
    assert [1 in shares(step) for step in rounds] == [False, True]


TARGETS = [SLO(tpot_ms=500.0), SLO(mtpot_ms=500.0), SLO(ttft_ms=900.0, tpot_ms=500.0)]


@pytest.mark.parametrize("slo", TARGETS)
@pytest.mark.parametrize("policy", PACED)
def test_requests_with_targets_keep_none(policy: str, slo: SLO) -> None:
    """A target of the first token alone says nothing of those behind it."""
    for waiting in ([make_request(1, prompt=5000)], [make_request(1, BE, prompt=5000)]):
        with_pace, without = (
            shares(play([stream(0, slo)], waiting, policy=policy, **options))
            for options in ({}, {"pace_ms": 0})
        )
        assert with_pace == without and with_pace[1] > 400
    waiting = [make_request(1, prompt=5000)]
    assert shares(play([stream(0, SLO(ttft_ms=900.0))], waiting, policy=policy))[1] < 300


@pytest.mark.parametrize(
    ("ttft_ms", "num_others", "is_paced"),
    [(1300.0, 0, True), (1200.0, 0, False), (1300.0, 1, False), (3000.0, 1, True), (-5.0, 0, True)],
)
def test_a_prompt_keeps_the_pace_while_that_takes_half_of_its_time(
    ttft_ms: float, num_others: int, is_paced: bool
) -> None:
    """5,000 tokens are 21 steps of 29.7 ms; with another one that is due as soon, 42."""
    slo = SLO(ttft_ms=ttft_ms)
    prompts = [with_targets(make_request(1 + n, prompt=5000), slo) for n in range(1 + num_others)]
    step = play([stream(0)], prompts)
    assert (step.budget.seconds <= 0.033) == is_paced
    if not is_paced:
        assert shares(step)[1] > 1000


def test_a_stream_that_waits_for_its_grammar_keeps_the_pace_in_two_steps() -> None:
    """Its token is in flight, so that it is not in this step: that has half of the 29.7 ms."""
    guided = stream(0)
    running = running_of([guided])
    running.table.awaits_grammar[guided.row] = True
    running.table.inflight_samples[guided.row] = 1
    limits = make_limits(2048, 8, step_number=1, num_slots=100_000, cost=cost_of())
    running.schedulable = running.table.schedulable()
    policy = make_policy(ServeConfig())
    step = filled(policy, running, Queue([make_request(1, prompt=5000)]), limits, Admitting())
    assert shares(step) == {1: pytest.approx(98, abs=1)}
    assert step.budget.seconds <= 0.0165


def test_its_last_token_in_flight_a_stream_keeps_no_pace() -> None:
    ending = stream(0)
    ending.max_tokens = 3
    running = running_of([ending])
    running.table.inflight_samples[ending.row] = 1
    running.schedulable = running.table.schedulable()
    limits = make_limits(2048, 8, step_number=1, num_slots=100_000, cost=cost_of())
    policy = make_policy(ServeConfig())
    step = filled(policy, running, Queue([make_request(1, prompt=5000)]), limits, Admitting())
    assert shares(step) == {1: 2048}


def test_without_a_model_of_step_times_there_is_no_pace() -> None:
    step = play([stream(0)], [make_request(1, prompt=5000)], cost=StepCost())
    assert shares(step)[1] == 2047


def test_streams_do_not_give_way_to_best_effort_prompts() -> None:
    """A decode with a target that limits the step does not make the other one wait for a batch."""
    cost = cost_of(0.0, per_decode_context_s=1e-6)
    running = [stream(0, SLO(tpot_ms=9.0, mtpot_ms=9.0)), stream(1, context=8000)]
    step = play(running, [make_request(5, BE, prompt=5000)], cost=cost)
    assert {0, 1} <= shares(step).keys()


@pytest.mark.parametrize("policy", ["bros", "chunked", "echo", "sjf"])
def test_other_policies_are_as_published(policy: str) -> None:
    step = play([stream(0)], [make_request(1, prompt=5000)], policy=policy)
    assert shares(step)[1] == 2047
    with pytest.raises(ConfigError, match=r"--pace-ms needs --policy priority or unified"):
        ServeConfig(policy=policy, pace_ms=10.0)


def test_padded_steps_keep_it_too() -> None:
    """Workers fill steps up to these; where the least takes longer, its padding is used."""
    for sizes, num_tokens in (((224, 512), 223), ((32, 300), 31), ((512,), 511)):
        cost = cost_of()
        cost.use_workers(None, GraphSizes(mixed=sizes))
        step = play([stream(0)], [make_request(1, prompt=5000)], cost=cost)
        assert shares(step)[1] == num_tokens


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("policy", PACED)
def test_no_step_of_random_scenes_breaks_it(policy: str, seed: int) -> None:
    """With prompts of real-time requests, the pace or twice the decodes; otherwise the stretch."""
    rng = np.random.default_rng(seed)
    cost = cost_of(float(rng.choice([2.0, 5.0, 30.0])), per_decode_context_s=1e-7)
    streams = [stream(n, context=int(rng.integers(10, 4000))) for n in range(rng.integers(1, 20))]
    batch = [make_request(30 + n, BE, prompt=50, output=2) for n in range(rng.integers(0, 20))]
    waiting = [
        make_request(60 + n, prompt=int(rng.integers(20, 6000))) for n in range(rng.integers(0, 3))
    ]
    waiting += [make_request(70 + n, BE, prompt=800) for n in range(rng.integers(0, 3))]
    own_s = play(streams, [], policy=policy, cost=cost).budget.seconds
    step = play([*streams, *batch], waiting, policy=policy, cost=cost)
    assert all(shares(step)[n] == 1 for n in range(len(streams)))
    has_prompt = any(60 <= number < 70 for number in shares(step))
    most_s = max(0.033, 2 * own_s) if has_prompt else 1.5 * own_s
    assert step.budget.seconds <= most_s + 1e-9
    assert has_prompt == any(60 <= request.arrival_number < 70 for request in waiting)


def test_a_stretch_without_a_pace_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--be-stretch 2 needs a pace, got --pace-ms 0"):
        ServeConfig(pace_ms=0.0, be_stretch=2.0)
