"""Which requests give memory and rows to which: scenes of a full pool."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from lightserve.router.kv.cache import KVOptions, KVStore, Preemption
from lightserve.router.kv.prefix_node import task_aware
from lightserve.router.memory_plan import MemoryPlan
from lightserve.router.request import Request, RequestState
from lightserve.router.request_table import RequestTable
from lightserve.router.step import Scheduled, each_scheduled
from lightserve.types import FrontendId, RequestClass, RequestId, RequestKey, SamplingParams

RT, BE = RequestClass.RT, RequestClass.BE


@dataclass(frozen=True)
class Actor:
    """A request of a scene: letters for running, paused and new ones, and what they hold."""

    name: str
    request_class: RequestClass
    held: int = 0
    state: str = "running"
    wants: int = 1


def make_request(number: int, actor: Actor) -> Request:
    return Request(
        key=RequestKey(FrontendId(0), RequestId(number)),
        prompt_token_ids=np.full(max(actor.held, actor.wants, 1), number, dtype=np.int32),
        max_tokens=50,
        eos_token_ids=frozenset(),
        sampling=SamplingParams(),
        request_class=actor.request_class,
        arrival_s=0.0,
        arrival_number=number,
    )


def play(
    actors: list[Actor],
    num_slots: int,
    *,
    preemption: Preemption = Preemption.CHECKPOINT,
    num_rows: int = 10,
    is_class_aware: bool = True,
) -> tuple[dict[str, int], dict[str, int], list[str], list[str]]:
    """Let all requests that want something move, in the given order; holders come as they stand.

    Returns by name: tokens moved, tokens taken; then who stops and who is dropped.
    """
    num_running = len([actor for actor in actors if actor.state == "running"])
    table = RequestTable(num_rows + num_running)
    kv = KVStore(num_slots, KVOptions(preemption=preemption), num_host_slots=1000)
    requests: dict[str, Request] = {}
    for number, actor in enumerate(actors):
        request = requests[actor.name] = make_request(number, actor)
        if actor.state == "new":
            continue
        request.slots = np.empty(request.max_known_tokens, dtype=np.int32)
        request.slots[: actor.held] = kv.acquire([(request, actor.held)])
        request.num_computed_tokens = actor.held
        request.output_token_ids = [1]
        request.state = RequestState.RUNNING
        if actor.state == "running":
            table.acquire(request)
        if actor.state == "paused":
            request.pause()
    holders = [requests[actor.name] for actor in actors if actor.state != "new"]
    wanted = [Scheduled(requests[a.name], a.wants) for a in actors if a.wants]
    memory = MemoryPlan(kv, table, lambda: holders, kv.look_up, 0, is_class_aware=is_class_aware)
    for part in wanted:
        memory.place(part)
    return summary(memory, {request: name for name, request in requests.items()})


def summary(
    memory: MemoryPlan, names: dict[Request, str]
) -> tuple[dict[str, int], dict[str, int], list[str], list[str]]:
    moved = {names[request]: count for request, count in each_scheduled(memory.parts)}
    changes = memory.changes()
    taken = {names[request]: count for request, count in changes.checkpointed}
    return moved, taken, [names[r] for r in changes.paused], [names[r] for r in changes.preempted]


def test_memory_for_all() -> None:
    actors = [Actor("a", RT, 10), Actor("b", BE, 10, wants=5), Actor("c", BE, state="new", wants=4)]
    assert play(actors, 30) == ({"a": 1, "b": 5, "c": 4}, {}, [], [])


def test_the_last_admitted_gives_as_little_as_is_needed() -> None:
    actors = [Actor("a", RT, 10, wants=4), Actor("b", BE, 10, wants=0), Actor("c", BE, 10)]
    assert play(actors, 30) == ({"a": 4}, {"c": 4}, ["c"], [])


def test_paused_ones_give_before_running_ones() -> None:
    actors = [
        Actor("a", RT, 10, wants=12),
        Actor("b", BE, 10),
        Actor("p", BE, 10, "paused", wants=0),
        Actor("q", BE, 5, "paused", wants=0),
    ]
    assert play(actors, 36) == ({"a": 12, "b": 1}, {"q": 5, "p": 7}, [], [])


def test_best_effort_gives_all_before_real_time_gives_anything() -> None:
    actors = [Actor("a", RT, 10, wants=12), Actor("z", RT, 10, wants=0), Actor("b", BE, 5, wants=0)]
    assert play(actors, 25) == ({"a": 5}, {"b": 5}, ["b"], [])
    actors = [Actor("a", RT, 20), Actor("z", RT, 10, wants=0)]
    assert play(actors, 30) == ({"a": 1}, {"z": 1}, ["z"], []), "the last resort"


def test_none_gives_to_its_junior() -> None:
    actors = [Actor("a", RT, 10), Actor("b", BE, 20), Actor("c", BE, state="new", wants=5)]
    assert play(actors, 30) == ({"a": 1}, {"b": 1}, ["b"], [])
    actors = [Actor("a", RT, 10, wants=0), Actor("b", BE, 20)]
    assert play(actors, 30) == ({}, {}, [], [])


def test_a_newcomer_takes_all_it_needs_or_nothing() -> None:
    actors = [Actor("n", RT, state="new", wants=15), Actor("b", BE, 20, wants=1)]
    assert play(actors, 20) == ({"n": 15}, {"b": 15}, ["b"], [])
    actors = [Actor("n", RT, state="new", wants=15), Actor("a", RT, 10), Actor("b", BE, 10)]
    assert play(actors, 22) == ({"a": 1, "b": 1}, {}, [], [])


def test_a_newcomer_finds_what_a_junior_did_not() -> None:
    """The last of the holders may miss memory before it is a real-time newcomer's turn."""
    actors = [Actor("b", BE, 10), Actor("c", BE, 10), Actor("n", RT, state="new", wants=5)]
    assert play(actors, 20) == ({"b": 1, "n": 5}, {"c": 6}, ["c"], [])
    actors = [Actor("c", BE, 20), Actor("n", RT, state="new", wants=5)]
    assert play(actors, 20) == ({"n": 5}, {"c": 5}, ["c"], [])


def test_a_paused_request_resumes_at_the_cost_of_those_behind_it() -> None:
    actors = [Actor("p", BE, 10, "paused", wants=6), Actor("q", BE, 10, "paused", wants=6)]
    assert play(actors, 20) == ({"p": 6}, {"q": 6}, [], [])


def test_policies_that_know_no_classes() -> None:
    actors = [Actor("b", BE, 10), Actor("a", RT, 10), Actor("n", RT, state="new", wants=5)]
    assert play(actors, 20, is_class_aware=False) == ({"b": 1}, {"a": 1}, ["a"], [])


def test_whole_requests() -> None:
    """Who stands before the victim moves with what the victim leaves over."""
    actors = [Actor("a", RT, 10, wants=4), Actor("b", BE, 10), Actor("c", BE, 10)]
    assert play(actors, 30, preemption=Preemption.RECOMPUTE) == (
        {"a": 4, "b": 1},
        {},
        ["c"],
        ["c"],
    )


def test_rows_come_from_best_effort_requests() -> None:
    """vLLM #40004: a full batch, not full memory, must not keep real-time requests out."""
    actors = [Actor("n", RT, state="new", wants=5), Actor("b", BE, 5), Actor("c", BE, 5)]
    assert play(actors, 100, num_rows=0) == ({"n": 5, "b": 1}, {}, ["c"], [])
    actors = [Actor("n", BE, state="new", wants=5), Actor("b", BE, 5)]
    assert play(actors, 100, num_rows=0) == ({"b": 1}, {}, [], [])


@pytest.mark.parametrize("held", [0, 3])
def test_copies_of_those_who_have_nothing_left_to_give_stay(held: int) -> None:
    """Real-time requests need more than all best-effort ones hold, and get that alone."""
    actors = [Actor("a", RT, 20, wants=9), Actor("b", BE, held, "paused", wants=0)]
    moved, taken, _, dropped = play(actors, 20 + held)
    assert moved == ({"a": held} if held else {})
    assert taken == ({"b": held} if held else {}) and dropped == []


def play_shared(
    holders: list[tuple[Actor, int]], wants: int
) -> tuple[dict[str, int], dict[str, int], list[str], list[str]]:
    """Let the first of some that fill the pool ask for slots; KV that is lost is not saved.

    With each comes how many of its tokens are like those of the others.
    """
    table = RequestTable(len(holders))
    requests: dict[str, Request] = {}
    kv = KVStore(100, KVOptions(cache_order=task_aware, preemption=Preemption.RECOMPUTE))
    for number, (actor, num_shared) in enumerate(holders):
        # Of what is paused the prompt is one token longer: all of a whole one is not looked for.
        is_whole = actor.state == "running"
        own = np.full(actor.held - num_shared + (not is_whole), 1000 + number, dtype=np.int32)
        request = requests[actor.name] = make_request(number, actor)
        request.prompt_token_ids = np.concatenate([np.arange(num_shared, dtype=np.int32), own])
        kv.start(request, kv.look_up(request))
        start, end = request.num_computed_tokens, actor.held
        assert request.slots is not None
        request.slots[start:end] = kv.acquire([(request, end - start)])
        request.num_computed_tokens, request.output_token_ids = end, [1]
        request.state = RequestState.RUNNING
        if is_whole:
            kv.learn_prompt(request)
            table.acquire(request)
        else:
            request.pause()
    kv.acquire([(make_request(99, Actor("other", RT)), kv.num_available)])
    memory = MemoryPlan(
        kv, table, lambda: list(requests.values()), kv.look_up, 0, is_class_aware=True
    )
    memory.place(Scheduled(requests[holders[0][0].name], wants))
    return summary(memory, {request: name for name, request in requests.items()})


def test_none_is_dropped_for_what_others_hold_too() -> None:
    """A paused request with one token, which the taker reads as well, brings nothing."""
    a, p = Actor("a", RT, 20), Actor("p", BE, 1, "paused")
    assert play_shared([(a, 20), (p, 1)], 1) == ({}, {}, [], [])
    c = Actor("c", BE, 4, "paused")
    assert play_shared([(a, 20), (p, 1), (c, 1)], 10) == ({"a": 3}, {}, [], ["c"])


def test_what_two_classes_share_is_free_once_both_have_lost_it() -> None:
    """Either alone would bring nothing: spared each for itself, they would wait for ever."""
    a, z, p = Actor("a", RT, 10), Actor("z", RT, 20), Actor("p", BE, 20, "paused")
    moved, _, stopped, dropped = play_shared([(a, 0), (z, 20), (p, 20)], 5)
    assert (moved, stopped, sorted(dropped)) == ({"a": 5}, ["z"], ["p", "z"])
