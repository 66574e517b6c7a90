"""The policies of three papers, each mechanism in a scene of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from lightserve.messages.common import StepCoefficients
from lightserve.papers.accelgen import AccelGenPolicy
from lightserve.papers.bros import BASE_BATCH, BrosPolicy
from lightserve.papers.echo import EchoPolicy
from lightserve.router.policies.base import Policy, Step
from lightserve.router.request import WAITING, FoundOf, Request, RequestState, progress
from lightserve.router.request_table import Running
from lightserve.router.slo import TokenDeadlines
from lightserve.router.step_cost import StepCost
from lightserve.types import SLO
from tests.support.core_scenes import Arrival, events_of, make_core, make_simulation
from tests.support.policy_scenes import (
    BE,
    Admitting,
    Queue,
    filled,
    loading,
    make_limits,
    make_request,
    running_of,
)

NOW_S = 100.0
TOKEN_S = 0.001


def cost(floor_s: float = 0.0) -> StepCost:
    """A step takes a millisecond per token."""
    zeros = dict.fromkeys(StepCoefficients.__struct_fields__, 0.0)
    found = StepCost()
    found.use_profile(StepCoefficients(**{**zeros, "floor_s": floor_s, "per_new_s": TOKEN_S}))
    return found


def due(request: Request, left_s: float) -> Request:
    """Let a request's next token be due in so many seconds."""
    request.deadlines = TokenDeadlines(SLO(ttft_ms=1e3 * left_s), NOW_S)
    if request.output_token_ids:  # the first token came just so that the next is due then
        request.deadlines = TokenDeadlines(SLO(1.0, 1e3 * left_s, 1e3 * left_s), NOW_S)
        request.deadlines.on_tokens(1, NOW_S)
    return request


def step_of(
    policy: Policy, requests: Sequence[Request], found: FoundOf = progress, **limits: Any
) -> Step:
    running = running_of([r for r in requests if r.state is RequestState.RUNNING])
    waiting = Queue([r for r in requests if r.state is WAITING])
    values: dict[str, Any] = {
        "max_num_batched_tokens": 1000,
        "num_free_rows": 1000,
        "num_slots": 10_000,
        "num_free_slots": 10_000,
        "start_s": NOW_S,
        "average_step_s": 0.01,
        "cost": cost(),
    }
    return filled(
        policy, running, waiting, make_limits(**{**values, **limits}), Admitting(), found=found
    )


def parts(policy: Policy, requests: Sequence[Request], **limits: Any) -> list[tuple[int, int]]:
    step = step_of(policy, requests, **limits)
    return [(request.key.request_id, num_tokens) for request, num_tokens in step.budget.parts]


class TestBros:
    def test_decodes_and_whole_prompts_go_by_the_time_left(self) -> None:
        """The least time left, 0.1 s, is the limit: the prompt of 90 tokens has no room."""
        requests = [
            due(make_request(0, output=2), 0.5),
            due(make_request(1, output=2), 0.1),
            due(make_request(2, prompt=40), 0.3),
            due(make_request(3, prompt=90), 0.4),
        ]
        assert parts(BrosPolicy(), requests) == [(1, 1), (2, 40)]

    def test_one_that_is_late_sets_no_limit(self) -> None:
        requests = [due(make_request(0, prompt=50), 0.01), due(make_request(1, prompt=60), 0.2)]
        assert parts(BrosPolicy(), requests) == [(0, 50), (1, 60)]

    def test_best_effort_requests_with_least_on_the_host_start_first(self) -> None:
        loads, fresh = make_request(1, BE, prompt=20), make_request(2, BE, prompt=20)
        requests = [due(make_request(0, output=2), 0.1), loads, fresh]
        found = step_of(BrosPolicy(), requests, loading({loads: 8})).budget.parts
        assert [request.arrival_number for request, _ in found] == [0, 2, 1]

    def test_they_take_the_place_of_real_time_decodes_that_can_wait(self) -> None:
        """Three tokens fit: the two real-time ones with most time left give way, one by one."""
        urgent = due(make_request(0, output=2), 0.003)
        patient = [due(make_request(number, output=2), 1.0 + number) for number in (1, 2)]
        best_effort = [make_request(number, BE, output=2) for number in (3, 4, 5)]
        found = parts(BrosPolicy(), [urgent, *patient, *best_effort])
        assert sorted(number for number, _ in found) == [0, 3, 4]

    def test_not_of_those_that_would_be_late_after_one_more_step(self) -> None:
        urgent = due(make_request(0, output=2), 0.003)
        next_one = [due(make_request(number, output=2), 0.012) for number in (1, 2)]
        found = parts(BrosPolicy(), [urgent, *next_one, make_request(3, BE, output=2)])
        assert sorted(number for number, _ in found) == [0, 1, 2]

    def test_the_batch_doubles_until_real_time_requests_run_into_the_limit(self) -> None:
        decodes = [make_request(number, BE, output=2) for number in range(3 * BASE_BATCH)]
        assert len(parts(BrosPolicy(), decodes)) == BASE_BATCH
        assert len(parts(BrosPolicy(), decodes, num_steps_in_time=1)) == 2 * BASE_BATCH
        in_time = [due(make_request(0, prompt=9), 0.1), due(make_request(1, prompt=9), 0.1)]
        assert not step_of(BrosPolicy(), in_time).hits_limit
        one_is_too_many = [*in_time, due(make_request(2, prompt=90), 0.2)]
        assert step_of(BrosPolicy(), one_is_too_many).hits_limit

    def test_a_prompt_longer_than_the_budget_is_cut(self) -> None:
        found = parts(BrosPolicy(), [make_request(0, prompt=30)], max_num_batched_tokens=20)
        assert found == [(0, 20)]

    def test_so_is_the_rest_of_it_where_time_is_short(self) -> None:
        requests = [
            due(make_request(0, output=2), 0.0505),
            make_request(1, BE, prompt=90, computed=10),
        ]
        assert parts(BrosPolicy(), requests, max_num_batched_tokens=85) == [(0, 1), (1, 49)]

    def test_so_is_one_that_takes_longer_than_the_time_between_two_tokens(self) -> None:
        """Beside the decode no step would ever have room for all of it."""
        decode = due(make_request(0, output=2), 0.0505)
        for prompt in (make_request(1, BE, prompt=90), due(make_request(1, prompt=90), 0.5)):
            assert parts(BrosPolicy(), [decode, prompt]) == [(0, 1), (1, 49)]
        assert parts(BrosPolicy(), [decode, make_request(1, BE, prompt=40)]) == [(0, 1), (1, 40)]

    def test_a_token_that_is_late_beside_more_urgent_ones_sets_no_limit(self) -> None:
        """It would keep every step small, so that ever more tokens are late."""
        late = [make_request(number, output=2) for number in range(9)]
        for request in late:
            request.deadlines = TokenDeadlines(SLO(1.0, 100.0, 100.0), NOW_S - 0.2)
            request.deadlines.on_tokens(1, NOW_S - 0.2)
        others = [due(make_request(9, output=2), 0.0045), due(make_request(10, output=2), 0.0205)]
        found = parts(BrosPolicy(), [*late, *others])
        assert sorted(number for number, _ in found) == list(range(11))
        assert len(parts(BrosPolicy(), [*late[:3], *others])) == 4


class TestEcho:
    def test_no_offline_request_before_all_online_ones_are_in(self) -> None:
        online = [due(make_request(number, prompt=60), 5.0) for number in (0, 1)]
        offline = make_request(2, BE, output=2)
        assert parts(EchoPolicy(), [*online, offline], num_free_rows=1) == [(0, 60)]
        assert parts(EchoPolicy(), [*online, offline]) == [(0, 60), (1, 60), (2, 1)]

    def test_online_requests_come_first_come_first_served(self) -> None:
        requests = [due(make_request(0, prompt=5), 9.0), due(make_request(1, prompt=5), 1.0)]
        assert parts(EchoPolicy(), requests[::-1]) == [(0, 5), (1, 5)]

    def test_offline_decodes_of_the_step_before_stay_the_shortest_first(self) -> None:
        """Time for two: of those of the last step the one with the longest context goes."""
        online = due(make_request(0, output=2), 0.003)
        lengths = {1: 900, 2: 50, 3: 70, 4: 5}
        offline = [make_request(n, BE, prompt=p, output=2) for n, p in lengths.items()]
        running = running_of([online, *offline])
        running.table.send(running.rows[1:4])  # the last one was left out
        limits = make_limits(1000, num_free_rows=9, start_s=NOW_S, cost=cost())
        step = filled(EchoPolicy(), Running(running.table), Queue([]), limits, Admitting())
        assert [request.key.request_id for request, _ in step.budget.parts] == [0, 2, 3]

    @pytest.mark.parametrize(("num_wanted", "first"), [(600, 2), (0, 1)])
    def test_what_others_wait_for_is_a_loss(self, num_wanted: int, first: int) -> None:
        """500 of the first's tokens would be thrown out; the second computes as few as are free."""
        long, short = make_request(1, BE, prompt=600), make_request(2, BE, prompt=100)
        found = parts(
            EchoPolicy(),
            [long, short],
            num_free_slots=100,
            num_cached_slots=600,
            num_wanted_slots=num_wanted,
            cost=cost(floor_s=0.05),
        )
        assert found[0][0] == first


class TestAccelGen:
    def test_urgent_ones_come_first_then_decodes_then_the_rest(self) -> None:
        requests = [
            due(make_request(0, output=2), 9.0),
            due(make_request(1, prompt=30), 9.0),
            due(make_request(2, prompt=30), 0.19),
            due(make_request(3, output=2), 0.15),
        ]
        found = parts(AccelGenPolicy(), requests, max_num_batched_tokens=100)
        assert found == [(3, 1), (2, 30), (0, 1), (1, 30)]

    def test_time_left_counts_the_chunks_to_come(self) -> None:
        """Both are due in half a second; the long one needs four steps of 0.1 s."""
        requests = [due(make_request(0, prompt=30), 0.49), due(make_request(1, prompt=400), 0.49)]
        found = parts(AccelGenPolicy(), requests, max_num_batched_tokens=100)
        assert found == [(1, 100)]

    def test_of_those_alike_the_nearest_to_what_is_left_goes_first(self) -> None:
        """After the decodes 80 tokens are left: 70 is nearest, and 10 is what fits beside it."""
        decodes = [due(make_request(number, output=2), 9.0) for number in range(20)]
        waiting = [due(make_request(20 + i, prompt=p), 9.0) for i, p in enumerate((40, 70, 10))]
        requests = [*decodes, *waiting]
        found = parts(AccelGenPolicy(), requests, max_num_batched_tokens=100)
        assert found[20:] == [(21, 70), (22, 10)]
        plain = AccelGenPolicy(left_out=("batching",))
        assert parts(plain, requests, max_num_batched_tokens=100)[20:] == [(20, 40), (21, 40)]

    def test_memory_counts_as_well(self) -> None:
        """As the first joins both axes shrink: then 20 is nearer than 60 to the 20 slots left."""
        waiting = [due(make_request(i, prompt=p), 9.0) for i, p in enumerate((60, 20, 80))]
        found = parts(AccelGenPolicy(), waiting, num_slots=120, num_free_slots=100)
        assert [number for number, _ in found][:2] == [2, 1]

    def test_one_long_prompt_is_in_progress_at_once(self) -> None:
        in_progress = due(make_request(0, prompt=300, computed=100), 60.0)
        other, short = (due(make_request(i, prompt=p), 60.0) for i, p in ((1, 300), (2, 20)))
        requests = [in_progress, other, short]
        policy = AccelGenPolicy(long_prompt_tokens=200)
        assert parts(policy, requests) == [(0, 200), (2, 20)]
        both = AccelGenPolicy(long_prompt_tokens=200, left_out=("exclusive",))
        assert {number for number, _ in parts(both, requests)} == {0, 1, 2}

    def test_without_chunking_a_prompt_goes_whole_or_not_at_all(self) -> None:
        requests = [due(make_request(0, output=2), 9.0), due(make_request(1, prompt=150), 9.0)]
        assert parts(AccelGenPolicy(), requests, max_num_batched_tokens=100) == [(0, 1), (1, 99)]
        whole = AccelGenPolicy(left_out=("chunking",))
        assert parts(whole, requests, max_num_batched_tokens=100) == [(0, 1)]

    def test_what_cannot_be_in_time_any_more_waits_behind_the_others(self) -> None:
        late, other = due(make_request(0, prompt=80), 0.02), due(make_request(1, prompt=50), 5.0)
        found = parts(AccelGenPolicy(), [other, late], max_num_batched_tokens=100)
        assert found == [(1, 50), (0, 50)]


def test_steps_since_real_time_requests_ran_into_the_limit_are_counted() -> None:
    core = make_core("bros", 64)
    simulation = make_simulation(core)
    simulation.run(events_of([Arrival(0.0, 8, 20, 20), Arrival(0.0, 8, 20, 20)]))
    assert core._pipeline.num_steps_in_time == core.status(simulation.now_s).num_steps > 10
