"""Turns of keys without deadlines, in virtual time by the real core: seats, long prompts, order."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from support.core_scenes import Arrival, make_core, submit
from support.policy_scenes import make_request

from lightserve.messages.frontend_router import Client
from lightserve.messages.router_worker import StepPlan, plan_rows
from lightserve.router.accounts import Account, Accounts
from lightserve.router.events import FromFrontend, WorkersReady
from lightserve.router.policies.unified import UnifiedOptions
from lightserve.router.request import Request
from lightserve.router.seats import SEAT_KEPT_S, Seats, in_turn
from lightserve.sim.simulation import Outcome, Simulation, TimedEvent
from lightserve.sim.worker import SimulatedWorker
from lightserve.types import NO_SLO, SLO, FrontendId, RequestClass

RT, BE = RequestClass.RT, RequestClass.BE
ALICE, BOB, CAROL = Client(key="a"), Client(key="b"), Client(key="c")
ROWS, LONG, CONTEXT = 6, 200, 1200
TURNS = ("unified", "priority")
BY_ARRIVAL = ("fcfs", "chunked")


def step_time(plan: StepPlan) -> float:
    return 0.01 + 0.0001 * sum(row.num_tokens for row in plan_rows(plan))


class Scene:
    """A core and its worker; requests of several keys."""

    def __init__(self, policy: str, *, num_slots: int = 20_000) -> None:
        self.core = make_core(policy, budget=64, max_model_len=CONTEXT, max_num_seqs=ROWS)
        if policy == "unified":
            options = UnifiedOptions(long_prompt_tokens=LONG)
            self.core._config.policy._options = options
        worker = SimulatedWorker(num_slots=num_slots, max_num_seqs=ROWS, max_model_len=CONTEXT)
        self.simulation = Simulation(self.core, worker, step_time, WorkersReady(num_slots))
        self._num_sent = 0
        self._events: list[TimedEvent] = []

    def send(
        self,
        client: Client,
        *,
        at_s: float = 0.0,
        of: RequestClass = RT,
        prompt: int = 8,
        output: int = 2,
        slo: SLO = NO_SLO,
    ) -> int:
        number = self._num_sent
        self._num_sent += 1
        arrival = Arrival(at_s, prompt, output, output, request_class=of)
        tokens = [3 + number] * prompt
        message = submit(number, arrival, client=client, prompt=tokens, slo=slo)
        self._events.append(TimedEvent(at_s, FromFrontend(FrontendId(0), message)))
        return number

    def run(self, until_s: float = float("inf")) -> None:
        events, self._events = self._events, []
        self.simulation.run(events, until_s=until_s)
        self.core.check_integrity()

    def outcome(self, number: int) -> Outcome:
        (found,) = [o for k, o in self.simulation.outcomes.items() if k.request_id == number]
        return found

    def first_s(self, number: int) -> float:
        times = self.outcome(number).token_times_s
        return times[0] if times else float("inf")


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize("of", [RT, BE])
@pytest.mark.parametrize("policy", TURNS)
def test_one_without_a_seat_gets_that_of_a_key_that_holds_all(
    policy: str, of: RequestClass
) -> None:
    scene = Scene(policy)
    held = [scene.send(ALICE, of=of, output=900) for _ in range(2 * ROWS)]
    asked = scene.send(BOB, at_s=1.0, of=of)
    scene.run()
    assert scene.first_s(asked) < 1.2
    assert scene.core.counters[of].num_pauses == 1
    for number in held:  # nothing of them is lost
        assert len(scene.outcome(number).token_ids) == 900
    assert scene.core.num_preempted_tokens == 0


@pytest.mark.parametrize("policy", BY_ARRIVAL)
def test_others_keep_the_order_of_arrival(policy: str) -> None:
    scene = Scene(policy)
    held = [scene.send(ALICE, output=300) for _ in range(2 * ROWS)]
    asked = scene.send(BOB, at_s=1.0)
    scene.run()
    assert scene.first_s(asked) > max(map(scene.first_s, held))
    assert scene.core.counters[RT].num_pauses == 0


@pytest.mark.parametrize("policy", TURNS)
def test_a_best_effort_request_gives_up_its_seat_first(policy: str) -> None:
    scene = Scene(policy)
    for of in (RT, RT, RT, BE, BE, BE):
        scene.send(ALICE, of=of, output=900)
    asked = scene.send(BOB, at_s=1.0)
    scene.run()
    assert scene.first_s(asked) < 1.2
    assert scene.core.counters[RT].num_pauses == 0 and scene.core.counters[BE].num_pauses == 1


@pytest.mark.parametrize("policy", TURNS)
def test_a_key_that_has_a_seat_is_owed_no_other(policy: str) -> None:
    scene = Scene(policy)
    for _ in range(ROWS):
        scene.send(ALICE, output=900)
    for _ in range(3):
        scene.send(BOB, at_s=1.0, output=900)
    scene.run(until_s=3.0)
    assert scene.core.counters[RT].num_pauses == 1


def test_a_request_gives_up_its_seat_once_in_a_while() -> None:
    """Short requests come one after the other: each pauses another one, until all have been."""
    scene = Scene("unified")
    for _ in range(ROWS):
        scene.send(ALICE, output=1000)
    times = [1.0 + 0.3 * n for n in range(ROWS + 2)]
    asked = [scene.send(BOB, at_s=at_s) for at_s in times]
    scene.run(until_s=SEAT_KEPT_S + 0.9)
    # All but the oldest have given theirs up, and keep it now.
    assert scene.core.counters[RT].num_pauses == ROWS - 1
    waits_s = [scene.first_s(n) - at_s for n, at_s in zip(asked, times, strict=True)]
    assert all(wait_s < 0.2 for wait_s in waits_s[: ROWS - 1])
    assert waits_s[ROWS - 1] > 2.0
    scene.run()
    assert all(len(scene.outcome(n).token_ids) == 2 for n in asked)


def test_clients_behind_a_gateway_have_its_seats() -> None:
    scene = Scene("unified")
    one, two = (Client(key="g", fairness_id=name) for name in "12")
    for _ in range(ROWS):
        scene.send(one, output=900)
    asked = scene.send(two, at_s=1.0)
    scene.run(until_s=2.0)
    assert scene.first_s(asked) < 1.2


def test_one_without_a_seat_gets_memory_that_a_key_holds_all_of() -> None:
    scene = Scene("unified", num_slots=1000)
    for _ in range(ROWS):
        scene.send(ALICE, prompt=150, output=400)
    asked = scene.send(BOB, at_s=4.0, prompt=60)
    scene.run()
    assert scene.first_s(asked) < 4.5


# ---------------------------------------------------------------- prompts


@pytest.mark.parametrize("of", [RT, BE])
@pytest.mark.parametrize("policy", TURNS)
def test_a_short_prompt_does_not_wait_for_long_ones_of_another_key(
    policy: str, of: RequestClass
) -> None:
    scene = Scene(policy)
    flood = [scene.send(ALICE, of=of, prompt=1000) for _ in range(24)]
    asked = scene.send(BOB, at_s=0.1, of=of)
    scene.run()
    assert scene.first_s(asked) < min(map(scene.first_s, flood))


def test_one_long_prompt_at_once_is_a_rule_within_a_key() -> None:
    """Those of two keys go on beside each other; the second one of a key waits for its first."""
    scene = Scene("unified")
    a = [scene.send(ALICE, prompt=1000) for _ in range(3)]
    b = [scene.send(BOB, prompt=1000) for _ in range(3)]
    started: list[tuple[int, int]] = []
    scene.run(until_s=0.3)
    started = [(r.key.request_id, r.num_computed_tokens) for r in scene.core.running]
    assert {number for number, _ in started} == {a[0], b[0]}
    assert abs(started[0][1] - started[1][1]) <= 128
    scene.run()
    order = sorted([*a, *b], key=scene.first_s)
    for pair in (order[0:2], order[2:4], order[4:6]):  # so the keys' prompts end in turn
        assert len([number for number in pair if number in a]) == 1


def test_long_prompts_of_one_key_are_as_before() -> None:
    scene = Scene("unified")
    numbers = [scene.send(ALICE, prompt=1000) for _ in range(3)]
    scene.run(until_s=0.2)
    assert len(scene.core.running) == 1
    scene.run()
    assert sorted(numbers, key=scene.first_s) == numbers


@pytest.mark.parametrize("policy", TURNS)
def test_many_keys_share_what_there_is(policy: str) -> None:
    """Eight keys, one of which sends thirty times as much: others have as much as it has."""
    scene = Scene(policy)
    crowd = [Client(key=f"k{number}") for number in range(8)]
    numbers = {client: list[int]() for client in crowd}
    for _ in range(200):
        numbers[crowd[0]].append(scene.send(crowd[0], prompt=60, output=20))
    for _ in range(12):
        for client in crowd[1:]:
            numbers[client].append(scene.send(client, prompt=60, output=20))
    scene.run(until_s=2.5)
    had = [sum(len(scene.outcome(n).token_ids) for n in of_one) for of_one in numbers.values()]
    assert sum(had) > 700 and max(had) < 1.5 * min(had)


# ---------------------------------------------------------------- late ones


def test_late_requests_of_different_keys_take_turns() -> None:
    scene = Scene("unified")
    slo = SLO(ttft_ms=20.0)
    a = [scene.send(ALICE, prompt=100, slo=slo) for _ in range(20)]
    b = [scene.send(BOB, at_s=0.05, prompt=100, slo=slo) for _ in range(5)]
    scene.run()
    order = sorted([*a, *b], key=scene.first_s)
    assert max(map(order.index, b)) < 14
    assert all(outcome.error is None for outcome in scene.simulation.outcomes.values())


# ---------------------------------------------------------------- the parts


def owned(number: int, account: Account, of: RequestClass = RT, **fields: int) -> Request:
    request = make_request(number, of, **fields)
    request.account = account
    return request


def accounts_of(*clients: Client) -> list[Account]:
    accounts = Accounts()
    return [accounts.find(client, RT) for client in clients]


def numbers_of(requests: Iterable[Request]) -> list[int]:
    return [request.arrival_number for request in requests]


def test_seats_go_round() -> None:
    alice, bob = accounts_of(ALICE, BOB)
    running = [owned(n, alice, computed=8) for n in range(4)]
    running += [owned(n, bob, computed=8) for n in (4, 5)]
    assert numbers_of(Seats(running).in_order(running)) == [0, 4, 1, 5, 2, 3]
    alone = Seats(running[:4])
    assert not alone.is_shared and alone.in_order(running[:4]) == running[:4]


def test_behind_a_key_each_client_has_a_seat_before_any_has_two() -> None:
    one, two, bob = accounts_of(
        Client(key="g", fairness_id="1"), Client(key="g", fairness_id="2"), BOB
    )
    running = [owned(n, one, computed=8) for n in range(3)]
    running += [owned(3, two, computed=8), owned(4, bob, computed=8), owned(5, bob, computed=8)]
    assert numbers_of(Seats(running).in_order(running)) == [0, 4, 3, 5, 1, 2]


@pytest.mark.parametrize("num_held", [1, 2])
def test_a_seat_is_owed_where_another_has_two(num_held: int) -> None:
    alice, bob = accounts_of(ALICE, BOB)
    running = [owned(n, alice, computed=8) for n in range(num_held)]
    head = owned(9, bob)
    seats = Seats(running, {RT: [head]}, 100.0)
    assert seats.is_shared and list(seats.owed) == ([head] if num_held > 1 else [])
    seats = Seats([*running, owned(8, bob, computed=8)], {RT: [head]}, 100.0)
    assert not seats.owed


def test_a_seat_that_was_given_up_of_late_is_kept() -> None:
    alice, bob = accounts_of(ALICE, BOB)
    running = [owned(n, alice, computed=8) for n in range(3)]
    running[2].gave_seat_s = 10.0
    head, of_batch = owned(9, bob), owned(10, bob, BE)
    seats = Seats(running, {RT: [head]}, 10.0 + SEAT_KEPT_S / 2)
    assert seats.keeps(running[2], head) and not seats.keeps(running[1], head)
    assert not seats.keeps(running[2], of_batch) and not seats.keeps(running[2], None)
    assert not seats.keeps(running[2], running[0])  # which runs: memory that it needs to go on
    assert not Seats(running, {RT: [head]}, 10.0 + SEAT_KEPT_S).keeps(running[2], head)


def test_the_account_that_has_had_least_goes_first_each_time() -> None:
    alice, bob, carol = accounts_of(ALICE, BOB, CAROL)
    alice.charge(25, 0)
    bob.charge(12, 0)
    of = {
        a: [owned(10 * i + n, a, prompt=10) for n in range(3)] for i, a in enumerate((alice, bob))
    }
    of[carol] = [owned(20, carol, prompt=10), owned(21, carol, prompt=100), owned(22, carol)]
    assert numbers_of(in_turn({a: iter(r) for a, r in of.items()})) == [
        20, 21, 10, 11, 0, 12, 1, 2, 22,
    ]  # fmt: skip


def test_where_none_waits_a_newcomer_has_as_much_as_any() -> None:
    """One request that has run for long saves up no share for others of its key."""
    alice, bob, carol = accounts_of(ALICE, BOB, CAROL)
    for account in (alice, bob):
        account.hold()
        account.wait(5)
        account.leave(5)
    alice.charge(1000, 0)
    bob.charge(10, 0)
    carol.hold()
    carol.wait(5)
    assert carol.rank[0] == 1000.0
    bob.wait(5)
    assert bob.rank[0] == 1000.0
