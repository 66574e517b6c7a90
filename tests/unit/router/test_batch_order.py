"""Which best-effort request starts next: by what it brings back, what it gains, what fits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.policy_scenes import (
    BE,
    Admitting,
    Queue,
    begun,
    loading,
    make_limits,
    make_request,
    running_of,
)

from lightserve.router.policies.base import Step
from lightserve.router.policies.batch_order import BatchOrder
from lightserve.router.policies.step_budget import LOOK_AHEAD, CopyTimes, StepLimits
from lightserve.router.policies.unified import UnifiedPolicy
from lightserve.router.queue import OLDEST_EVERY, Turn, WaitingQueue
from lightserve.router.request import Request
from lightserve.router.step import Scheduled
from lightserve.router.step_cost import StepCost, StepShape


@pytest.fixture(scope="module")
def cost() -> StepCost:
    """Steps take 0.1 ms per token, whatever the context."""
    model = StepCost()
    for _ in range(4):
        for exponent in range(12):
            model.observe(StepShape(num_new=2**exponent), 1e-4 * 2**exponent)
    return model


LOADED: dict[Request, int] = {}


def waiting(number: int, *, rest: int, there: int = 0, loaded: int = 0) -> Request:
    """Return a newcomer, or (with `loaded` tokens) one that resumes."""
    request = make_request(number, BE, prompt=rest + there)
    request.num_computed_tokens = there
    LOADED[request] = loaded
    request.num_requeues = int(loaded > 0)
    return request


def empty_step(limits: StepLimits) -> Step:
    policy, found = UnifiedPolicy(), loading(LOADED)
    return begun(policy, running_of([]), Queue([]), limits, Admitting(), found=found)


def order(
    cost: StepCost,
    requests: list[Request],
    *,
    budget: int = 1000,
    num_slots: int = 100_000,
    num_free: int = 50_000,
) -> list[int]:
    limits = make_limits(
        budget,
        num_free_rows=8,
        num_slots=num_slots,
        num_free_slots=num_free,
        cost=cost,
        copies=CopyTimes(lambda num_tokens: 1e-4 * num_tokens),
    )
    best_first = BatchOrder(empty_step(limits)).best_first(iter(requests))
    return [request.arrival_number for request in best_first]


def test_cached_tokens_are_gained(cost: StepCost) -> None:
    requests = [
        waiting(0, rest=200),
        waiting(1, rest=200, there=100),
        waiting(2, rest=200, there=300),
    ]
    assert order(cost, requests) == [2, 1, 0]


def test_tokens_that_leave_the_cache_are_lost(cost: StepCost) -> None:
    requests = [waiting(0, rest=900, there=900), waiting(1, rest=300, there=240)]
    assert order(cost, requests) == [0, 1]
    assert order(cost, requests, num_free=300) == [1, 0]


def test_those_that_resume_come_first_by_what_they_bring_back(cost: StepCost) -> None:
    """A load takes as long as a token; what is not on the host is computed."""
    resuming = [
        waiting(0, rest=1, there=500, loaded=400),
        waiting(1, rest=1, there=500, loaded=100),
        waiting(2, rest=250, there=300, loaded=1),
    ]
    assert order(cost, [*resuming, waiting(3, rest=200, there=800)]) == [1, 2, 0, 3]


def test_equals_are_packed(cost: StepCost) -> None:
    """400 tokens of the budget are left: the one of 390 fills them, without a cut."""
    requests = [waiting(i, rest=rest) for i, rest in enumerate([900, 100, 390, 700])]
    assert order(cost, requests, budget=400)[0] == 2


def test_scores_do_not_overrule_priorities(cost: StepCost) -> None:
    requests = [waiting(0, rest=200), waiting(1, rest=200, there=800)]
    requests[1].priority = 1
    assert order(cost, requests) == [0, 1]


def test_only_the_next_few_are_looked_at(cost: StepCost) -> None:
    num_seen = 0

    def many() -> Iterator[Request]:
        nonlocal num_seen
        for number in range(100):
            num_seen += 1
            yield waiting(number, rest=100, there=number)

    limits = make_limits(1000, num_free_rows=8, num_slots=10_000, cost=cost)
    first = next(BatchOrder(empty_step(limits)).best_first(many()))
    assert first.arrival_number == LOOK_AHEAD - 1 and num_seen == LOOK_AHEAD


def test_the_oldest_comes_first_when_it_is_its_turn(cost: StepCost) -> None:
    old = waiting(0, rest=200)
    better = [waiting(1 + number, rest=200, there=200) for number in range(20)]
    for since, place in ((0, 20), (OLDEST_EVERY - 1, 0)):
        turn = Turn([old, *better], since)
        limits = make_limits(1000, num_free_rows=8, num_slots=10_000, cost=cost, turn=turn)
        found = list(BatchOrder(empty_step(limits)).best_first([old, *better]))
        assert found.index(old) == place


def test_slots_that_the_step_takes_are_free_no_more(cost: StepCost) -> None:
    """Two that share as much: what is lost from the cache for a newcomer counts as it is now."""
    limits = make_limits(1000, num_free_rows=8, num_slots=1000, num_free_slots=300, cost=cost)
    step = empty_step(limits)
    order = BatchOrder(step)
    request = waiting(0, rest=200, there=100)
    before = order.score(request)
    step.budget.add(Scheduled(waiting(1, rest=250), 250))
    gained = 100 + 200 - (200 - 50)
    added_s = step.budget.seconds_added(request, 200)
    assert order.score(request) == pytest.approx(gained / added_s)
    assert order.score(request) < before


def test_overtaking_among_those_that_resume_is_counted() -> None:
    queue = WaitingQueue()
    requests = [waiting(number, rest=1, there=10, loaded=1) for number in range(3)]
    queue.requeue(requests)
    queue.admit(requests[1])
    queue.append(fresh := waiting(9, rest=10))
    queue.admit(fresh)
    assert [request.num_overtaken for request in requests] == [2, 0, 1]
