"""Policies, each alone: who advances in a scene, and by how many tokens."""

from __future__ import annotations

from typing import Any

import pytest

from lightserve.router.policies.baselines import (
    MAX_OVERTAKEN,
    ChunkedPolicy,
    FcfsPolicy,
    MlfqPolicy,
    PriorityPolicy,
    RoundRobinPolicy,
    SjfPolicy,
    queue_of,
)
from lightserve.router.queue import MAX_CANDIDATES
from lightserve.router.request import Request
from tests.support.core_scenes import Arrival, events_of, make_core, make_simulation
from tests.support.policy_scenes import BE, RT, make_request, select

BE_DECODE = make_request(0, BE, output=3)
BE_PROMPT = make_request(1, BE, prompt=9, computed=4)
BE_NEW = make_request(7, BE, prompt=5)
RT_DECODE = make_request(2, output=1)
RT_PROMPT = make_request(3, prompt=6, computed=2)
RT_NEW = make_request(4, prompt=3)
RT_LATER = make_request(5, prompt=4)


class TestChunked:
    def test_the_budget_is_filled_behind_the_decodes(self) -> None:
        requests = [
            make_request(0, prompt=6, computed=2),
            make_request(1, output=1),
            make_request(2, prompt=3),
            make_request(3, prompt=9),
            make_request(4),
        ]
        assert select(ChunkedPolicy(), requests) == [(1, 1), (0, 4), (2, 3), (3, 2)]

    def test_it_stops_at_the_last_row(self) -> None:
        waiting = [make_request(i, prompt=2) for i in range(5)]
        assert select(ChunkedPolicy(), waiting, rows=2) == [(0, 2), (1, 2)]


def test_round_robin_cuts_prompts_unless_it_is_to_leave_them_whole() -> None:
    prompts = [make_request(0, prompt=7), make_request(1, prompt=7)]
    assert select(RoundRobinPolicy(), prompts) == [(0, 7), (1, 3)]
    assert select(RoundRobinPolicy(is_whole=True), prompts) == [(0, 7)]


def test_fcfs_runs_whole_prompts_before_decodes() -> None:
    running = make_request(0, output=1)
    waiting = [make_request(1, prompt=7), make_request(2, prompt=4)]
    assert select(FcfsPolicy(), [running, *waiting]) == [(1, 7)]
    assert select(FcfsPolicy(), [running, make_request(1, prompt=70)]) == [(1, 70)]
    assert select(FcfsPolicy(), [running]) == [(0, 1)]


class TestPriority:
    @pytest.mark.parametrize(
        ("requests", "options", "expected"),
        [
            pytest.param(
                [BE_DECODE, BE_PROMPT, RT_DECODE, RT_PROMPT, BE_NEW, RT_NEW],
                {"budget": 20},
                [(2, 1), (3, 4), (4, 3), (0, 1), (1, 5), (7, 5)],
                id="the whole order",
            ),
            pytest.param(
                [BE_DECODE, BE_PROMPT, RT_DECODE, RT_NEW, BE_NEW],
                {"budget": 8},
                [(2, 1), (4, 3), (0, 1), (1, 3)],
                id="the last prompt is cut",
            ),
            pytest.param(
                [BE_DECODE, RT_DECODE, RT_NEW],
                {"budget": 3},
                [(2, 1), (4, 2)],
                id="the budget ends inside a real-time prompt",
            ),
            pytest.param(
                [BE_DECODE, RT_NEW, RT_LATER],
                {"rows": 1},
                [(4, 3)],
                id="a real-time prompt without a row: nothing best-effort runs",
            ),
            pytest.param(
                [BE_DECODE, RT_DECODE, RT_NEW, BE_NEW],
                {"refused": [4]},
                [(2, 1)],
                id="a real-time prompt without memory: nothing best-effort runs",
            ),
            pytest.param(
                [BE_DECODE, BE_PROMPT, RT_NEW, RT_LATER, BE_NEW],
                {"rows": 1, "yielding": 2, "budget": 20},
                [(4, 3), (5, 4), (0, 1)],
                id="the last best-effort request yields its row",
            ),
            pytest.param(
                [BE_DECODE, BE_PROMPT, BE_NEW],
                {"max_be": 2, "budget": 20},
                [(0, 1), (1, 5)],
                id="most best-effort requests",
            ),
            pytest.param(
                [BE_NEW, make_request(8, BE, prompt=2)],
                {"refused": [7]},
                [(8, 2)],
                id="best-effort ones may be passed over",
            ),
        ],
    )
    def test_scenes(
        self, requests: list[Request], options: dict[str, Any], expected: list[tuple[int, int]]
    ) -> None:
        assert select(PriorityPolicy(), requests, **options) == expected

    def test_a_request_whose_frontend_lags_keeps_none_waiting(self) -> None:
        lagging = make_request(4)
        lagging.output_token_ids = [1] * 20
        lagging.num_acknowledged_tokens = 0
        assert select(PriorityPolicy(), [BE_DECODE, lagging]) == [(0, 1)]


class TestRoundRobin:
    RT_SIDE = (RT_DECODE, RT_PROMPT, RT_NEW)
    BE_SIDE = (BE_DECODE, BE_PROMPT, BE_NEW)

    @pytest.mark.parametrize(
        ("requests", "step_number", "options", "expected"),
        [
            pytest.param((*RT_SIDE, *BE_SIDE), 0, {}, [(2, 1), (3, 4), (4, 3)], id="even steps"),
            pytest.param((*RT_SIDE, *BE_SIDE), 7, {}, [(0, 1), (1, 5), (7, 4)], id="odd steps"),
            pytest.param(BE_SIDE, 2, {}, [(0, 1), (1, 5), (7, 4)], id="no real-time request"),
            pytest.param(RT_SIDE, 1, {}, [(2, 1), (3, 4), (4, 3)], id="no best-effort request"),
            pytest.param((RT_NEW, BE_NEW), 0, {"refused": [4]}, [(7, 5)], id="no start"),
            pytest.param(BE_SIDE, 1, {"max_be": 2}, [(0, 1), (1, 5)], id="best-effort limit"),
            pytest.param((RT_NEW, RT_LATER), 0, {"rows": 1}, [(4, 3)], id="rows"),
        ],
    )
    def test_scenes(
        self,
        requests: tuple[Request, ...],
        step_number: int,
        options: dict[str, Any],
        expected: list[tuple[int, int]],
    ) -> None:
        chosen = select(RoundRobinPolicy(), requests, step_number=step_number, **options)
        assert chosen == expected

    def test_classes_take_turns_in_a_run(self) -> None:
        """In the core, with one plan ahead, as long as both have something to do."""
        arrivals = [Arrival(0.0, 4, 8, 8), Arrival(0.0, 4, 8, 8, request_class=BE)]
        simulation = make_simulation(make_core("round-robin"))
        simulation.run(events_of(arrivals))
        first, second = (outcome.token_times_s for outcome in simulation.outcomes.values())
        served = sorted([*((t, RT) for t in first), *((t, BE) for t in second)])
        classes = [request_class for _, request_class in served]
        start = classes.index(BE)  # before it came, every turn was real-time's
        end = len(classes) - classes[::-1].index(RT)
        assert classes[start:end] == ([BE, RT] * 8)[: end - start]
        assert (classes[:start], classes[end:]) == ([RT] * start, [BE] * (len(classes) - end))
        assert end - start >= 10


class TestMlfq:
    YOUNG = make_request(0, output=10)
    OLD = make_request(1, output=200)
    SHORT = make_request(2, prompt=20)
    LONG = make_request(3, BE, prompt=2000)
    MIDDLE = make_request(4, BE, prompt=300)

    def test_queues(self) -> None:
        """A request is demoted as it grows; a long prompt skips the upper queues."""
        tokens = [1, 127, 128, 383, 384, 895, 896, 1919, 1920, 9000]
        queues = [queue_of(make_request(0, prompt=count)) for count in tokens]
        assert queues == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
        assert queue_of(make_request(0, prompt=100, output=27)) == 0
        assert queue_of(make_request(0, prompt=100, output=28)) == 1

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({"budget": 3000}, [(0, 1), (2, 20), (1, 1), (4, 300), (3, 2000)]),
            ({"budget": 100}, [(0, 1), (2, 20), (1, 1), (4, 78)]),
            ({"budget": 15}, [(0, 1), (2, 14)]),
            ({"budget": 3000, "rows": 2}, [(0, 1), (2, 20), (1, 1), (4, 300)]),
            ({"budget": 3000, "refused": [4]}, [(0, 1), (2, 20), (1, 1), (3, 2000)]),
            ({"budget": 3000, "max_be": 1}, [(0, 1), (2, 20), (1, 1), (4, 300)]),
        ],
    )
    def test_scenes(self, options: dict[str, Any], expected: list[tuple[int, int]]) -> None:
        requests = [self.OLD, self.YOUNG, self.LONG, self.MIDDLE, self.SHORT]
        assert select(MlfqPolicy(), requests, **options) == expected

    def test_who_was_overtaken_often_comes_first(self) -> None:
        starved = make_request(5, prompt=2000)
        starved.num_overtaken = MAX_OVERTAKEN
        chosen = select(MlfqPolicy(), [self.MIDDLE, starved], budget=2100)
        assert chosen == [(5, 2000), (4, 100)]

    def test_only_the_head_of_a_long_queue_is_looked_at(self) -> None:
        waiting = [make_request(number, prompt=500) for number in range(MAX_CANDIDATES)]
        late = make_request(900, prompt=3)
        assert select(MlfqPolicy(), [*waiting, late], rows=1) == [(0, 10)]
        assert select(MlfqPolicy(), [*waiting[1:], late], rows=1) == [(900, 3)]


class TestBestEffortLimit:
    """Class-blind policies: who is best-effort waits at the limit, others behind it do not."""

    SCENE = (
        make_request(0, BE, output=2),
        make_request(1, BE, prompt=2),
        make_request(2, BE, prompt=3),
        make_request(3, RT, prompt=4),
        make_request(4, BE, prompt=1),
    )

    @pytest.mark.parametrize(
        ("max_be", "expected"),
        [(1, [3]), (2, [1, 3]), (3, [1, 2, 3]), (4, [1, 2, 3, 4])],
    )
    def test_newcomers(self, max_be: int, expected: list[int]) -> None:
        for policy in (ChunkedPolicy(), FcfsPolicy(), MlfqPolicy()):
            chosen = select(policy, self.SCENE, budget=30, max_be=max_be)
            assert [number for number, _ in chosen if number] == expected

    def test_one_that_was_refused_does_not_count(self) -> None:
        chosen = select(ChunkedPolicy(), self.SCENE, budget=30, max_be=2, refused=[1])
        assert [number for number, _ in chosen] == [0, 2, 3]


def test_shortest_prompts_first() -> None:
    """Real-time ones; best-effort ones behind them, as they came."""
    requests = [
        make_request(0, BE, prompt=1),
        make_request(1, prompt=30),
        make_request(2, prompt=10),
        make_request(3, prompt=20),
        make_request(4, prompt=50, output=3),
        make_request(5, prompt=40, computed=10),
    ]
    chosen = select(SjfPolicy(), requests, budget=70)
    assert chosen == [(4, 1), (5, 30), (2, 10), (3, 20), (1, 9)]
    assert select(SjfPolicy(), requests, budget=100)[-2:] == [(1, 30), (0, 1)]
