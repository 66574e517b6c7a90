"""The unified planner's order and limits, in scenes with a cost model of round numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support.policy_scenes import (
    BE,
    RT,
    Admitting,
    Queue,
    filled,
    loading,
    make_limits,
    make_request,
    running_of,
)

from lightserve.messages.common import GraphSizes, StepCoefficients
from lightserve.router.arrivals import IDLE_LIMIT_S, NO_OUTLOOK, Outlook
from lightserve.router.policies.base import Step
from lightserve.router.policies.step_budget import CopyTimes
from lightserve.router.policies.unified import UnifiedOptions, UnifiedPolicy
from lightserve.router.queue import MIN_CHUNK, WaitingQueue
from lightserve.router.request import FoundOf, Request, progress
from lightserve.router.slo import TokenDeadlines
from lightserve.router.step import Reason
from lightserve.router.step_cost import StepCost, StepShape
from lightserve.types import SLO

MS_PER_TOKEN = 1e-4
NOW_S = 1000.0


@pytest.fixture(scope="module")
def cost() -> StepCost:
    """Steps take 0.1 ms per token, whatever the context; nothing varies, so the guard is 1."""
    model = StepCost()
    for _ in range(4):
        for exponent in range(12):
            model.observe(StepShape(num_new=2**exponent), MS_PER_TOKEN * 2**exponent)
    return model


def due(request: Request, residual_ms: float) -> Request:
    """Let a request's next token be due so long after the step starts."""
    request.slo = SLO(ttft_ms=residual_ms, tpot_ms=residual_ms)
    request.deadlines = TokenDeadlines(SLO(ttft_ms=residual_ms), NOW_S)
    return request


def play(
    cost: StepCost,
    running: list[Request],
    waiting: list[Request] | None = None,
    *,
    budget: int = 2048,
    step_number: int = 1,
    num_free_rows: int = 8,
    refused: tuple[int, ...] = (),
    num_slots: int = 100_000,
    copy_ms: float = 0.0,
    found: FoundOf = progress,
    into: list[Step] | None = None,
    late_min_share: float = 0.1,
    outlook: Outlook = NO_OUTLOOK,
    average_step_s: float = 0.0,
) -> dict[int, int]:
    in_rows = running_of(running)

    def copies_s(num_tokens: int) -> float:
        return num_tokens * copy_ms / 1e3

    limits = make_limits(
        max_num_batched_tokens=budget,
        num_free_rows=num_free_rows,
        step_number=step_number,
        num_slots=num_slots,
        start_s=NOW_S,
        cost=cost,
        copies=CopyTimes(
            lambda num_tokens: num_tokens * copy_ms / 1e3,
            lambda num_tokens: num_tokens * copy_ms / 1e3,
        ),
        outlook=outlook,
        average_step_s=average_step_s,
    )
    policy = UnifiedPolicy(UnifiedOptions(late_min_share=late_min_share))
    late = [r for r in waiting or [] if r.deadlines and r.deadlines.residual(NOW_S) <= 0]
    step = filled(
        policy, in_rows, Queue(waiting or [], late), limits, Admitting(refused), found=found
    )
    if into is not None:
        into.append(step)
    return {request.arrival_number: count for request, count in step.budget.parts}


def decode(number: int, residual_ms: float) -> Request:
    return due(make_request(number, output=5), residual_ms)


def test_a_chunk_fills_the_time_to_the_nearest_deadline(cost: StepCost) -> None:
    """Dynamic chunks: 30 ms are 300 tokens, of which two are the decodes."""
    running = [decode(0, 200), decode(1, 30)]
    shares = play(cost, running, [due(make_request(2, prompt=1000), 400)])
    assert shares[0] == shares[1] == 1
    assert shares[2] == pytest.approx(298, abs=3)


def test_a_late_decode_does_not_shorten_the_step(cost: StepCost) -> None:
    """One that cannot be met any more would shrink every batch to nothing."""
    running = [decode(0, -5), decode(1, 50)]
    shares = play(cost, running, [due(make_request(2, prompt=1000), 400)])
    assert shares[2] == pytest.approx(498, abs=5)


def late_decode(number: int, late_ms: float, *, tpot_ms: float) -> Request:
    """Its last token has just come, and it is so far behind its mean that the next one is late."""
    request = make_request(number, output=5)
    request.slo = SLO(tpot_ms=tpot_ms, mtpot_ms=1000)
    request.deadlines = TokenDeadlines(request.slo, NOW_S)
    request.deadlines.on_tokens(1, NOW_S - 1)
    request.deadlines.on_tokens(1, NOW_S - late_ms / 1e3)
    assert request.deadlines.residual(NOW_S) < 0
    return request


def test_a_token_that_will_be_late_is_due_as_if_none_had_been(cost: StepCost) -> None:
    """Its last one came 50 ms ago: of 60 ms there are 10; of 40 none, so it sets no limit."""
    prompt = make_request(2, prompt=1000, request_class=BE)
    assert play(cost, [late_decode(0, 50, tpot_ms=60)], [prompt])[2] == pytest.approx(98, abs=3)
    shares = play(cost, [late_decode(0, 50, tpot_ms=40)], [prompt])
    assert shares[2] > 500


def test_doubts_about_the_prediction_make_no_step_longer() -> None:
    """300 tokens take 15 ms and 45 ms by turns."""
    doubtful = StepCost()
    for factor in (0.5, 1.5) * 24:
        for exponent in range(9):
            doubtful.observe(StepShape(num_new=2**exponent), factor * MS_PER_TOKEN * 2**exponent)
    many = [decode(number, 40) for number in range(300)]
    predicted_s = doubtful.seconds(StepShape(num_new=300, num_decodes=300))
    assert predicted_s < 0.04 < doubtful.guard * predicted_s
    prompt = make_request(900, prompt=1000, request_class=BE)
    assert 900 not in play(doubtful, many, [prompt], num_free_rows=400)


def test_doubts_leave_out_nothing_that_takes_no_time() -> None:
    """Up to a knee of 64 tokens a step takes 6 ms, perhaps 18: decodes below it are free."""
    doubtful = StepCost()
    for factor in (0.1, 1.9) * 24:
        for exponent in range(9):
            num_new = 2**exponent
            doubtful.observe(StepShape(num_new=num_new), factor * 2e-2 * max(1.0, num_new / 64))
    others = [decode(number, 1e6) for number in range(1, 8)]
    for other in others:
        other.request_class = BE
    shares = play(doubtful, [decode(0, 10), *others])
    assert doubtful.guard > 2
    assert set(shares) == set(range(8))


def test_a_prompt_that_ends_in_the_step_counts_with_its_own_deadline(cost: StepCost) -> None:
    waiting = [due(make_request(2, prompt=100), 20), due(make_request(3, prompt=1000), 400)]
    shares = play(cost, [decode(0, 100)], waiting)
    assert shares[2] == 100
    assert shares[3] == pytest.approx(99, abs=3), "20 ms in all"


def test_prompts_that_can_be_in_time_go_before_late_ones(cost: StepCost) -> None:
    late = due(make_request(1, prompt=600, computed=50), -10)
    in_time = due(make_request(2, prompt=600, computed=50), 80)
    shares = play(cost, [late, in_time], budget=550)
    assert shares == {2: 550}
    shares = play(cost, [late, in_time], budget=550, step_number=10)
    assert shares == {1: 550}, "a share of the time is theirs"


def holding(running: list[Request]) -> list[Request]:
    """Give slots to requests."""
    for request in running:
        request.slots = np.zeros(request.max_known_tokens, dtype=np.int32)
    return running


def test_late_newcomers_leave_memory_to_arrivals(cost: StepCost) -> None:
    running = holding([decode(0, 100), decode(1, 100)])
    in_time, late = due(make_request(2, prompt=20), 90), due(make_request(3, prompt=20), -10)
    both = [in_time, late]
    steps: list[Step] = []
    assert set(play(cost, running, both, late_min_share=0.0)) == {0, 1, 2, 3}
    shares = play(cost, running, both, num_slots=20, late_min_share=0.0, into=steps)
    assert set(shares) == {0, 1, 2}
    assert steps[0].skips.stopped_by[RT] is Reason.ORDER


def test_late_newcomers_have_a_share_of_the_steps(cost: StepCost) -> None:
    """One starts first in each tenth step if fewer than a tenth of those that run are late."""
    running = holding([decode(number, 100) for number in range(9)])
    for request in running:
        assert request.deadlines is not None
        request.deadlines.kept.is_first_met = True
    waiting = [due(make_request(21, prompt=20), 90), due(make_request(22, prompt=20), -10)]

    def newcomers(**options: float) -> list[int]:
        shares = play(cost, running, waiting, num_slots=30, **options)  # type: ignore[arg-type]
        return [number for number in shares if number > 20]

    assert newcomers() == [21]
    assert newcomers(step_number=10) == [22, 21]
    assert newcomers(step_number=5) == [21]
    assert newcomers(step_number=5, late_min_share=0.2) == [22, 21]
    assert newcomers(step_number=10, late_min_share=0.0) == [21]
    assert running[0].deadlines is not None
    running[0].deadlines.kept.is_first_met = False
    assert newcomers(step_number=10) == [21], "one of nine is late already"
    running[0].deadlines.kept.is_first_met = True


def test_in_overload_late_requests_have_what_they_can_use_of_their_share(cost: StepCost) -> None:
    """A tenth of the time serves a fifth of the half that is too much: then a fiftieth at most."""
    late = due(make_request(1, prompt=600, computed=50), -10)
    in_time = due(make_request(2, prompt=600, computed=50), 80)

    def turns(load: float, *, late_min_share: float = 0.1) -> list[int]:
        options = {"outlook": Outlook(load), "late_min_share": late_min_share}
        return [
            number
            for number in range(10, 241, 10)
            if 1 in play(cost, [late, in_time], budget=550, step_number=number, **options)  # type: ignore[arg-type]
        ]

    assert turns(0.5) == turns(1.05) == list(range(10, 241, 10))
    assert turns(1.15) == list(range(20, 241, 20))
    assert turns(1.5) == [80, 160, 240]
    assert turns(1.5, late_min_share=0.5) == list(range(10, 241, 10))
    assert turns(1.5, late_min_share=0.0) == []


def test_who_cannot_be_in_time_does_not_hold_up_who_can(cost: StepCost) -> None:
    """Though it is not late yet, and due first."""
    hopeless = due(make_request(2, prompt=1000), 50)
    shares = play(cost, [decode(0, 300)], [hopeless, due(make_request(3, prompt=400), 60)])
    assert list(shares) == [0, 3, 2]
    assert shares[3] == 400


def test_where_much_time_is_free_best_effort_goes_on_beyond_what_is_lent() -> None:
    """Real-time requests hold most of the pool, so that next to nothing of the time is lent."""
    cost = StepCost()
    cost.use_profile(StepCoefficients(1e-2, 64.0, 1e-4, 0.0, 0.0, 1e-5, 0.0, 0.0))
    real_time = holding([decode(number, 1000) for number in range(10)])
    best_effort = [make_request(20 + n, BE, prompt=100, output=5) for n in range(10)]
    newcomer = make_request(40, BE, prompt=1000)

    def share_of_best_effort(load: float) -> tuple[int, int]:
        shares = play(
            cost, [*real_time, *best_effort], [newcomer], num_slots=130, outlook=Outlook(load)
        )
        assert all(shares[number] == 1 for number in range(10))
        return sum(20 <= number < 40 for number in shares), shares.get(40, 0)

    num_decodes, num_tokens = share_of_best_effort(0.4)
    assert num_decodes == 3, "of 1 ms each: 35 % of the 11.2 ms of the others"
    assert num_tokens == pytest.approx(64 - 13, abs=2), "up to the knee they are free"
    assert share_of_best_effort(0.8) == (0, 0), "2 % of the 11.2 ms are all that is lent"


@pytest.mark.parametrize("num_prompt", [71, 100, 119])
def test_best_effort_has_what_workers_pad_a_step_with(num_prompt: int) -> None:
    """Nothing is lent, and doubts are such that the step as it is may take all of its limit."""
    cost, shares = StepCost(), []
    coefficients = StepCoefficients(1e-2, 0.0, 1e-4, 0.0, 0.0, 0.0, 0.0, 1e-9)
    running = holding([decode(number, 40) for number in range(9)])
    waiting = [due(make_request(10, prompt=num_prompt), 400), make_request(20, BE, prompt=1000)]
    for sizes in ((), (64, 128, 256)):
        cost.use_workers(coefficients, GraphSizes(mixed=sizes))
        for factor in (0.3, 1.7) * 24:
            shape = StepShape().plus_decodes(9, 9).plus(0, num_prompt)
            cost.observe(shape, factor * cost.seconds(shape))
        step = play(cost, running, waiting, outlook=Outlook(1.0), num_slots=117)
        assert step[10] == num_prompt
        shares.append(step.get(20, 0))
    room = 128 - 9 - num_prompt
    assert shares == [0, room if room >= MIN_CHUNK else 0]


def test_padding_is_no_reason_to_be_late() -> None:
    """A chunk costs 1 % of the step; a token is due before that."""
    cost = StepCost()
    cost.use_workers(
        StepCoefficients(1e-2, 0.0, 1e-4, 0.0, 2e-4, 0.0, 0.0, 0.0), GraphSizes(mixed=(64, 128))
    )
    waiting = [due(make_request(10, prompt=80), 400), make_request(20, BE, prompt=1000)]
    step_s = cost.seconds(StepShape().plus(10, 1).plus(0, 80))
    for room_s, num_tokens in ((1e-6, 0), (3e-4, 128 - 81)):
        running = holding([decode(0, (step_s + room_s) * 1e3)])
        step = play(cost, running, waiting, outlook=Outlook(1.0), num_slots=13)
        assert (step[10], step.get(20, 0)) == (80, num_tokens)


def test_best_effort_gets_the_rest_of_the_time(cost: StepCost) -> None:
    running = [decode(0, 40), make_request(5, BE, output=3), make_request(6, BE, output=3)]
    shares = play(cost, running, [make_request(7, BE, prompt=5000)])
    assert shares[5] == shares[6] == 1
    assert shares[7] == pytest.approx(397, abs=4)


def test_without_deadlines_a_step_leaves_room_for_an_arrival(cost: StepCost) -> None:
    shares = play(cost, [], [make_request(7, BE, prompt=5000)])
    assert shares[7] == pytest.approx(IDLE_LIMIT_S / MS_PER_TOKEN, rel=0.02)


def test_real_time_without_targets_is_not_limited(cost: StepCost) -> None:
    assert play(cost, [], [make_request(1, prompt=5000)]) == {1: 2048}


def test_a_long_prompt_leaves_room_for_an_arrival_that_has_targets() -> None:
    """It fills 0.3 of the tightest time to a first token; but always 7 times the constant."""
    cost = StepCost()
    cost.use_profile(StepCoefficients(1e-2, 60.0, 1e-4, 0.0, 0.0, 0.0, 0.0, 0.0))

    def num_tokens(ttft_s: float, due_ms: float = 9000, *, slack_s: float = math.inf) -> int:
        running = [decode(number, 5000) for number in range(100)]
        prompt = due(make_request(200, prompt=5000), due_ms)
        outlook = Outlook(ttft_s=ttft_s, slack_s=slack_s)
        return play(cost, [*running, prompt], outlook=outlook)[200]

    assert num_tokens(0.4) == pytest.approx(1200 - 100 - 40, abs=2)
    few = MIN_CHUNK + 280
    assert num_tokens(0.08) == pytest.approx(few, abs=2), "7 * 4 ms beside the decodes, not 6 ms"
    assert num_tokens(0.08, slack_s=-1.0) == num_tokens(0.08)
    assert num_tokens(math.inf) == 2048 - 100
    assert num_tokens(0.08, 575) == 2048 - 100, "it has 33 ms to spare"
    assert num_tokens(0.08, 500) == pytest.approx(few, abs=2), "late in any case"


def test_no_context_is_so_long_that_a_prompt_stands_still_for_arrivals() -> None:
    """Of some contexts a chunk takes longer than what arrivals are to wait for."""
    cost = StepCost()
    cost.use_profile(StepCoefficients(0.0, 0.0, 1e-4, 0.0, 0.0, 0.0, 1e-5, 1e-8))
    running = [decode(number, 5000) for number in range(100)]
    prompt = due(make_request(200, prompt=95_000, computed=90_000), 60_000)
    assert play(cost, [*running, prompt], outlook=Outlook(ttft_s=0.1))[200] == MIN_CHUNK


@pytest.mark.parametrize("reason", ["time", "memory", "budget"])
def test_best_effort_while_a_real_time_prompt_waits(cost: StepCost, reason: str) -> None:
    running = [decode(0, 30), make_request(5, BE, output=3)]
    waiting = [due(make_request(2, prompt=1000), 400), make_request(7, BE, prompt=50)]
    shares = play(
        cost,
        running,
        waiting,
        budget=40 if reason == "budget" else 2048,
        refused=(2,) if reason == "memory" else (),
    )
    assert 7 not in shares, "newcomers would take memory as well"
    assert (5 in shares) == (reason == "memory"), "running ones have the time that no other can use"


def test_best_effort_yields_time_as_real_time_fills_the_pool(cost: StepCost) -> None:
    real_time = make_request(0, prompt=600, output=1)
    real_time.slots = np.zeros(2000, dtype=np.int32)
    assert real_time.num_held_tokens == 600
    waiting = [make_request(7, BE, prompt=5000)]
    shares = [
        play(cost, [due(real_time, 500)], waiting, num_slots=num_slots).get(7, 0)
        for num_slots in (100_000, 1000, 860, 720, 600)
    ]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 900 and shares[-1] == 0


def test_scraps_of_prompts_are_not_worth_a_row(cost: StepCost) -> None:
    running = [decode(0, 1.0), *(decode(i, 500) for i in range(1, 4))]
    assert play(cost, running, [due(make_request(9, prompt=1000), 400)]) == {0: 1, 1: 1, 2: 1, 3: 1}
    short = due(make_request(9, prompt=MIN_CHUNK // 4), 400)
    assert play(cost, running, [short])[9] == MIN_CHUNK // 4


def test_who_resumes_brings_the_time_of_its_copies(cost: StepCost) -> None:
    """Each of ten would add a single token, and 10 ms of loads; the fifth gets a part of these."""
    resuming = []
    for number in range(10):
        request = make_request(10 + number, BE, prompt=501)
        request.num_computed_tokens = 500
        resuming.append(request)
    found = loading(dict.fromkeys(resuming, 100))
    free = play(cost, [decode(0, 45)], resuming, num_free_rows=20, found=found)
    assert len(free) == 11
    dear = play(cost, [decode(0, 45)], resuming, num_free_rows=20, copy_ms=0.1, found=found)
    assert [count == 1 for count in dear.values()] == [True] * 5 + [False]
    assert 0 < dear[14] < 100


def test_late_requests_wait_behind_those_that_are_not() -> None:
    queue = WaitingQueue()
    requests = [make_request(number) for number in range(4)]
    for request, residual_ms in zip(requests, (10.0, 20.0, 500.0, 600.0), strict=True):
        queue.append(due(request, residual_ms))
    queue.sink_late(NOW_S + 0.1)
    assert [r.arrival_number for r in queue.real_time()] == [2, 3, 0, 1]
    assert len(queue) == 4
    queue.admit(requests[0])
    queue.remove(requests[1])
    assert [r.arrival_number for r in queue.real_time()] == [2, 3] and len(queue) == 2
    with pytest.raises(KeyError):
        queue.remove(requests[1])


def test_a_prompt_of_many_steps_computes_the_decodes_of_each(cost: StepCost) -> None:
    """200 decodes leave 56 tokens of a step: 560 take ten steps of 25.6 ms, not one of 76 ms."""
    running = [decode(number, 10_000) for number in range(200)]
    long = due(make_request(300, prompt=560), 150)
    short = due(make_request(301, prompt=56), 200)
    shares = play(cost, running, [long, short], budget=256, num_free_rows=8)
    assert shares[301] == 56 and 300 not in shares
    in_time = due(make_request(302, prompt=560), 300)
    later = due(make_request(303, prompt=56), 320)
    assert play(cost, running, [in_time, later], budget=256)[302] == 56


def test_the_longest_gives_way_where_not_all_can_be_in_time(cost: StepCost) -> None:
    """Three of 10 ms can be in time, one of 40 ms that came before them with any of them cannot."""
    waiting = [due(make_request(0, prompt=400), 45)]
    waiting += [due(make_request(1 + number, prompt=100), 46) for number in range(3)]
    shares = play(cost, [], waiting, budget=450)
    assert shares == {1: 100, 2: 100, 3: 100, 0: 150}
    waiting[0] = due(make_request(0, prompt=100), 45)
    assert play(cost, [], waiting, budget=150) == {0: 100, 1: 50}, "by deadline while all can"


def test_short_memory_is_no_reason_to_go_by_length_while_it_comes_in_time(cost: StepCost) -> None:
    """Two decodes free 2 / 0.01 s times as much as one does; 130 slots more are needed."""
    running = [decode(number, 1000) for number in range(2)]
    waiting = [due(make_request(7, prompt=100), 300), due(make_request(8, prompt=50), 400)]

    def order(freed_per_decode: float) -> list[int]:
        outlook = Outlook(freed_per_decode=freed_per_decode)
        shares = play(cost, running, waiting, num_slots=25, outlook=outlook, average_step_s=0.01)
        return [number for number in shares if number > 1]

    assert order(3.0) == [7, 8], "all of it in 0.22 s"
    assert order(1.5) == [8, 7], "0.43 s"
    assert order(0.0) == [8, 7], "nothing is known"


def test_without_targets_no_prompt_is_passed_by_shorter_ones(cost: StepCost) -> None:
    """Though there is no memory for all: they could go on coming for ever."""
    waiting = [make_request(0, prompt=400), *(make_request(1 + n, prompt=10) for n in range(60))]
    assert list(play(cost, [], waiting, budget=450, num_slots=600)) == [0, 1, 2, 3, 4, 5]
    for request in waiting:
        due(request, 1e6)
    assert 0 not in play(cost, [], waiting, budget=450, num_slots=600), "with targets they may"
