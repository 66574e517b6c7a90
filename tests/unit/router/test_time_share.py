"""The least share of step time of best-effort requests: its ledger, and the steps that pay it."""

from __future__ import annotations

import pytest
from support.policy_scenes import (
    BE,
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
from lightserve.router.arrivals import IDLE_LIMIT_S, MEMORY_S, TimeShare
from lightserve.router.policies.unified import UnifiedOptions, UnifiedPolicy
from lightserve.router.request import Request
from lightserve.router.slo import TokenDeadlines
from lightserve.router.step_cost import StepCost, StepShape
from lightserve.types import SLO

SHARE = 0.1


@pytest.fixture(scope="module")
def cost() -> StepCost:
    """Steps take 0.1 ms per token, whatever the context."""
    model = StepCost()
    for _ in range(4):
        for exponent in range(12):
            model.observe(StepShape(num_new=2**exponent), 1e-4 * 2**exponent)
    return model


def due(request: Request, residual_ms: float) -> Request:
    request.deadlines = TokenDeadlines(SLO(ttft_ms=residual_ms), 0.0)
    return request


def play(
    cost: StepCost, time: TimeShare, running: list[Request], waiting: list[Request]
) -> tuple[dict[int, int], float | None]:
    in_rows = running_of(running)
    limits = make_limits(
        512,
        num_free_rows=8,
        step_number=1,
        num_slots=10**6,
        cost=cost,
        best_effort_time=time,
    )
    policy = UnifiedPolicy(UnifiedOptions(be_min_share=SHARE))
    step = filled(policy, in_rows, Queue(waiting), limits, Admitting())
    return {
        request.arrival_number: count for request, count in step.budget.parts
    }, step.best_effort_s


def test_a_share_is_owed_while_more_is_wanted() -> None:
    time = TimeShare()
    for _ in range(10):
        time.observe(0.05, 0.0)
    assert time.owed_s(SHARE) == pytest.approx(0.05, rel=0.03)
    time.observe(0.1, 0.1)
    assert time.owed_s(SHARE) == 0.0 and time.owed_s(0.5) > 0
    time.observe(0.1, None)
    assert time.owed_s(0.9) == 0.0, "they had all that they wanted"
    for _ in range(10_000):
        time.observe(0.05, 0.0)
    assert time.owed_s(SHARE) == pytest.approx(SHARE * MEMORY_S, rel=0.01)


def test_what_is_owed_is_paid_before_real_time_prompts(cost: StepCost) -> None:
    """5 ms are 50 tokens, in a step that ends 20 ms from its start and in one that has no end."""
    prompt = due(make_request(1, RT, prompt=2000, computed=10), 400)
    running = [due(make_request(0, RT, output=5), 20), prompt, make_request(5, BE, output=3)]
    newcomer = make_request(6, BE, prompt=900)
    assert play(cost, TimeShare(), running, [newcomer]) == (
        {0: 1, 1: pytest.approx(199, abs=2)},
        0.0,
    )
    shares, given_s = play(cost, TimeShare(0.05, 0.0), running, [newcomer])
    assert shares == {0: 1, 5: 1, 6: pytest.approx(49, abs=1), 1: pytest.approx(149, abs=2)}
    assert given_s == pytest.approx(0.005, abs=2e-4)
    tight = [due(make_request(0, RT, output=5), 0.2), *running[1:]]
    assert play(cost, TimeShare(0.05, 0.0), tight, [newcomer])[0].keys() == {0, 5, 6}


def test_one_step_pays_only_so_much(cost: StepCost) -> None:
    shares, _ = play(cost, TimeShare(5.0, 0.0), [], [make_request(6, BE, prompt=9000)])
    assert shares[6] <= 1.01 * IDLE_LIMIT_S / 1e-4


def test_nothing_is_owed_to_no_request(cost: StepCost) -> None:
    prompt = due(make_request(1, RT, prompt=2000, computed=10), 400)
    assert play(cost, TimeShare(), [prompt], [])[1] is None
    assert play(cost, TimeShare(), [make_request(5, BE, output=3)], [])[1] is None


def test_steps_keep_the_share(cost: StepCost) -> None:
    time, given_s, total_s = TimeShare(), 0.0, 0.0
    for _ in range(200):
        prompt = due(make_request(1, RT, prompt=9000, computed=10), 4000)
        shares, best_effort_s = play(cost, time, [prompt], [make_request(6, BE, prompt=900)])
        step_s = 1e-4 * sum(shares.values())
        time.observe(step_s, best_effort_s)
        given_s, total_s = given_s + 1e-4 * shares.get(6, 0), total_s + step_s
    assert given_s / total_s == pytest.approx(SHARE, rel=0.1)


def test_the_option_needs_a_policy_that_reads_it() -> None:
    with pytest.raises(ConfigError, match="--be-min-share needs --policy unified"):
        ServeConfig(policy="priority", be_min_share=0.1)
