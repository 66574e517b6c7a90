"""Shares of keys and of clients behind them, and quotas: in virtual time, by the real core."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from support.core_scenes import Arrival, make_core, pack_results, step_time, submit

from lightserve.messages.frontend_router import Client, ErrorCode
from lightserve.messages.images import DIGEST_BYTES, Image, without_pixels
from lightserve.messages.router_worker import RowResult, plan_rows
from lightserve.router.accounts import (
    MAX_ACCOUNTS,
    OUTPUT_WEIGHT,
    Account,
    Accounts,
    Refusal,
)
from lightserve.router.events import FromFrontend, WorkersReady
from lightserve.router.scheduler import Scheduler
from lightserve.router.step import PlannedStep
from lightserve.sim.simulation import Outcome, Simulation, TimedEvent
from lightserve.sim.worker import SimulatedWorker
from lightserve.types import SLO, FrontendId, RequestClass, RequestId, RequestKey

RT, BE = RequestClass.RT, RequestClass.BE
ALICE, BOB, CAROL = Client(key="a"), Client(key="b"), Client(key="c")
SLOTS = 4000
TARGETS = SLO(ttft_ms=300.0, tpot_ms=40.0, mtpot_ms=200.0)


def accounts_of(*clients: Client) -> list[Account]:
    accounts = Accounts()
    return [accounts.find(client, RT) for client in clients]


# ---------------------------------------------------------------- counters


def test_what_is_computed_counts_for_an_account_and_its_key() -> None:
    one, two = accounts_of(Client(key="g", fairness_id="1"), Client(key="g", fairness_id="2"))
    one.charge(10, 3)
    weight = 10 + 3 * OUTPUT_WEIGHT
    assert one.rank == (weight, weight) and two.rank == (weight, 0.0)


def test_one_that_comes_back_has_saved_up_nothing() -> None:
    alice, bob, carol = accounts_of(ALICE, BOB, CAROL)
    for account in (alice, bob):
        account.wait(5)
    alice.charge(100, 0)
    bob.charge(40, 0)
    carol.wait(5)
    assert carol.rank[0] == 40.0  # the least of those that wait
    carol.leave(5)
    carol.charge(1000, 0)
    bob.leave(5)
    alice.leave(5)
    bob.wait(5)
    assert bob.rank[0] == 100.0  # what the last that waited had
    carol.wait(5)
    assert carol.rank[0] == 1040.0  # and what one had too much it still has


def test_accounts_without_requests_are_bounded() -> None:
    accounts = Accounts()
    busy = accounts.find(Client(key="g", fairness_id="busy"), RT)
    busy.hold()
    busy.charge(7, 0)
    for number in range(3 * MAX_ACCOUNTS):
        found = accounts.find(Client(key="g", fairness_id=str(number)), RT)
        found.hold()
        found.release()
    assert len(busy.key.members) == MAX_ACCOUNTS
    assert accounts.find(Client(key="g", fairness_id="busy"), RT) is busy


# ---------------------------------------------------------------- shares


def arrival(time_s: float, request_class: RequestClass, prompt: int, output: int) -> Arrival:
    return Arrival(time_s, prompt, output, output + 8, request_class=request_class)


def poisson(rng: random.Random, rate_rps: float, until_s: float) -> list[float]:
    gaps = iter(lambda: rng.expovariate(rate_rps), None)
    times = itertools.accumulate(gaps)
    return list(itertools.takewhile(lambda time_s: time_s < until_s, times))


def events_of(
    arrivals: Sequence[tuple[Client, Arrival]], **fields: Any
) -> tuple[list[TimedEvent], dict[RequestKey, Client]]:
    events, whose = [], {}
    for number, (client, each) in enumerate(sorted(arrivals, key=lambda pair: pair[1].time_s)):
        slo = {"slo": TARGETS} if each.request_class is RT else {}
        message = submit(number, each, client=client, prompt=[3 + number] * each.num_prompt, **slo)
        events.append(TimedEvent(each.time_s, FromFrontend(FrontendId(0), message)))
        whose[RequestKey(FrontendId(0), RequestId(number))] = client
    return events, whose


def simulated(core: Scheduler) -> Simulation:
    worker = SimulatedWorker(num_slots=SLOTS, max_num_seqs=32, max_model_len=256)
    return Simulation(core, worker, step_time, WorkersReady(SLOTS))


def new_core(**options: Any) -> Scheduler:
    return make_core("unified", budget=128, max_model_len=256, max_num_seqs=32, **options)


def is_met(outcome: Outcome) -> bool:
    """Whether a real-time request was answered in time."""
    times = outcome.token_times_s
    if outcome.error is not None or not times:
        return False
    is_first_met = times[0] - outcome.arrival_s <= TARGETS.ttft_ms / 1e3
    mean_s = (times[-1] - times[0]) / max(1, len(times) - 1)
    return is_first_met and mean_s <= TARGETS.tpot_ms / 1e3


def attainments(arrivals: Sequence[tuple[Client, Arrival]], **options: Any) -> dict[Client, float]:
    """The share of each one's requests that were answered in time."""
    events, whose = events_of(arrivals)
    simulation = simulated(new_core(**options))
    simulation.run(events)
    met: dict[Client, list[bool]] = {}
    for key, outcome in simulation.outcomes.items():
        met.setdefault(whose[key], []).append(is_met(outcome))
    return {client: sum(of_one) / len(of_one) for client, of_one in met.items()}


def real_time(rng: random.Random, client: Client, rate_rps: float, until_s: float) -> Any:
    return [
        (client, arrival(time_s, RT, rng.randint(10, 60), rng.randint(5, 30)))
        for time_s in poisson(rng, rate_rps, until_s)
    ]


@pytest.mark.parametrize("max_waiting", [1000, 20])
def test_a_flood_of_one_key_leaves_another_its_attainment(max_waiting: int) -> None:
    """With a queue that has room for the flood, and with one that is full of it."""
    rng = random.Random(1)
    bob = real_time(rng, BOB, 8.0, 8.0)
    flood = real_time(rng, ALICE, 60.0, 8.0)
    beside = attainments([*bob, *flood], max_waiting=max_waiting)
    assert len(bob) > 50 and attainments(bob) == {BOB: 1.0}
    assert beside[BOB] >= 0.98 and beside[ALICE] < 0.7


def test_best_effort_keys_share_what_there_is() -> None:
    """Two that want more than there is have as much each, though one asks for thrice as much; one
    that wants little has it about as soon as alone."""
    rng = random.Random(2)
    jobs = [
        (client, arrival(0.0, BE, rng.randint(20, 60), rng.randint(10, 40)))
        for client, count in ((ALICE, 900), (BOB, 300))
        for _ in range(count)
    ]
    core = new_core(max_waiting=10_000)
    events, whose = events_of(jobs)
    simulation = simulated(core)
    simulation.run(events, until_s=6.0)
    had = dict.fromkeys((ALICE, BOB), 0.0)
    for key, outcome in simulation.outcomes.items():
        had[whose[key]] += len(outcome.token_ids)
    assert 0.8 < had[BOB] / had[ALICE] < 1.25

    late = [*jobs[:900], (CAROL, arrival(2.0, BE, 30, 10))]
    events, whose = events_of(late)
    simulation = simulated(new_core(max_waiting=10_000))
    simulation.run(events, until_s=6.0)
    (mine,) = [outcome for key, outcome in simulation.outcomes.items() if whose[key] is CAROL]
    assert mine.finish_reason is not None and mine.token_times_s[-1] - 2.0 < 3.0


def test_clients_behind_a_gateway_share_what_its_key_has() -> None:
    """Three of them beside one other key: this has half, each of them a sixth."""
    rng = random.Random(3)
    behind = [Client(key="g", fairness_id=name) for name in "123"]
    jobs = [
        (client, arrival(0.0, BE, rng.randint(20, 60), rng.randint(10, 40)))
        for client in (*behind, ALICE)
        for _ in range(200)
    ]
    events, whose = events_of(jobs)
    simulation = simulated(new_core(max_waiting=10_000))
    simulation.run(events, until_s=8.0)
    had = dict.fromkeys((*behind, ALICE), 0.0)
    for key, outcome in simulation.outcomes.items():
        had[whose[key]] += len(outcome.token_ids)
    total = sum(had.values())
    assert had[ALICE] / total == pytest.approx(1 / 2, abs=0.06)
    for client in behind:
        assert had[client] / total == pytest.approx(1 / 6, abs=0.04)


def test_a_full_queue_makes_room_for_the_one_that_has_least_of_it() -> None:
    core = new_core(max_waiting=4)

    def send(number: int, client: Client) -> dict[int, ErrorCode | None]:
        message = submit(number, arrival(0.0, RT, 10, 5), client=client)
        news = core.on_message(FromFrontend(FrontendId(0), message), 0.0)
        return {delta.request_id: delta.error for each in news for delta in each.message.requests}

    for number in range(4):
        assert send(number, ALICE) == {}
    assert send(4, ALICE) == {4: ErrorCode.QUEUE_FULL}
    assert send(5, BOB) == {3: ErrorCode.QUEUE_FULL}  # the newest of what has most
    assert send(6, BOB) == {2: ErrorCode.QUEUE_FULL}
    assert send(7, BOB) == {7: ErrorCode.QUEUE_FULL}  # they have as much
    assert send(8, CAROL) == {1: ErrorCode.QUEUE_FULL}
    core.check_integrity()


def test_with_one_key_nothing_is_counted_and_nothing_reordered() -> None:
    rng = random.Random(4)
    jobs = real_time(rng, ALICE, 40.0, 2.0)
    jobs += [(ALICE, arrival(0.1 * n, BE, rng.randint(20, 60), 20)) for n in range(20)]
    plans = []
    for client in (Client(), ALICE):
        events, _ = events_of([(client, each) for _, each in jobs])
        core = new_core()
        simulation = simulated(core)
        simulation.run(events)
        plans.append([outcome.token_times_s for outcome in simulation.outcomes.values()])
        account = core._accounts.find(client, RT)
        assert account.rank == (0.0, 0.0)
    assert plans[0] == plans[1]


# ---------------------------------------------------------------- quotas


def ask(core: Scheduler, number: int, client: Client, now_s: float, **fields: Any) -> Any:
    """Send a request; return why it is refused, if it is."""
    message = submit(number, arrival(now_s, RT, 10, 5), client=client, **fields)
    news = core.on_message(FromFrontend(FrontendId(0), message), now_s)
    return next((delta for each in news for delta in each.message.requests), None)


def test_a_key_may_send_so_many_requests_in_a_minute() -> None:
    core, client = new_core(), Client(key="a", requests_per_minute=6)
    for number in range(6):
        assert ask(core, number, client, 0.0) is None
        assert ask(core, 100 + number, client, 0.0, is_first=False) is None  # another choice of it
    refused = ask(core, 6, client, 0.0)
    assert refused.error is ErrorCode.REQUEST_QUOTA
    assert refused.retry_after_s == pytest.approx(10.0)
    assert ask(core, 7, BOB, 0.0) is None
    assert ask(core, 8, client, 9.9).error is ErrorCode.REQUEST_QUOTA
    assert ask(core, 9, client, 10.1) is None
    assert ask(core, 10, client, 10.1).error is ErrorCode.REQUEST_QUOTA
    core.check_integrity()


def test_what_had_to_leave_the_queue_counts_against_no_quota() -> None:
    """Its first token is late when the next one comes."""
    core, client = new_core(max_waiting=1), Client(key="a", requests_per_minute=6)
    for number in range(9):
        now_s = 0.2 * number
        core._waiting.sink_late(now_s)  # as after each step
        news = ask(core, number, client, now_s, slo=SLO(ttft_ms=100))
        if number:
            assert (news.request_id, news.error) == (number - 1, ErrorCode.QUEUE_FULL)
    core.check_integrity()


def test_a_key_may_have_so_many_tokens_in_a_minute() -> None:
    """Prompts as they come and answers as they are generated."""
    core = new_core()
    client = Client(key="a", tokens_per_minute=15)
    simulation = simulated(core)
    message = submit(0, arrival(0.0, BE, 10, 5), client=client)
    simulation.run([TimedEvent(0.0, FromFrontend(FrontendId(0), message))])
    now_s = simulation.now_s
    refused = ask(core, 1, client, now_s)
    assert refused.error is ErrorCode.TOKEN_QUOTA
    assert 0.0 < refused.retry_after_s <= 60.0
    assert ask(core, 2, client, now_s + refused.retry_after_s + 0.01) is None
    assert ask(core, 3, client, now_s + 300.0) is None


def test_what_came_without_a_quota_does_not_count_against_one_that_is_set_later() -> None:
    """The file of keys is read again while the server runs."""
    core = new_core()
    for number in range(50):
        assert ask(core, number, Client(key="a", tokens_per_minute=10**6), float(number)) is None
    limited = Client(key="a", requests_per_minute=2, tokens_per_minute=10**6)
    assert ask(core, 50, limited, 50.0) is None
    assert ask(core, 51, limited, 50.0) is None
    assert ask(core, 52, limited, 50.0) is not None


# ---------------------------------------------------------------- before they come


@pytest.mark.parametrize("seed", range(4))
def test_a_request_is_told_before_it_comes_how_it_would_be_refused(seed: int) -> None:
    """Whatever queue, quotas, keys and memory are, by the same decision; a core that was not asked
    goes on as one that was."""
    rng = random.Random(seed)
    asked, other = (new_core(max_waiting=5, max_parameter_bytes=9000) for _ in range(2))
    for core in (asked, other):
        core.on_message(WorkersReady(SLOTS, 0), 0.0)
    quota = {"requests_per_minute": 20, "tokens_per_minute": 9000}
    clients = [ALICE, BOB, Client(key="q", **quota), Client(key="t", tokens_per_minute=900)]
    told: Counter[ErrorCode | None] = Counter()
    now_s = 0.0
    for number in range(500):
        now_s += rng.expovariate(20.0)
        behind = Client(key="g", fairness_id=str(rng.randrange(3)))
        fields: dict[str, Any] = {"client": rng.choice([*clients, behind])}
        request_class = rng.choice([RT, BE])
        if request_class is RT and rng.random() < 0.7:
            fields["slo"] = SLO(ttft_ms=rng.choice([50.0, 500.0, 5000.0]))
        length = rng.choice([9, 12, 30, 45, 60, 80, 250])
        if rng.random() < 0.3:
            side = rng.choice([8, 20])
            pixels, digest = bytes(3 * side * side), rng.randbytes(DIGEST_BYTES)
            fields["images"] = (Image(2, 4, side, side, pixels, digest),)
        message = submit(number, arrival(now_s, request_class, length, 6), **fields)
        without = tuple(map(without_pixels, message.images))
        refusal = asked.refusal(
            FrontendId(0), msgspec.structs.replace(message, images=without), now_s
        )
        event = FromFrontend(FrontendId(0), message)
        news = asked.on_message(event, now_s)
        assert news == other.on_message(event, now_s)
        ends = {delta.request_id: delta for each in news for delta in each.message.requests}
        own = ends.get(RequestId(number))
        found = None if own is None else Refusal(own.error, own.retry_after_s, own.max_tokens)
        if len(ends) > 1 and own is not None:  # others left, which was not enough
            assert (refusal, own.error) == (None, ErrorCode.QUEUE_FULL)
        else:
            assert refusal == found
            told[found and found.error] += 1
        if rng.random() < 0.15:
            planned = [core.plan(now_s) for core in (asked, other)]
            if isinstance(planned[0], PlannedStep):
                plans = [
                    core.commit(step, now_s)
                    for core, step in zip((asked, other), planned, strict=True)
                ]
                assert plans[0] == plans[1]
                rows = [RowResult(row.row, [7]) for row in plan_rows(plans[0]) if row.output]
                for core in (asked, other):
                    core.on_result(pack_results(plans[0], rows, exec_s=0.02), now_s)
    asked.check_integrity()
    assert set(told) == {
        None,
        ErrorCode.TOO_LARGE,
        ErrorCode.QUEUE_FULL,
        ErrorCode.REQUEST_QUOTA,
        ErrorCode.TOKEN_QUOTA,
    }, told
