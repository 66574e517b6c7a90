"""The queue: order, ages, late ones, and which best-effort requests are worth asking."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.core_scenes import NUM_SLOTS, Arrival, make_core, make_simulation, submit
from support.grids import choose, more_when_long

from lightserve.router.events import FromFrontend
from lightserve.router.from_submit import request_of
from lightserve.router.kv import prefix_tree
from lightserve.router.kv.cache import KVOptions, KVStore
from lightserve.router.kv.prefix_node import PrefixNode, task_aware
from lightserve.router.kv.prefix_tree import MAX_VISITS, PrefixTree
from lightserve.router.policies import POLICIES
from lightserve.router.queue import (
    MAX_CANDIDATES,
    MIN_CHUNK,
    OLDEST_EVERY,
    Backlog,
    WaitingQueue,
    prefix_in_flight,
)
from lightserve.router.request import Parameters, Request
from lightserve.router.slo import TokenDeadlines
from lightserve.sim.simulation import TimedEvent
from lightserve.types import (
    SLO,
    FrontendId,
    RequestClass,
    RequestId,
    RequestKey,
    SamplingParams,
)

RT, BE = RequestClass.RT, RequestClass.BE
SALTS = ("", "s")
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=12)
ttfts = st.sampled_from([None, 100.0, 200.0, 200.0, 1000.0])


def make_request(
    number: int,
    tokens: list[int],
    salt: str = "",
    *,
    request_class: RequestClass = BE,
    priority: int = 0,
) -> Request:
    return Request(
        key=RequestKey(FrontendId(0), RequestId(number)),
        prompt_token_ids=np.array(tokens, dtype=np.int32),
        max_tokens=4,
        eos_token_ids=frozenset(),
        sampling=SamplingParams(),
        request_class=request_class,
        arrival_s=0.0,
        arrival_number=number,
        priority=priority,
        prefix_salt=salt,
    )


def arriving(number: int, priority: int, request_class: RequestClass = RT) -> Request:
    return make_request(number, [1] * 5, request_class=request_class, priority=priority)


def due(
    number: int, ttft_ms: float | None, *, priority: int = 0, arrival_s: float = 0.0
) -> Request:
    request = arriving(number, priority)
    request.deadlines = TokenDeadlines(SLO(ttft_ms=ttft_ms), arrival_s)
    return request


def resident(tree: PrefixTree, tokens: list[int], salt: str = "") -> None:
    """These tokens were computed, and are cached."""
    array = np.array(tokens, dtype=np.int32)
    lease, slots = tree.acquire(salt, array, is_real_time=False)
    rest = array[len(slots) :]
    tree.extend(lease, rest, np.arange(len(rest), dtype=np.int32) + 1000 * len(tokens))
    tree.release(lease)


class Scene:
    """A queue and a store, which are told of the same requests as the core tells them."""

    def __init__(self) -> None:
        self.queue = WaitingQueue()
        self.kv = KVStore(1000, KVOptions(cache_order=task_aware))
        assert self.kv.tree is not None
        self.tree = self.kv.tree

    def append(self, request: Request) -> None:
        self.queue.append(request)
        self.kv.expect(request)

    def remove(self, request: Request) -> None:
        self.queue.remove(request)
        self.kv.forget(request)

    def candidates(self, context_len: float, limit: int = 64) -> list[Request]:
        return self.queue.candidates(self.tree, context_len=context_len, limit=limit)


# ---------------------------------------------------------------- order


def _order(request: Request) -> tuple[int, float, int]:
    assert request.deadlines is not None
    due_s = request.deadlines.deadline_of_next_token
    return request.priority, due_s, request.arrival_number


@given(
    st.lists(st.tuples(st.sampled_from(["append", "admit", "remove"]), st.integers(0, 50), ttfts))
)
def test_against_a_sorted_list(steps: list[tuple[str, int, float | None]]) -> None:
    """Overtaken is what waited, and before, when a request was admitted."""
    queue, model, ages = WaitingQueue(), list[Request](), dict[int, int]()
    for number, (what, value, ttft_ms) in enumerate(steps):
        if what == "append":
            request = due(number, ttft_ms, priority=value % 4 - 2, arrival_s=0.01 * number)
            queue.append(request)
            model = sorted([*model, request], key=_order)
            ages[number] = 0
        elif model:
            request = model.pop(index := value % len(model))
            if what == "admit":
                queue.admit(request)
                for before in model[:index]:
                    ages[before.arrival_number] += 1
            else:
                queue.remove(request)
            with pytest.raises(KeyError):
                queue.remove(request)
        assert list(queue.real_time()) == model
        assert len(queue) == queue.backlog(RT).num_requests == len(model)
        assert [r.num_overtaken for r in model] == [ages[r.arrival_number] for r in model]


def test_few_are_told_that_they_were_overtaken() -> None:
    """However many wait: those whose turn is near."""
    queue = WaitingQueue()
    requests = [arriving(number, 0, BE) for number in range(3 * MAX_CANDIDATES)]
    for request in requests:
        queue.append(request)
    queue.admit(requests[-1])
    overtaken = [request.num_overtaken for request in requests]
    assert overtaken == [1] * MAX_CANDIDATES + [0] * (2 * MAX_CANDIDATES)


def test_reading_changes_nothing() -> None:
    scene = Scene()
    requests = [arriving(number, 0, BE) for number in range(20)]
    for request in requests:
        scene.append(request)
    scene.queue.admit(requests[3])
    before = [request.num_overtaken for request in requests]
    assert next(iter(scene.queue)) is requests[0] and scene.candidates(4.0)
    assert next(scene.queue.best_effort(scene.queue.turn(), scene.tree, 4.0)) is requests[0]
    assert [request.num_overtaken for request in requests] == before == [1] * 3 + [0] * 17


def test_an_urgent_one_that_came_later_goes_first_and_late_ones_last() -> None:
    waiting = WaitingQueue()
    patient, urgent, best_effort = due(0, 500.0), due(1, 100.0), arriving(2, 0, BE)
    for request in (patient, urgent, best_effort):
        waiting.append(request)
    assert list(waiting.real_time()) == [urgent, patient]
    assert list(waiting) == [urgent, patient, best_effort]
    assert not list(waiting.late())
    waiting.sink_late(0.2)
    assert list(waiting.real_time()) == [patient, urgent]
    assert list(waiting.late()) == [urgent]
    waiting.admit(urgent)
    assert patient.num_overtaken == 1, "late ones are behind all others"
    waiting.admit(patient)
    assert list(waiting) == [best_effort]
    assert len(waiting) == 1


def test_what_would_start_last_makes_room_in_a_full_queue() -> None:
    def prompt(number: int, num_tokens: int, ttft_ms: float | None = 100, **more: int) -> Request:
        request = make_request(number, [1] * num_tokens, request_class=RT, **more)
        request.slo = SLO(ttft_ms=ttft_ms)
        request.deadlines = TokenDeadlines(request.slo, arrival_s=0.0)
        return request

    queue = WaitingQueue()
    important, choice = prompt(3, 99, priority=-1), prompt(4, 99)
    choice.is_first = False
    for request in (prompt(0, 9), prompt(1, 7), prompt(2, 99, None), important, choice):
        queue.append(request)

    def goes_for(request: Request, *, by_length: bool = True, most: int = 1000) -> int | None:
        def has_room(backlog: Backlog, num_tokens: int) -> bool:
            return backlog.num_requests < 6 and backlog.num_tokens + num_tokens <= most

        last = queue.last_to_start(request, has_room, by_length=by_length)
        return None if last is None else last.arrival_number

    assert goes_for(prompt(5, 8)) == 0
    assert goes_for(prompt(5, 8), most=311) is None, "it would not be enough"
    assert goes_for(prompt(5, 8), by_length=False) is None, "there is time for all"
    assert goes_for(prompt(5, 9)) is None, "they are alike: the newer one"
    assert goes_for(prompt(5, 8, None)) is None, "nothing is due of it: it is the last"
    assert goes_for(prompt(5, 8, priority=-2)) == 3, "what is less important may go"
    assert goes_for(make_request(5, [1], request_class=BE)) is None
    queue.remove(important)
    queue.append(prompt(6, 1, 20))
    queue.sink_late(0.05)
    assert goes_for(prompt(7, 99), by_length=False) == 6
    assert goes_for(prompt(7, 99, priority=-1)) == 6
    assert goes_for(prompt(7, 99, priority=1), by_length=False) is None, "it is less important"


def test_priority_orders_what_never_ran() -> None:
    """Requests that were put back stand before all of their class, whatever their priority."""
    queue = WaitingQueue()
    requests = [
        arriving(number, priority, request_class)
        for request_class in RequestClass
        for number, priority in enumerate((0, 5, -5, 0, 5))
    ]
    random.Random(3).shuffle(requests)
    requests.sort(key=lambda request: request.arrival_number)
    put_back = [arriving(9, 7, request_class) for request_class in RequestClass]
    for request in requests:
        queue.append(request)
    queue.requeue(put_back)
    numbers = [9, 2, 0, 3, 1, 4]
    assert [request.arrival_number for request in queue.real_time()] == numbers
    best_effort = queue.best_effort(queue.turn(), None, 0.0)
    assert [request.arrival_number for request in best_effort] == numbers
    both = [request.arrival_number for request in queue]
    assert both == [9, 9, 2, 2, 0, 0, 3, 3, 1, 1, 4, 4]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("request_class", RequestClass)
def test_under_every_policy_lower_numbers_start_first(
    policy: str, request_class: RequestClass
) -> None:
    """Six requests arrive together; the first is alone then, and starts."""
    simulation = make_simulation(make_core(policy, budget=NUM_SLOTS // 6))
    arrival = Arrival(0.0, 15, 4, 4, request_class=request_class)
    priorities = [9, 4, 0, -2, 3, -1]
    messages = [submit(number, arrival, priority=p) for number, p in enumerate(priorities)]
    frontend_id = FrontendId(0)
    simulation.run([TimedEvent(0.0, FromFrontend(frontend_id, m)) for m in messages])
    first_s = {
        priorities[message.request_id]: simulation.outcomes[
            RequestKey(frontend_id, message.request_id)
        ].token_times_s[0]
        for message in messages
    }
    order = [9, -2, -1, 0, 3, 4]
    times = [first_s[priority] for priority in order]
    assert times == sorted(times)
    assert len(set(times)) >= 4


def test_the_router_keeps_what_a_message_says() -> None:
    slo = SLO(ttft_ms=5.0, mtpot_ms=7.0)
    message = submit(3, Arrival(0.0, 8, 4, 4), priority=-7, slo=slo)
    request = request_of(
        *(FrontendId(0), message, Parameters()),
        now_s=1.0,
        arrival_number=0,
        admission_limit=None,
    )
    assert (request.priority, request.slo) == (-7, slo)


# ---------------------------------------------------------------- by what is cached


class PoolMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.scene = Scene()
        self.model: list[Request] = []
        self.others: list[Request] = []
        self.numbers = itertools.count()

    @rule(tokens=prompts, salt=st.sampled_from(SALTS))
    def append(self, tokens: list[int], salt: str) -> None:
        request = make_request(next(self.numbers), tokens, salt)
        self.scene.append(request)
        self.model.append(request)

    @rule(tokens=prompts, salt=st.sampled_from(SALTS), was_paused=st.booleans())
    def append_other(self, tokens: list[int], salt: str, was_paused: bool) -> None:
        """One that wants the same prefixes, but does not start in any order."""
        request = make_request(next(self.numbers), tokens, salt, request_class=RT)
        if was_paused:
            request.request_class, request.num_requeues = BE, 1
        self.scene.kv.expect(request)
        self.others.append(request)

    @precondition(lambda self: self.model)
    @rule(index=st.integers(0, 50))
    def remove(self, index: int) -> None:
        self.scene.remove(self.model.pop(index % len(self.model)))

    @precondition(lambda self: self.others)
    @rule(index=st.integers(0, 50))
    def remove_other(self, index: int) -> None:
        self.scene.kv.forget(self.others.pop(index % len(self.others)))

    @rule(tokens=prompts, salt=st.sampled_from(SALTS))
    def compute(self, tokens: list[int], salt: str) -> None:
        resident(self.scene.tree, tokens, salt)

    @rule(count=st.integers(1, 8))
    def evict(self, count: int) -> None:
        self.scene.tree.evict(count)

    def num_shared(self, request: Request) -> int:
        key = request.prefix_salt
        return self.scene.tree.look_up(key, request.prompt_token_ids).num_tokens

    @rule(limit=st.integers(1, 40))
    def candidates(self, limit: int) -> None:
        found = self.scene.candidates(4.0, limit)
        assert len(found) == len(set(found)) == min(limit, len(self.model))
        assert set(found) <= set(self.model)
        if not self.model:
            return
        shared = [self.num_shared(request) for request in self.model]
        if max(shared) > 0 and limit > 1:
            assert self.num_shared(found[0]) == max(shared)
        elif max(shared) == 0:
            assert found == self.model[:limit]
        sharing = [self.num_shared(request) for request in found]
        end = found.index(self.model[0]) if self.model[0] in found else len(found)
        assert sharing[:end] == sorted(sharing[:end], reverse=True)

    @invariant()
    def those_who_share_are_found_once_each(self) -> None:
        if hasattr(self, "scene"):
            found = [one for salt in SALTS for one in self.scene.tree.waiting(salt)]
            assert sorted((shared, r.arrival_number) for shared, r in found) == sorted(
                (self.num_shared(r), r.arrival_number) for r in self.model if self.num_shared(r)
            )


TestPool = more_when_long(PoolMachine.TestCase)
TestPool.settings = settings(max_examples=choose(40, 100), stateful_step_count=40, deadline=None)


def test_prompts_as_long_as_what_runs_go_first() -> None:
    """Among those that share as much (regular batches)."""
    scene = Scene()
    resident(scene.tree, [7, 7, 7, 7])
    scene.append(make_request(0, [1]))
    for number, length in enumerate((4, 40, 400), start=1):
        scene.append(make_request(number, [7, 7, 7, 7, *[number] * length]))
    by_context = {
        context_len: scene.candidates(context_len)[0].arrival_number
        for context_len in (8.0, 44.0, 404.0)
    }
    assert by_context == {8.0: 1, 44.0: 2, 404.0: 3}


def test_every_sixteenth_is_the_oldest() -> None:
    """A stream of requests that all share what is resident, and one that shares nothing."""
    scene = Scene()
    queue = scene.queue
    resident(scene.tree, [7] * 8)
    numbers = itertools.count()
    scene.append(make_request(next(numbers), [1, 2, 3]))
    order: list[int] = []
    for _ in range(200):
        scene.append(make_request(next(numbers), [7] * 8 + [9]))
        request = next(queue.best_effort(queue.turn(), scene.tree, 8.0))
        queue.admit(request)
        scene.kv.forget(request)
        order.append(request.arrival_number)
    assert order.index(0) == OLDEST_EVERY - 1
    assert order[0] == 1, "sharing goes first"


@pytest.mark.parametrize("num_shared", [1, 5])
def test_an_answer_looks_at_few_nodes(monkeypatch: pytest.MonkeyPatch, num_shared: int) -> None:
    """However many prompts share something, and with however many."""
    scene = Scene()
    for number in range(3 * MAX_VISITS):
        start = [number] * num_shared if number % 2 else [7] * num_shared
        scene.append(make_request(number, [*start, 5000 + number, *[1] * (number % 40)]))
        resident(scene.tree, start)
    visited: list[PrefixNode] = []
    requests: list[Request] = []
    residents, waiting = prefix_tree.awaited_residents, prefix_tree.waiting_from

    def looked_at(node: PrefixNode) -> object:
        visited.append(node)
        return residents(node)

    def compared(node: PrefixNode) -> object:
        for request in waiting(node):
            requests.append(request)
            yield request

    monkeypatch.setattr(prefix_tree, "awaited_residents", looked_at)
    monkeypatch.setattr(prefix_tree, "waiting_from", compared)
    found = scene.candidates(30.0)
    assert len(visited) <= MAX_VISITS and len(requests) <= MAX_CANDIDATES
    assert len(found) == 64 and 16 <= found[0].num_prompt_tokens < 32, "near to the context"


@pytest.mark.parametrize(
    ("num_common", "num_found", "salt", "expected"),
    [
        (100, 0, "", 100),
        (100, 60, "", 40),
        (100, 100 - MIN_CHUNK + 1, "", 0),
        (MIN_CHUNK - 1, 0, "", 0),
        (100, 0, "s", 0),
    ],
)
def test_prefixes_in_flight(num_common: int, num_found: int, salt: str, expected: int) -> None:
    waiting = make_request(0, [5] * num_common + [1] * 50)
    running = [make_request(1, [9] * 200), make_request(2, [5] * num_common + [2] * 50, salt)]
    assert prefix_in_flight(waiting, num_found, running) == expected


def test_a_request_that_computes_its_whole_prompt_waits_for_no_prefix() -> None:
    """Others with its prefix may be on their way all the time."""
    waiting = make_request(0, [5] * 100)
    waiting.sampling = SamplingParams(num_prompt_logprobs=0)
    assert prefix_in_flight(waiting, 0, [make_request(1, [5] * 100)]) == 0
